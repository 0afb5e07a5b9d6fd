"""How long this process has traced and compiled programs, to report it apart from the time of updates."""

import threading
import time

import jax

_EVENTS = "/jax/core/compile/"


class CompileClock:
    """Wall time in which JAX traced, lowered or compiled programs or read them from the compilation cache.

    JAX reports the duration of each of these events when it ends. Time in which events overlap (nested, or in
    several threads) counts once.

    Attributes:
      seconds: total so far.

    >>> clock = CompileClock()
    >>> clock.add(8.0, 10.0)
    >>> clock.add(6.0, 11.0)
    >>> clock.seconds
    5.0
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._lock = threading.Lock()
        self._intervals: list[tuple[float, float]] = []  # sorted, without overlaps

    def add(self, start: float, end: float) -> None:
        """Count the time from `start` to `end`."""
        with self._lock:
            while self._intervals and self._intervals[-1][1] >= start:
                before, after = self._intervals.pop()
                self.seconds -= after - before
                start, end = min(start, before), max(end, after)
            self._intervals.append((start, end))
            self.seconds += end - start

    def listen(self, event: str, duration_secs: float, **about: str | int) -> None:
        """Listener for `jax.monitoring`: count an event that has just ended."""
        if event.startswith(_EVENTS):
            now = time.monotonic()
            self.add(now - duration_secs, now)


_clock: CompileClock | None = None


def compile_clock() -> CompileClock:
    """The clock of this process; it starts with the first call."""
    global _clock
    if _clock is None:
        _clock = CompileClock()
        jax.monitoring.register_event_duration_secs_listener(_clock.listen)
    return _clock
