"""Measure the time that a run waits for compilations, so that it can be reported apart from the updates."""

import threading
import time

import jax

from mugrpo_jax.compiling.compiled_programs import WAIT_EVENT, in_background

_EVENTS = "/jax/core/compile/"


class CompileClock:
    """Adds up the seconds in which JAX traces, lowers or compiles programs or reads its compilation cache.

    JAX reports the duration of each such event when the event ends. Time in which events overlap (nested
    events, or events in several threads) counts once. `seconds` is the total so far.

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
        """Count the seconds from `start` to `end` that were not counted before."""
        with self._lock:
            while self._intervals and self._intervals[-1][1] >= start:
                before, after = self._intervals.pop()
                self.seconds -= after - before
                start, end = min(start, before), max(end, after)
            self._intervals.append((start, end))
            self.seconds += end - start

    def listen(self, event: str, duration_secs: float, **about: str | int) -> None:
        """Count an event that has just ended; `jax.monitoring` calls this function after every event.

        What a background thread compiles does not count, but the time in which a thread waits for it does.
        """
        if event == WAIT_EVENT or (event.startswith(_EVENTS) and not in_background()):
            now = time.monotonic()
            self.add(now - duration_secs, now)


_clock: CompileClock | None = None


def compile_clock() -> CompileClock:
    """Return the clock of this process; the first call creates and starts the clock."""
    global _clock
    if _clock is None:
        _clock = CompileClock()
        jax.monitoring.register_event_duration_secs_listener(_clock.listen)
    return _clock
