"""Start or resume a run, and save checkpoints."""

import dataclasses
from typing import Any

from mugrpo_jax import training
from mugrpo_jax.loop import replay
from mugrpo_jax.loop.held_out import evaluation_due
from mugrpo_jax.loop.run_context import RunContext
from mugrpo_jax.loop.warm_start import warm_started_weights
from mugrpo_jax.runs import progress
from mugrpo_jax.runs.stop import Stopped
from mugrpo_jax.training import Cursor, TrainState


def resume(run: RunContext) -> tuple[TrainState, Cursor]:
    """Return the state and cursor of the newest checkpoint, or those of a new run if there is none."""
    config = run.config
    targets = run.abstract_state()
    if run.checkpoints.latest() is not None:
        run.params = None  # the checkpoint contains the weights, and the devices need the memory
        state, cursor = run.checkpoints.restore(targets)
        run.journal.rewind(cursor.updates, cursor.journal)
        run.saved = cursor.updates
        if cursor.stage == config.stages.stop:
            progress.say(f"{run.folder.folder}: this run is finished, all its updates are done")
        else:
            progress.say(f"continuing at stage {cursor.stage}, update {cursor.update}")
        return state, cursor

    def new_state(params: Any) -> TrainState:
        run.params = None  # the state contains the weights from now on
        return training.make_state(
            params, run.optimizer, run.setup.mesh, run.setup.trainable, **run.state_fields
        )

    replayed = replay.restore_start(config, targets, new_state) if config.replay.run is not None else None
    if replayed is not None:
        run.params = None
        state, cursor = replayed
    else:
        params = warm_started_weights(run) if config.warm_start.updates else run.params
        state, cursor = new_state(params), Cursor()
    run.journal.rewind(cursor.updates)  # a run killed before its first checkpoint has records
    save(run, state, cursor)
    return state, cursor


def save_if_due(run: RunContext, state: TrainState, cursor: Cursor, *, accuracy: float | None = None) -> None:
    """Save a checkpoint if one is due or the run must stop; raise `Stopped` afterwards if the run must stop.

    `config.checkpoints` says when one is due. A stage's last update is saved as the start of the next stage.
    """
    keep, batch = run.config.checkpoints, run.config.batch
    if cursor.update == batch.updates_per_stage:
        return
    due = (
        cursor.updates // keep.every > run.saved // keep.every
        or cursor.stage == run.config.stages.stop
        or (keep.keep_stage_starts and cursor.update == 0)
        or (keep.keep_best > 0 and evaluation_due(run, cursor))
    )
    if due or run.stop.agreed:
        save(run, state, cursor, accuracy=accuracy, extra=not due)
    leave_if_stopped(run)


def save(
    run: RunContext,
    state: TrainState,
    cursor: Cursor,
    *,
    accuracy: float | None = None,
    extra: bool = False,
) -> None:
    """Start to save a checkpoint, which is then written in the background."""
    run.pending.flush()  # so that the journal is complete up to this checkpoint
    run.journal.sync()
    cursor = dataclasses.replace(cursor, journal=run.journal.position())
    run.checkpoints.save(state, cursor, accuracy=accuracy, extra=extra)
    run.saved = cursor.updates


def leave_if_stopped(run: RunContext) -> None:
    """If all hosts agreed to stop, wait until the last checkpoint is on disk and raise `Stopped`."""
    if run.stop.agreed:
        run.checkpoints.wait()
        stages, per_stage = run.config.stages, run.config.batch.updates_per_stage
        done = run.saved - stages.start * per_stage  # a replay starts with the updates of the earlier stages
        raise Stopped(f"saved after {done:,} of {len(stages) * per_stage:,} updates")
