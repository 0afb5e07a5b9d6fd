"""`mugrpo export`: write a checkpoint of a run as a Hugging Face folder."""

import argparse

from mugrpo_jax.cli import arguments as shared


def add(commands: shared.Commands) -> None:
    """Add `mugrpo export` and its arguments to the program."""
    parser = shared.add_command(
        commands,
        "export",
        run,
        help="write a run's checkpoint as a Hugging Face folder",
        more="`transformers` can load the folder. One process is enough, also for a run of several hosts; "
        "if the weights do not fit on its devices, start the command on several hosts.",
        example="mugrpo export runs/first models/first --best --dtype bfloat16",
    )
    shared.add_source_run(parser)
    parser.add_argument("out", type=shared.local_path, help="the folder to write")
    shared.add_checkpoint(parser)
    parser.add_argument("--dtype", help="float32, bfloat16 or float16 (default: float32, as trained)")
    shared.add_hosts(parser)


def run(arguments: argparse.Namespace) -> None:
    """Execute `mugrpo export` with the parsed arguments."""
    from mugrpo_jax.runs import progress
    from mugrpo_jax.setup.trained_model import export

    with shared.join_hosts(arguments):
        export(
            arguments.source, arguments.out, step=arguments.step, best=arguments.best, dtype=arguments.dtype
        )
        progress.say(f"{arguments.out}: written")
