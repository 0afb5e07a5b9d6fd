"""Wait for the other side of a run, visibly and not for ever."""

import math
import time
from collections.abc import Callable

from mugrpo_jax.distributed import Absent
from mugrpo_jax.runs import progress
from mugrpo_jax.runs.time_left import duration

WAIT_LIMIT_S = 600.0  # by default; a restart of the other side takes less
LONGEST_STAGE_S = 3 * 24 * 3600.0  # a trainer that needs more for a stage hangs, whatever signs it gives

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0
_SAY_AFTER_S, _SAY_EVERY_S = 5.0, 60.0


class Waiting:
    """A wait in a loop that calls `pause` while what it waits for is not there.

    The limit counts only time in which the other side gives no sign of life. So a long stage is waited for,
    but a side that was never started, or has failed, is not. `longest_s` is a limit for a side that may hang
    and still give signs of life. Only our own clock is used.

    Attributes:
      seconds: how long `pause` has waited since the last `restart`.
    """

    def __init__(self, limit_s: float, longest_s: float = math.inf) -> None:
        self._limit_s, self._longest_s = limit_s, longest_s
        self.seconds = 0.0
        self._sign: object = None
        self.restart()

    def restart(self) -> None:
        """Start a new wait, because the last one has ended."""
        self.seconds, self._next_line, self._pause_s = 0.0, _SAY_AFTER_S, _FIRST_PAUSE_S
        self._alive = time.monotonic()

    def pause(self, what: str, sign: object, remedy: Callable[[], str], *, alone: bool = False) -> None:
        """Sleep a moment; raise an error if a limit is reached: `sign` has not changed, or the longest wait.

        Args:
          what: what is waited for, for the progress line.
          sign: anything that changes while the other side is alive.
          remedy: returns the end of the error: what to do.
          alone: nobody is on the other side now, so the first progress line has the remedy too.
        """
        now = time.monotonic()
        if sign != self._sign:
            self._sign, self._alive = sign, now
        silent = now - self._alive
        if silent > self._limit_s:
            raise Absent(
                f"waited {duration(self.seconds)} for {what}, the last {duration(silent)} of them without a "
                f"sign of life (--wait-limit {self._limit_s:g}); {remedy()}"
            )
        if self.seconds > self._longest_s:
            raise Absent(
                f"waited {duration(self.seconds)} for {what}; the other side gives signs of life, but seems "
                f"to hang; stop it, and {remedy()}"
            )
        if self.seconds >= self._next_line:
            first = alone and self._next_line == _SAY_AFTER_S
            more = f" (at most {duration(self._limit_s)}, see --wait-limit); {remedy()}" if first else ""
            progress.say(f"waiting for {what}: {duration(self.seconds)}{more}")
            self._next_line = self.seconds + _SAY_EVERY_S
        time.sleep(self._pause_s)
        self._pause_s = min(self._pause_s * 1.3, _LONGEST_PAUSE_S)
        self.seconds += time.monotonic() - now
