"""The command line, one module per command: `add` adds its argument parser, `run` executes the command."""
