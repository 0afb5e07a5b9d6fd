"""`mugrpo sample`: write the rollouts of a run while another process trains on them."""

import argparse

from mugrpo_jax.cli import arguments as shared


def add(commands: shared.Commands) -> None:
    """Add `mugrpo sample` and its arguments to the program."""
    parser = shared.add_command(
        commands,
        "sample",
        run,
        help="sample the rollouts of a run that another process trains",
        more="The trainer is mugrpo train CONFIG --out RUN --rollouts wait. Several samplers share the work.",
        example="mugrpo sample runs/first --watch",
    )
    parser.add_argument("run_folder", type=shared.path, metavar="RUN", help="the run's folder")
    shared.add_overrides(parser)
    parser.add_argument(
        "--watch",
        action="store_true",
        help="wait for the next policy until all stages are sampled; without it, sample what is possible now",
    )
    shared.add_wait_limit(parser)


def run(arguments: argparse.Namespace) -> None:
    """Execute `mugrpo sample` with the parsed arguments."""
    from mugrpo_jax.loop.sampler_process import sample

    sample(
        arguments.run_folder,
        overrides=arguments.overrides,
        watch=arguments.watch,
        wait_limit_s=arguments.wait_limit,
    )
