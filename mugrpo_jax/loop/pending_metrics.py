"""Updates under way: the host runs ahead of the device, and the records follow."""

import collections
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from mugrpo_jax.runs.compile_clock import compile_clock

_AHEAD = 2  # updates that the device may still be working on while the host prepares the next


class InFlight:
    """Updates that were dispatched and not yet recorded.

    Reading an update's metrics waits for the device, so they are read when `_AHEAD` later updates have been
    dispatched: the device always has work while the host arranges the next batch and writes the journal.
    """

    def __init__(self, record: Callable[[Any, dict[str, float], dict[str, float]], None]) -> None:
        """Call `record(about, metrics, seconds)` for each update, in order.

        `seconds["update"]` runs from one record to the next, so those of a phase add up to its wall time;
        `seconds["compile"]` is the part of it that went into compiling.
        """
        self._record = record
        self._waiting: collections.deque[tuple[Any, Mapping[str, jax.Array]]] = collections.deque()
        self.restart()

    def add(self, about: Any, metrics: Mapping[str, jax.Array]) -> None:
        """Take an update that was just dispatched; record those that are old enough."""
        for value in metrics.values():
            value.copy_to_host_async()
        self._waiting.append((about, metrics))
        while len(self._waiting) > _AHEAD:
            self._finish_one()

    def flush(self) -> None:
        """Record all: before a checkpoint, or a kill after it would lose their lines."""
        while self._waiting:
            self._finish_one()

    def restart(self) -> None:
        """The time since the last record belonged to something else."""
        self._since, self._compiled = time.monotonic(), compile_clock().seconds

    def _finish_one(self) -> None:
        about, metrics = self._waiting.popleft()
        found = {name: float(value) for name, value in metrics.items()}
        since, compiled = self._since, self._compiled
        self.restart()
        seconds = {"update": self._since - since, "compile": self._compiled - compiled}
        self._record(about, found, seconds)
