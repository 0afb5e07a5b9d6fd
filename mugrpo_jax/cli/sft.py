"""`mugrpo sft`: run only the supervised warm start of a config."""

import argparse

from mugrpo_jax.cli import arguments as shared


def add(commands: shared.Commands) -> None:
    """Add `mugrpo sft` and its arguments to the program."""
    parser = shared.add_command(
        commands,
        "sft",
        run,
        help="run only the supervised warm start of a config",
        more="`mugrpo train` with the same --out continues with the first stage.",
        example="mugrpo sft quickstart warm_start.updates=500 --out runs/first",
    )
    shared.add_config(parser)
    shared.add_run_folder(parser)
    shared.add_overwrite(parser)
    shared.add_hosts(parser)


def run(arguments: argparse.Namespace) -> None:
    """Execute `mugrpo sft` with the parsed arguments."""
    from mugrpo_jax.compiling.compile_cache import use_compile_cache
    from mugrpo_jax.loop import stages

    with shared.join_hosts(arguments):
        config = shared.load_config(arguments)
        use_compile_cache(config.compile_cache)
        stages.warm_start(config, shared.run_folder(arguments), overwrite=arguments.overwrite)
