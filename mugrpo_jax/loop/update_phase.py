"""The second phase of a stage: take µ updates on the rollouts."""

import functools
from collections.abc import Iterator
from typing import Any

from mugrpo_jax import distributed, training
from mugrpo_jax.config import ConfigError
from mugrpo_jax.loop.pending_metrics import PendingMetrics
from mugrpo_jax.loop.run_context import RunContext
from mugrpo_jax.rollouts import RolloutFolder, UpdateStream
from mugrpo_jax.runs import progress
from mugrpo_jax.training import Cursor, TrainState


def optimise(
    run: RunContext, state: TrainState, stage: int, rollouts: RolloutFolder, cursor: Cursor
) -> Iterator[tuple[TrainState, Cursor]]:
    """Take the remaining updates of a stage. After each update, yield the new state and the new cursor.

    The device may still compute the update then, so its metrics are recorded later, see `PendingMetrics`.
    """
    config, batch = run.config, run.config.batch
    with progress.bar(batch.updates_per_stage, f"stage {stage}: update", "upd", cursor.update) as bar:
        run.pending = PendingMetrics(functools.partial(_record, run, bar))
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
            overlong_buffer=config.overlong_buffer,
            equal_groups=batch.equal_groups,
        )
        if cursor.data is not None:
            stream.seek(cursor.data)
        while cursor.update < batch.updates_per_stage:
            update = next(
                stream
            )  # may wait for a slow disk, while other hosts wait for this one on their devices
            distributed.reached(f"update {cursor.updates + 1}")
            state, metrics = step(state, update)
            cursor = Cursor(stage, cursor.update + 1, cursor.updates + 1, stream.position())
            run.pending.add((cursor, update.metrics), metrics | run.stop_metric())
            yield state, cursor
        run.pending.flush()


def _step(run: RunContext, state: TrainState) -> training.UpdateStep:
    """Return the update step. It is built once, so that its programs are compiled once."""
    if run.step is None:
        run.step = training.UpdateStep(
            run.setup.model,
            run.config.objective.build(),
            run.optimizer,
            run.setup.mesh,
            run.setup.step_options(),
            state=state,
        )
    return run.step


def _record(
    run: RunContext, bar: Any, about: tuple[Cursor, Any], metrics: dict[str, float], seconds: dict[str, float]
) -> None:
    cursor, data = about
    run.stop.agree(metrics.pop("stop", 0.0) > 0)
    record = {
        "kind": "update",
        "stage": cursor.stage,
        "updates": cursor.updates,
        "staleness": cursor.update - 1,
        **data,
        **metrics,
        "seconds": seconds,
    }
    run.journal.write(record)
    bar.set_postfix(progress.headline(record), refresh=False)
    bar.update()
    if metrics["skipped"] > run.config.optimizer.max_skipped:
        raise ConfigError(
            f"update {cursor.updates}: {metrics['skipped']:.0f} updates had a non-finite gradient, more "
            "than optimizer.max_skipped; lower optimizer.learning_rate"
        )
