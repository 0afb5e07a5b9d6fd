"""Start or resume a run, and save checkpoints."""

import jax

from mugrpo_jax import training
from mugrpo_jax.loop import replay
from mugrpo_jax.loop.run_context import RunContext
from mugrpo_jax.loop.warm_start import warm_started_weights
from mugrpo_jax.models.sharding import placed
from mugrpo_jax.runs import progress
from mugrpo_jax.runs.stop import Stopped
from mugrpo_jax.training import Cursor, TrainState


def resume(run: RunContext) -> tuple[TrainState, Cursor]:
    """Return the state and cursor of the newest checkpoint, or those of a new run if there is none."""
    make = jax.jit(run.new_state)
    abstract = jax.eval_shape(make, run.params)
    shardings = training.state_sharding(run.setup.mesh, run.setup.model, abstract)
    targets = placed(abstract, shardings)
    if run.checkpoints.latest() is not None:
        state, cursor = run.checkpoints.restore(targets)
        run.journal.rewind(cursor.updates)
        run.saved = cursor.updates
        progress.say(f"continuing at stage {cursor.stage}, update {cursor.update}")
    else:
        replayed = replay.restore_start(run.config, targets) if run.config.replay.run is not None else None
        if replayed is not None:
            state, cursor = replayed
        else:
            params = warm_started_weights(run) if run.config.warm_start.updates else run.params
            state, cursor = jax.device_put(make(params), shardings), Cursor()
        save(run, state, cursor)
    run.params = None  # the state contains the weights from now on
    return state, cursor


def save_if_due(run: RunContext, state: TrainState, cursor: Cursor, *, accuracy: float | None = None) -> None:
    """Save a checkpoint if one is due or the run must stop; raise `Stopped` afterwards if the run must stop.

    `config.checkpoints` says when one is due. A stage's last update is saved as the start of the next stage.
    """
    keep, batch = run.config.checkpoints, run.config.batch
    if cursor.update == batch.updates_per_stage:
        return
    due = (
        cursor.updates - run.saved >= keep.every
        or cursor.stage == run.config.stages.stop
        or (keep.keep_stage_starts and cursor.update == 0)
        or (keep.keep_best > 0 and accuracy is not None)
    )
    if due or run.stop.agreed:
        save(run, state, cursor, accuracy=accuracy)
    leave_if_stopped(run)


def save(run: RunContext, state: TrainState, cursor: Cursor, *, accuracy: float | None = None) -> None:
    """Start to save a checkpoint, which is then written in the background."""
    run.pending.flush()  # so that the journal is complete up to this checkpoint
    run.checkpoints.save(state, cursor, accuracy=accuracy)
    run.saved = cursor.updates


def leave_if_stopped(run: RunContext) -> None:
    """If all hosts agreed to stop, wait until the last checkpoint is on disk and raise `Stopped`."""
    if run.stop.agreed:
        run.checkpoints.wait()
        raise Stopped
