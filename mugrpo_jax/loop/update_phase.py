"""The second phase of a stage: take µ updates on the rollouts."""

import functools
import math
from collections.abc import Iterator
from typing import Any

from mugrpo_jax import distributed, training
from mugrpo_jax.config import ConfigError
from mugrpo_jax.loop.pending_metrics import PendingMetrics
from mugrpo_jax.loop.run_context import RunContext
from mugrpo_jax.models.sharding import local_parts
from mugrpo_jax.rollouts import ReferenceFolder, RolloutFolder, UpdateStream, abstract_update
from mugrpo_jax.runs import progress
from mugrpo_jax.runs.start_times import FIRST_UPDATE
from mugrpo_jax.setup.sizes import update_statistics
from mugrpo_jax.training import Cursor, TrainState

_LARGE_GAP = 0.5  # between log-probs; rounding and other kernels make up to about 0.05


def optimise(
    run: RunContext,
    state: TrainState,
    stage: int,
    rollouts: RolloutFolder,
    reference: ReferenceFolder | None,
    cursor: Cursor,
) -> Iterator[tuple[TrainState, Cursor]]:
    """Take the remaining updates of a stage. After each update, yield the new state and the new cursor.

    The device may still compute the update then, so its metrics are recorded later, see `PendingMetrics`.
    """
    config, batch = run.config, run.config.batch
    # An imported stage may have been written after more updates than this run has; then its lag is unknown.
    lag = max(cursor.updates - cursor.update - rollouts.identity["policy_updates"], 0)
    with progress.bar(batch.updates_per_stage, f"stage {stage}: update", "upd", cursor.update) as bar:
        run.pending = PendingMetrics(functools.partial(_record, run, bar, lag))
        step = _step(run, state)
        stream = UpdateStream(
            rollouts,
            seed=config.seed,
            stage_index=stage,
            epochs=batch.epochs_per_stage,
            prompts_per_update=batch.prompts_per_update,
            buckets=run.setup.buckets(),
            advantage=config.advantage,
            aggregation=config.objective.settings["aggregation"],
            max_response=config.sampling.max_response_tokens,
            max_length=config.objective.settings["max_length"],
            overlong_buffer=config.overlong_buffer,
            equal_groups=batch.equal_groups,
            parts=local_parts(run.setup.mesh),
            reference=reference,
            behaviors=run.behaviors,
        )
        if cursor.data is not None:
            stream.seek(cursor.data)
        while cursor.update < batch.updates_per_stage:
            update = next(stream)
            # Reading may wait for a slow disk, while other hosts wait for this one on their devices.
            distributed.reached(f"update {cursor.updates + 1}")
            if cursor.update % (config.proximal_every or batch.updates_per_stage) == 0:
                state = training.renew_proximal(state)
            state, metrics = step(state, update, run.setup.frozen())
            cursor = Cursor(stage, cursor.update + 1, cursor.updates + 1, stream.position())
            run.pending.add((cursor, update.metrics), metrics | run.stop_metric())
            if not run.start_times.has(FIRST_UPDATE):
                run.pending.flush()  # to know when it was computed
            yield state, cursor
        run.pending.flush()


def check_loss(run: RunContext) -> training.UpdateStep:
    """Trace the loss with abstract arrays, so that settings that cannot train raise an error at once."""
    state = run.abstract_state()
    step = _step(run, state)
    abstract = abstract_update(
        run.setup.buckets(), reference=run.config.uses_reference, behaviors=bool(run.behaviors)
    )
    try:
        step.metric_names(state, abstract, run.setup.frozen())
    except (TypeError, ValueError) as error:
        raise ConfigError(f"objective: {error}") from None
    return step


def _step(run: RunContext, state: TrainState) -> training.UpdateStep:
    """Return the update step. It is built once, so that its programs are compiled once."""
    if run.step is None:
        run.step = training.UpdateStep(
            run.setup.trainable,
            run.config.objective.build(),
            run.optimizer,
            run.setup.mesh,
            run.setup.step_options(),
            state=state,
            statistics=update_statistics(run.config),
            programs=run.setup.programs,
            behaviors=run.behaviors,
        )
    return run.step


def _record(
    run: RunContext,
    bar: Any,
    lag: int,
    about: tuple[Cursor, Any],
    metrics: dict[str, float],
    seconds: dict[str, float],
) -> None:
    """Record an update. `lag` is the age of the rollouts in updates at the start of the stage."""
    cursor, data = about
    run.stop.agree(metrics.pop("stop", 0.0) > 0)
    run.start_times.reached(FIRST_UPDATE)
    record = {
        "kind": "update",
        "stage": cursor.stage,
        "updates": cursor.updates,
        **_law(run, cursor, lag, int(metrics["skipped"])),
        "abandoned_ratio": run.config.abandoned_ratio,
        **data,
        **metrics,
        "seconds": seconds | run.start_times.take(),
    }
    run.journal.write(record)
    if cursor.updates == 1 and run.config.replay.run is not None:
        _compare_policies(record["gap/tokens"])
    bar.set_postfix(progress.headline(record) | run.time_left.headline(), refresh=False)
    bar.update()
    if run.first_skip is None and not math.isfinite(metrics["gradient_norm"]):
        run.first_skip = cursor.updates, metrics["loss"]
    if metrics["skipped"] > run.config.optimizer.max_skipped:
        raise ConfigError(_why_skipped(run, cursor.updates, metrics))


def _law(run: RunContext, cursor: Cursor, lag: int, skipped: int) -> dict[str, float]:
    """Return what the staleness law needs of an update: its learning rate η, and its age and number times η.

    The schedule does not advance with updates that were skipped.
    """
    applied = min(max(cursor.updates - 1 - skipped, 0), len(run.learning_rates) - 1)
    rate = float(run.learning_rates[applied])
    age = lag + cursor.update - 1
    return {
        "staleness": age,
        "lag": lag,
        "learning_rate": rate,
        "staleness_times_rate": age * rate,
        "updates_times_rate": cursor.updates * rate,
    }


def _compare_policies(gap: float) -> None:
    """Say that a replay does not start from the policy that wrote the rollouts, if that is so."""
    if gap > _LARGE_GAP:
        progress.say(
            f"the model's log-probs differ from the stored ones by {gap:.2g} per token on average, so it is "
            "not the policy that wrote the rollouts; if you have that policy, name it with model.source"
        )


def _why_skipped(run: RunContext, updates: int, metrics: dict[str, float]) -> str:
    """Return what is known about updates that were skipped because their gradient was not finite."""
    first, loss = run.first_skip or (updates, metrics["loss"])
    if math.isfinite(loss):
        cause = f"its loss was finite ({loss:g}); lower optimizer.learning_rate"
    else:
        cause = f"its loss was {loss} too; if it was so from the first update on, look at the model's weights"
    return (
        f"update {updates}: {metrics['skipped']:.0f} updates had a non-finite gradient and were skipped, "
        f"more than optimizer.max_skipped={run.config.optimizer.max_skipped}; the first seen was "
        f"update {first}; {cause}"
    )
