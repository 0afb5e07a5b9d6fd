"""Read the metrics of an update later, so that the host can dispatch more updates in the meantime."""

import collections
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from mugrpo_jax.runs.compile_clock import compile_clock

_AHEAD = 2  # updates that the host may dispatch before it reads the metrics of an earlier one


class PendingMetrics:
    """A queue of updates that were dispatched but not yet recorded.

    Reading an update's metrics waits for the device. So they are read after `_AHEAD` later updates have been
    dispatched: the device has work while the host prepares the next batch and writes the journal.
    """

    def __init__(self, record: Callable[[Any, dict[str, float], dict[str, float]], None]) -> None:
        """Call `record(about, metrics, seconds)` for each update, in order.

        `seconds["update"]` is the time since the last record, so the sum over a phase is its wall time.
        `seconds["compile"]` is the part of it that was spent on compiling.
        """
        self._record = record
        self._waiting: collections.deque[tuple[Any, Mapping[str, jax.Array]]] = collections.deque()
        self.restart()

    def add(self, about: Any, metrics: Mapping[str, jax.Array]) -> None:
        """Add an update that was just dispatched, and record updates that are `_AHEAD` updates older."""
        for value in metrics.values():
            value.copy_to_host_async()
        self._waiting.append((about, metrics))
        while len(self._waiting) > _AHEAD:
            self._finish_one()

    def flush(self) -> None:
        """Record all updates. Call it before a checkpoint, so that a later SIGKILL loses no record."""
        while self._waiting:
            self._finish_one()

    def restart(self) -> None:
        """Start the time of the next record now, after work that is not part of an update."""
        self._since, self._compiled = time.monotonic(), compile_clock().seconds

    def _finish_one(self) -> None:
        about, metrics = self._waiting.popleft()
        found = {name: float(value) for name, value in metrics.items()}
        since, compiled = self._since, self._compiled
        self.restart()
        seconds = {"update": self._since - since, "compile": self._compiled - compiled}
        self._record(about, found, seconds)
