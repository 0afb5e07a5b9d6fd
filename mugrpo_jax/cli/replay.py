"""`mugrpo replay`: optimise a stage of a run again, with its stored rollouts."""

import argparse
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mugrpo_jax.cli import arguments as shared
from mugrpo_jax.cli.train import plan_and_train

if TYPE_CHECKING:
    from mugrpo_jax.config import RunConfig


def add(commands: shared.Commands) -> None:
    """Add `mugrpo replay` and its arguments to the program."""
    parser = shared.add_command(
        commands,
        "replay",
        run,
        help="optimise a stage of a run again, with its stored rollouts",
        more="The replay starts from the run's checkpoint before that stage, with the run's config and your "
        "overrides. A run with checkpoints.keep_stage_starts=true keeps the checkpoints before all stages. "
        "RUN may also be a stage that `mugrpo rollouts import` made: then --config is needed, and the replay "
        "starts from its model.source.",
        example="mugrpo replay runs/first --stage 1 objective.name=grpo --out runs/first-grpo",
    )
    shared.add_source_run(parser)
    shared.add_overrides(parser)
    parser.add_argument(
        "--config",
        help="for an imported stage: a YAML file, or the name of a shipped config; the sizes of the batch "
        "are fitted to the stage, unless you override them",
    )
    parser.add_argument(
        "--stage", type=shared.at_least(0), default=0, help="index of the stage, from 0 (default: 0)"
    )
    parser.add_argument("--out", type=shared.path, required=True, help="the new run's folder")
    shared.add_overwrite(parser)
    shared.add_hosts(parser)
    shared.add_dry_run(parser)


def run(arguments: argparse.Namespace) -> None:
    """Execute `mugrpo replay` with the parsed arguments."""
    from mugrpo_jax import config as configs
    from mugrpo_jax.config import ConfigError
    from mugrpo_jax.files import absolute
    from mugrpo_jax.runs.run_folder import read_config
    from mugrpo_jax.setup.stored_rollouts import is_stage

    if absolute(arguments.out) == absolute(arguments.source):
        raise ConfigError(f"--out: {arguments.out} holds the rollouts to replay; name another folder")
    replay = [f"replay.run={absolute(arguments.source)}", f"replay.stage={arguments.stage}"]
    with shared.join_hosts(arguments):
        if is_stage(arguments.source):
            config = _fitted(arguments, replay)
        elif arguments.config is not None:
            raise ConfigError("--config: a replay of a run takes the config of the run; override its keys")
        else:
            given = _without_old_knobs(read_config(arguments.source), arguments.overrides)
            config = configs.load(arguments.source / "config.yaml", [*given, *replay])
        plan_and_train(
            config,
            arguments.out,
            dry_run=arguments.dry_run,
            overwrite=arguments.overwrite,
            command=shared.without_dry_run(arguments),
        )


def _fitted(arguments: argparse.Namespace, replay: Sequence[str]) -> "RunConfig":
    """Return the config for an imported stage, with sizes that fit the stage unless an override sets them."""
    from mugrpo_jax import config as configs
    from mugrpo_jax.config import ConfigError
    from mugrpo_jax.loop.imported_stage import fitting_sizes
    from mugrpo_jax.runs import progress

    if arguments.config is None:
        raise ConfigError(f"{arguments.source}: an imported stage has no config; name one with --config")
    config = configs.load(arguments.config, arguments.overrides)
    given = {override.partition("=")[0] for override in arguments.overrides}
    sizes = fitting_sizes(arguments.source, config)
    fitted = [f"{key}={value}" for key, value in sizes.items() if key not in given]
    if config.warm_start.updates and "warm_start.updates" not in given:
        progress.say("warm start: not used for an imported stage; training starts from model.source")
    return configs.load(arguments.config, [*arguments.overrides, *fitted, *replay])


def _without_old_knobs(config: "RunConfig", overrides: Sequence[str]) -> list[str]:
    """Return the overrides; if they name another objective, they also remove the knobs of the run's own.

    Knobs in the overrides themselves are kept.
    """
    from mugrpo_jax import config as configs
    from mugrpo_jax.runs import progress

    old = config.objective
    bare = dataclasses.replace(config, objective=dataclasses.replace(old, knobs={}))
    new = configs.changed(bare, list(overrides)).objective
    if new.name == old.name or not old.knobs:
        return list(overrides)
    knobs = ", ".join(f"{name}: {value}" for name, value in old.knobs.items())
    progress.say(f"objective {new.name}: the run's knobs of {old.name} ({knobs}) are not used")
    return ["objective.knobs={}", *overrides]
