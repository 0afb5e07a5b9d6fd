"""How long this process has been tracing and compiling, which no step of a run should be blamed for."""

import threading
import time

import jax

_EVENTS = "/jax/core/compile/"


class CompileClock:
    """Wall time during which programs were traced, lowered or compiled, or read from the compilation cache.

    JAX tells how long each of these took when it ends. What happens inside another one, or at the same time
    in another thread, counts once.

    Attributes:
      seconds: so far.

    >>> clock = CompileClock()
    >>> clock.add(8.0, 10.0)
    >>> clock.add(6.0, 11.0)
    >>> clock.seconds
    5.0
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._lock = threading.Lock()
        self._intervals: list[tuple[float, float]] = []  # apart from each other, in order

    def add(self, start: float, end: float) -> None:
        """Something went on from one moment to another."""
        with self._lock:
            while self._intervals and self._intervals[-1][1] >= start:
                before, after = self._intervals.pop()
                self.seconds -= after - before
                start, end = min(start, before), max(end, after)
            self._intervals.append((start, end))
            self.seconds += end - start

    def listen(self, event: str, duration_secs: float, **about: str | int) -> None:
        """Hear from `jax.monitoring` what has just ended."""
        if event.startswith(_EVENTS):
            now = time.monotonic()
            self.add(now - duration_secs, now)


_clock: CompileClock | None = None


def compile_clock() -> CompileClock:
    """The clock of this process; it runs from the first call on."""
    global _clock
    if _clock is None:
        _clock = CompileClock()
        jax.monitoring.register_event_duration_secs_listener(_clock.listen)
    return _clock
