"""Measure how long a user waits, from the start of the command, for the first token and the first update."""

import os
import time
from pathlib import Path

from mugrpo_jax.runs import progress
from mugrpo_jax.runs.time_left import duration

FIRST_TOKEN, FIRST_UPDATE = "first token", "first update"
_IMPORTED = time.monotonic()


class StartTimes:
    """The seconds from `started`, on the clock of `time.monotonic`, to each thing that was first reached."""

    def __init__(self, started: float) -> None:
        self._started = started
        self._seconds: dict[str, float] = {}
        self._recorded: set[str] = set()

    def reached(self, what: str) -> None:
        """Remember and print the time, unless this was reached before."""
        if what not in self._seconds:
            self._seconds[what] = time.monotonic() - self._started
            progress.say(f"{what} {_after(self._seconds[what])} after the start of the command")

    def has(self, what: str) -> bool:
        """Return whether this was reached."""
        return what in self._seconds

    def take(self) -> dict[str, float]:
        """Return the times that are not in the journal yet, by the name that they get there."""
        new = {what: value for what, value in self._seconds.items() if what not in self._recorded}
        self._recorded |= set(new)
        return {f"to_{what.replace(' ', '_')}": value for what, value in new.items()}

    def __str__(self) -> str:
        return ", ".join(f"{what} after {_after(value)}" for what, value in self._seconds.items())


def recorded_start(seconds: dict[str, float]) -> str:
    """Return a text about the start of a run from the `seconds` of its records; empty without any."""
    names = {what: f"to_{what.replace(' ', '_')}" for what in (FIRST_TOKEN, FIRST_UPDATE)}
    found = {what: seconds[name] for what, name in names.items() if name in seconds}
    return ", ".join(f"{what} after {_after(value)}" for what, value in found.items())


def process_start() -> float:
    """Return when this process was started, on the clock of `time.monotonic`.

    Only Linux tells it. Elsewhere, it is the time at which this module was imported.
    """
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return _IMPORTED
    return min(time.monotonic() - age, _IMPORTED)


def _after(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else duration(seconds)
