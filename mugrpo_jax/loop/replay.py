"""Replay a stage: optimise the rollouts of another run again, with another objective or other settings.

The new run reads the rollouts from the folder of the other run. It starts from the weights and the optimizer
state with which the other run began to train on them. So with the same settings, the new run gives exactly
the same parameters. Settings on which the rollouts depend must be the same in both runs.

`replay.run` may also be the folder of an imported stage, which has no run, see `imported_stage`.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from mugrpo_jax import config as configs
from mugrpo_jax import training
from mugrpo_jax.config import ConfigError, RunConfig
from mugrpo_jax.files import to_path
from mugrpo_jax.loop.imported_stage import check_lengths, imported_rollouts
from mugrpo_jax.loop.whole_checkpoints import check_whole
from mugrpo_jax.models.sharding import placed
from mugrpo_jax.rollouts import RolloutError, RolloutFolder, open_stage
from mugrpo_jax.rollouts.rollout_folder import read_index
from mugrpo_jax.runs.run_folder import read_config, stage_folder
from mugrpo_jax.setup.stored_rollouts import is_stage
from mugrpo_jax.training import CheckpointStore, Cursor, TrainState


def rollouts(config: RunConfig) -> RolloutFolder:
    """Return the rollouts that `config.replay` names; raise an error if `config` cannot replay them."""
    assert config.replay.run is not None
    if is_stage(to_path(config.replay.run)):
        return imported_rollouts(config)
    other, other_config = _other(config)
    if other_config.replay.run is not None:
        source = other_config.replay.run
        raise ConfigError(f"{other}: is itself a replay of {source} and has no rollouts; replay {source}")
    theirs, ours = _origin(other_config), _origin(config)
    if config.replay.stage:  # the updates before it are counted, also for the learning rate
        theirs["batch"]["updates_per_stage"] = other_config.batch.updates_per_stage
        ours["batch"]["updates_per_stage"] = config.batch.updates_per_stage
    if not _from_the_model(config, other_config):
        theirs["lora"], ours["lora"] = (configs.to_dict(each.lora) for each in (other_config, config))
    differing = configs.differing_keys(theirs, ours)
    if differing:
        others = "; ".join(differing)
        raise ConfigError(f"{other}: rollouts cannot be replayed with other settings than theirs: {others}")
    stage = open_stage(
        stage_folder(other, config.replay.stage), share=(jax.process_index(), jax.process_count())
    )
    expected = other_config.rollout_identity(config.replay.stage)
    if dict(stage.identity) != expected:
        raise RolloutError(f"{stage.folder}: rollouts of {dict(stage.identity)}, the run says {expected}")
    if stage.prompts != config.prompts_per_stage:
        raise ConfigError(
            f"{stage.folder}: holds {stage.prompts} prompts; batch.prompts_per_update × updates_per_stage / "
            f"epochs_per_stage asks for {config.prompts_per_stage}"
        )
    check_lengths(config, stage, read_index(stage))
    return stage


def restore_start(
    config: RunConfig, targets: TrainState, make_state: Callable[[Any], TrainState]
) -> tuple[TrainState, Cursor] | None:
    """Restore the state and cursor with which the other run began to train on the stage.

    The state is sharded like `targets`. If the checkpoint before stage 0 is not kept, the state is made of
    the weights after the warm start, which are.

    Return None if the model's weights are the start: for an imported stage, for stage 0 of a run without a
    warm start, if that run has no checkpoint, or if only one of the two runs uses LoRA.
    """
    assert config.replay.run is not None
    if is_stage(to_path(config.replay.run)):
        return None
    other, other_config = _other(config)
    if config.lora != other_config.lora:
        return None  # `rollouts` has checked that the stage starts at the model's weights
    first = config.replay.stage * other_config.batch.updates_per_stage
    store = CheckpointStore(other / "checkpoints")
    try:
        if first in store.steps():
            with store.still_kept(first):
                check_whole(store.path(first))
            # The other run may have no proximal policy, or one in another dtype. The first update renews it.
            theirs = jax.eval_shape(lambda s: training.with_proximal(s, other_config.proximal_dtype), targets)
            shardings = jax.tree.map(lambda leaf: leaf.sharding, targets.params)
            proximal = theirs.proximal and placed(theirs.proximal, shardings)
            state, cursor = store.restore(dataclasses.replace(targets, proximal=proximal), first)
            return training.with_proximal(state, config.proximal_dtype), cursor
        if first == 0 and not other_config.warm_start.updates:
            return None
        if first == 0 and (params := _warm_started(other, other_config, targets.params)) is not None:
            return make_state(params), Cursor()
        raise ConfigError(
            f"{other}: the checkpoint before stage {config.replay.stage} ({first} updates) is not kept, only "
            f"{', '.join(map(str, store.steps()))}; run with checkpoints.keep_stage_starts=true to replay it"
        )
    finally:
        store.close()


def _warm_started(other: Path, config: RunConfig, targets: Any) -> Any:
    """Load the weights at the end of the other run's warm start; None if they are gone."""
    folder, last = other / "warm_start", config.warm_start.updates
    if not folder.is_dir():
        return None
    with contextlib.closing(CheckpointStore(folder)) as store:
        if last not in store.steps():
            return None
        with store.still_kept(last):
            check_whole(store.path(last))
        return store.restore_params(targets, last)


def _other(config: RunConfig) -> tuple[Path, RunConfig]:
    assert config.replay.run is not None
    folder = to_path(config.replay.run)
    return folder, read_config(folder)


def _from_the_model(config: RunConfig, other: RunConfig) -> bool:
    """Return whether the replayed stage starts at the model's own weights: full tuning and LoRA can, too."""
    return config.replay.stage == 0 and not other.warm_start.updates


def _origin(config: RunConfig) -> dict[str, Any]:
    """Return the settings that determine a stage's rollouts and the training state at its start."""
    whole = config.fixed_settings()
    return {
        "seed": config.seed,
        "model": {name: whole["model"][name] for name in ("source", "tiny", "sampling_dtype")},
        "task": whole["task"],
        "sampling": whole["sampling"],
        "environment": whole["environment"] if config.environment.name is not None else None,
        "warm_start": whole["warm_start"],
        "batch": {"responses_per_prompt": config.batch.responses_per_prompt},
        "track_drift": config.track_drift,
        "optimizer": {"grad_clip above 0": config.optimizer.grad_clip > 0},
    }
