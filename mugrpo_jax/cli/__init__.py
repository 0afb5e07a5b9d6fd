"""The command line, one file per command: `add` makes its parser, `run` runs it."""
