"""The warm start: supervised updates on the worked solutions of the task, before the first stage."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

from mugrpo_jax import training
from mugrpo_jax.loop.pending_metrics import PendingMetrics
from mugrpo_jax.loop.preflight import warm_start_problems
from mugrpo_jax.loop.run_context import RunContext
from mugrpo_jax.loop.whole_checkpoints import move_unusable
from mugrpo_jax.rollouts import Update, plan_buckets
from mugrpo_jax.runs import progress
from mugrpo_jax.runs.stop import Stopped
from mugrpo_jax.training import CheckpointStore, Cursor, UpdateStep


def warm_started_weights(run: RunContext) -> Any:
    """Train on the worked solutions of the task, or resume this training, and return the weights."""
    config, total = run.config, run.config.warm_start.updates
    optimizer = training.make_optimizer(
        dataclasses.replace(
            config.optimizer,
            learning_rate=config.warm_start.learning_rate,
            schedule="cosine",
            warmup_updates=0,
        ),
        total,
        run.setup.trainable,
    )
    mesh, model = run.setup.mesh, run.setup.trainable
    move_unusable(run.folder.folder / "warm_start")
    store, cursor = CheckpointStore(run.folder.folder / "warm_start", config.checkpoints), Cursor()
    with contextlib.closing(store):
        params, run.params = run.params, None
        if store.latest() is None:
            state = training.make_state(params, optimizer, mesh, model, track_drift=False)
        else:
            del params  # the checkpoint contains the weights, and the devices need the memory
            state, cursor = store.restore(training.abstract_state(optimizer, mesh, model, track_drift=False))
        done = cursor.updates
        run.journal.rewind(done - total, cursor.journal)
        if done == total:
            return state.params
        step = UpdateStep(
            model,
            training.cross_entropy,
            optimizer,
            mesh,
            dataclasses.replace(run.setup.step_options(), entropy="none", proximal="none"),
            state=state,
            diagnose=False,
        )
        data = _solutions(run, done)
        with progress.bar(total, "warm start", "upd", done) as bar:
            pending = PendingMetrics(functools.partial(_record, run, bar))
            while done < total:
                state, metrics = step(state, next(data), run.setup.frozen())
                done += 1
                pending.add(done - total, {"loss": metrics["loss"]} | run.stop_metric())
                if done % config.checkpoints.every == 0 or done == total or run.stop.agreed:
                    pending.flush()
                    run.journal.sync()
                    store.save(state, Cursor(updates=done, journal=run.journal.position()))
                if run.stop.agreed:
                    raise Stopped(f"saved after {done} of {total} updates of the warm start")
    return state.params


def _solutions(run: RunContext, start: int) -> Iterator[Update]:
    """Yield updates on prompts with their worked solutions, beginning with update number `start`."""
    train, batch, settings = run.task.train, run.config.batch, run.config.warm_start
    problems = [train[i] for i in warm_start_problems(run.config, len(train))]
    rows = [(run.setup.prompt_tokens(p), *run.setup.solution_tokens(p)) for p in problems]
    buckets = plan_buckets(
        max(len(prompt) + len(solution) for prompt, solution, _ in rows),
        run.setup.buckets().tokens,
        run.setup.buckets().parts,
        unit=batch.length_multiple,
        most_rows=settings.rows_per_update,
    )
    return training.solution_updates(
        rows, buckets, rows_per_update=settings.rows_per_update, seed=run.config.seed, start=start
    )


def _record(
    run: RunContext, bar: Any, updates: int, metrics: dict[str, float], seconds: dict[str, float]
) -> None:
    run.stop.agree(metrics.pop("stop", 0.0) > 0)
    run.journal.write({"kind": "warm_start", "updates": updates, **metrics, "seconds": seconds})
    bar.set_postfix(loss=f"{metrics['loss']:.3f}", refresh=False)
    bar.update()
