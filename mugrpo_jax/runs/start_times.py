"""Measure how long a user waits, from the start of the command, for the first token and the first update."""

import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

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
        name = _key(what)
        if name not in self._seconds:
            self._seconds[name] = time.monotonic() - self._started
            progress.say(f"{what} {_text(self._seconds[name])} after the start of the command")

    def has(self, what: str) -> bool:
        """Return whether this was reached."""
        return _key(what) in self._seconds

    def take(self) -> dict[str, float]:
        """Return the times that are not in the journal yet, by their names there."""
        new = {name: seconds for name, seconds in self._seconds.items() if name not in self._recorded}
        self._recorded |= set(new)
        return new


def recorded_start(records: Iterable[Mapping[str, Any]]) -> str:
    """Return a text about the first start of a run, from its records; empty if nothing is known.

    >>> recorded_start([{"seconds": {"to_first_token": 21.04}}, {"seconds": {"to_first_update": 95.0}}])
    'first token after 21.0 s, first update after 1 min 35 s'

    A first update before the first token was that of a later start, which continued the run: leave it out.

    >>> recorded_start([{"seconds": {"to_first_token": 21.04}}, {"seconds": {"to_first_update": 9.0}}])
    'first token after 21.0 s'
    """
    seconds: dict[str, float] = {}
    for record in records:
        seconds = dict(record.get("seconds", {})) | seconds
    token = seconds.get(_key(FIRST_TOKEN), 0.0)
    kept = {name: value for name, value in seconds.items() if value >= token}
    found = {what: kept[_key(what)] for what in (FIRST_TOKEN, FIRST_UPDATE) if _key(what) in kept}
    return ", ".join(f"{what} after {_text(value)}" for what, value in found.items())


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


def _key(what: str) -> str:
    return f"to_{what.replace(' ', '_')}"


def _text(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else duration(seconds)
