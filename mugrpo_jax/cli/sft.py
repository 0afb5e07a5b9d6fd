"""`mugrpo sft`: run only the supervised warm start of a config."""

import argparse
import shlex

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
    import jax

    from mugrpo_jax.compiling.compile_cache import use_compile_cache
    from mugrpo_jax.loop import stages
    from mugrpo_jax.runs import progress

    with shared.join_hosts(arguments):
        config, folder = shared.load_config(arguments), shared.run_folder(arguments)
        if not config.warm_start.updates and jax.process_index() == 0:
            progress.say("warm_start.updates is 0: the model is evaluated and saved as it is")
        use_compile_cache(config.compile_cache)
        stages.warm_start(config, folder, overwrite=arguments.overwrite)
        if jax.process_index() == 0:
            then = shlex.join(["mugrpo", "train", *arguments.words[1:]])
            progress.say(f"finished    {folder}: the warm start\nnext        {then}")
