"""`mugrpo replay`: optimise a stage of a run again, with its stored rollouts."""

import argparse

from mugrpo_jax.cli import arguments as shared
from mugrpo_jax.cli.train import plan_and_train


def add(commands: shared.Commands) -> None:
    """Add `mugrpo replay` and its arguments to the program."""
    parser = shared.add_command(
        commands,
        "replay",
        run,
        help="optimise a stage of a run again, with its stored rollouts",
        more="The replay starts from the run's checkpoint before that stage, with the run's config and your "
        "overrides. A run with checkpoints.keep_stage_starts=true keeps the checkpoints before all stages.",
        example="mugrpo replay runs/first --stage 1 objective.name=grpo --out runs/first-grpo",
    )
    shared.add_source_run(parser)
    shared.add_overrides(parser)
    parser.add_argument(
        "--stage", type=shared.at_least(0), default=0, help="index of the stage, from 0 (default: 0)"
    )
    parser.add_argument("--out", type=shared.path, required=True, help="the new run's folder")
    shared.add_hosts(parser)
    shared.add_dry_run(parser)


def run(arguments: argparse.Namespace) -> None:
    """Execute `mugrpo replay` with the parsed arguments."""
    from mugrpo_jax import config as configs
    from mugrpo_jax.files import absolute
    from mugrpo_jax.runs.run_folder import read_config

    replay = [f"replay.run={absolute(arguments.source)}", f"replay.stage={arguments.stage}"]
    with shared.join_hosts(arguments):
        read_config(arguments.source)  # for its clear error if the folder is not a run
        config = configs.load(arguments.source / "config.yaml", [*arguments.overrides, *replay])
        plan_and_train(config, arguments.out, dry_run=arguments.dry_run)
