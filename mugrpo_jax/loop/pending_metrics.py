"""Read the metrics of an update only after more updates are dispatched, so that the device is never idle."""

import collections
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from mugrpo_jax.compiling.compile_clock import compile_clock

_AHEAD = 2  # updates that the host may dispatch before it reads the metrics of an earlier one


class PendingMetrics:
    """A queue of updates that were dispatched to the device, but whose metrics are not recorded yet.

    To read the metrics of an update, the host must wait for the device. So the host dispatches `_AHEAD` more
    updates first. Then the device is busy while the host writes the metrics and prepares the next batch.
    """

    def __init__(self, record: Callable[[Any, dict[str, float], dict[str, float]], None]) -> None:
        """Make a queue that calls `record(about, metrics, seconds)` for each update, in the order of `add`.

        `seconds["update"]` is the time since the last call of `record` or `restart`, and `seconds["compile"]`
        is the part of this time in which programs were compiled.
        """
        self._record = record
        self._waiting: collections.deque[tuple[Any, Mapping[str, jax.Array]]] = collections.deque()
        self.restart()

    def add(self, about: Any, metrics: Mapping[str, jax.Array]) -> None:
        """Add the metrics of an update that was just dispatched; `about` describes the update for `record`.

        If more than `_AHEAD` updates are then in the queue, record the oldest update.
        """
        for value in metrics.values():
            value.copy_to_host_async()
        self._waiting.append((about, metrics))
        while len(self._waiting) > _AHEAD:
            self._finish_one()

    def flush(self) -> None:
        """Record all updates in the queue. Call this before a checkpoint, so that the journal is complete."""
        while self._waiting:
            self._finish_one()

    def restart(self) -> None:
        """Measure the next record's time from now. Call this after work that is not part of an update."""
        self._since, self._compiled = time.monotonic(), compile_clock().seconds

    def _finish_one(self) -> None:
        about, metrics = self._waiting.popleft()
        found = {name: float(value) for name, value in metrics.items()}
        since, compiled = self._since, self._compiled
        self.restart()
        seconds = {"update": self._since - since, "compile": self._compiled - compiled}
        self._record(about, found, seconds)
