"""The supervised start: some updates on the task's worked solutions before the first stage."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mugrpo_jax import training
from mugrpo_jax.rollouts import Update, plan_buckets
from mugrpo_jax.setup.run_setup import Policy
from mugrpo_jax.tasks import Task
from mugrpo_jax.training import CheckpointStore, Cursor, UpdateStep


class WarmStart:
    """State, data and checkpoints of a warm start; it resumes like the run itself.

    Attributes:
      state: the newest checkpoint, or the beginning; replaced by each update.
      done: updates done.
    """

    def __init__(self, policy: Policy, params: Any, task: Task, folder: Path) -> None:
        self._policy, self._config = policy, policy.config
        self._task = task
        settings = self._config.warm_start
        self._optimizer = training.make_optimizer(
            dataclasses.replace(
                self._config.optimizer,
                learning_rate=settings.learning_rate,
                schedule="cosine",
                warmup_updates=0,
            ),
            settings.updates,
            policy.model,
        )
        self._store = CheckpointStore(folder, self._config.checkpoints)
        state = training.init_state(params, self._optimizer, track_drift=False)
        self.state = jax.device_put(state, training.state_sharding(policy.mesh, policy.model, state))
        self.done = 0
        if self._store.latest() is not None:
            self.state, cursor = self._store.restore(self.state)
            self.done = cursor.updates

    def updates(self) -> Iterator[dict[str, jax.Array]]:
        """Do the updates that are left; yields the metrics of each once it is dispatched."""
        step, data = self._step(), self._data()
        while self.done < self._config.warm_start.updates:
            self.state, metrics = step(self.state, next(data))
            self.done += 1
            yield metrics

    @property
    def due(self) -> bool:
        """Whether a checkpoint is due."""
        settings = self._config
        return self.done % settings.checkpoints.every == 0 or self.done == settings.warm_start.updates

    def save(self) -> None:
        """Checkpoint now; the write goes on in the background."""
        self._store.save(self.state, Cursor(updates=self.done))

    def close(self) -> None:
        """Wait for the last checkpoint."""
        self._store.close()

    def _rows(self) -> list[tuple[np.ndarray, np.ndarray]]:
        train, most = self._task.train, self._config.warm_start.problems
        count = len(train) if most is None else min(most, len(train))
        problems = (train[i] for i in range(count))
        return [(self._policy.prompt_tokens(p), self._policy.solution_tokens(p)) for p in problems]

    def _data(self) -> Iterator[Update]:
        rows, batch = self._rows(), self._config.batch
        buckets = plan_buckets(
            max(len(prompt) + len(solution) for prompt, solution in rows),
            batch.tokens_per_micro_batch,
            self._policy.buckets().groups,
            unit=batch.length_multiple,
        )
        return training.solution_updates(
            rows,
            buckets,
            rows_per_update=self._config.warm_start.rows_per_update,
            seed=self._config.seed,
            start=self.done,
        )

    def _step(self) -> UpdateStep:
        return UpdateStep(
            self._policy.model,
            training.cross_entropy,
            self._optimizer,
            self._policy.mesh,
            self._policy.step_options(),
            state=self.state,
            diagnose=False,
        )
