"""`mugrpo rollouts export`: write the responses of a run to files in the open format."""

import argparse

from mugrpo_jax.cli import arguments as shared


def add(commands: shared.Commands) -> None:
    """Add `mugrpo rollouts export` and its arguments to the program."""
    parser = shared.add_command(
        commands,
        "rollouts export",
        run,
        help="write a run's responses to JSON Lines or Parquet files",
        more="Each row is one response with its tokens, log-probs, reward, group and behavior. One file per "
        "complete stage. `mugrpo rollouts import` makes the same stage of it again, bit by bit.",
        example="mugrpo rollouts export runs/first --stage 0 --format jsonl --out exported",
    )
    shared.add_source_run(parser)
    parser.add_argument(
        "--format", choices=("jsonl", "parquet"), default="jsonl", help="kind of file (default: jsonl)"
    )
    parser.add_argument("--stage", type=shared.at_least(0), help="index of one stage (default: all complete)")
    parser.add_argument(
        "--out", type=shared.local_path, metavar="FOLDER", help="where to write (default: exported)"
    )


def run(arguments: argparse.Namespace) -> None:
    """Execute `mugrpo rollouts export` with the parsed arguments."""
    from pathlib import Path

    from mugrpo_jax.config import ConfigError
    from mugrpo_jax.rollouts import open_stage
    from mugrpo_jax.rollouts.export_rollouts import export_rollouts
    from mugrpo_jax.setup.stored_rollouts import is_stage, known_vocabulary, stage_folders

    folders = stage_folders(arguments.source, arguments.stage)
    complete = {number: folder for number, folder in folders.items() if is_stage(folder)}
    if not complete:
        raise ConfigError(f"{arguments.source}: no complete stage to export")
    out = arguments.out or Path("exported")
    for number, folder in complete.items():
        path = out / f"stage-{number:03d}.{arguments.format}"
        count = export_rollouts(open_stage(folder), path, vocab_size=known_vocabulary(arguments.source))
        print(f"{path}: {count:,} responses")
