"""Estimate how long the rest of a run will take, from the times in its journal."""

import collections
from collections.abc import Mapping, Sequence
from typing import Any

from mugrpo_jax.config import RunConfig

_RECENT = 64  # updates whose mean time is taken; responses become longer or shorter in the course of a run
_PARTS = {"stage": "generate", "reference": "reference", "evaluation": "evaluate"}  # by kind of record


class TimeLeft:
    """Follows the journal of a run like a tracker, and estimates the seconds that the whole run still needs.

    The estimate is the number of updates, generations and evaluations that are left, each times its own
    latest time without compilation. Before the first update, there is no estimate.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self.restart(())

    def restart(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Start again with these records, because a run starts or resumes."""
        first = self._config.stages.start
        self._done, self._started = first * self._config.batch.updates_per_stage, first - 1
        self._evaluated = self._done
        self._updates: collections.deque[float] = collections.deque(maxlen=_RECENT)
        self._latest: dict[str, float] = {}
        self._waits = False  # for samplers of their own, at every stage
        for record in records:
            self.write(record)

    def write(self, record: Mapping[str, Any]) -> None:
        """Learn from one more record."""
        kind, seconds = record["kind"], record.get("seconds", {})
        compiled = seconds.get("compile", 0.0)
        if kind == "update" and "update" in seconds:
            self._updates.append(max(seconds["update"] - compiled, 0.0))
        elif kind == "stage" and "wait" in seconds:
            self._waits, self._latest[kind] = True, seconds["wait"]
        elif _PARTS.get(kind) in seconds:
            self._latest[kind] = max(seconds[_PARTS[kind]] - compiled, 0.0)
        if kind == "stage":
            self._started = record["stage"]
        elif kind == "evaluation":
            self._evaluated = record["updates"]
        self._done = max(self._done, record["updates"])

    def close(self) -> None:
        """Nothing is open."""

    def seconds(self) -> float | None:
        """Return the estimate, or None if no update was measured yet."""
        if not self._updates:
            return None
        stages = self._config.stages
        unstarted = stages.stop - 1 - self._started
        left = {
            # With a lag, some stages are generated ahead.
            "stage": unstarted if self._waits else max(unstarted - self._config.batch.lag, 0),
            "reference": unstarted,
            "evaluation": self._evaluations(),
        }
        updates = stages.stop * self._config.batch.updates_per_stage - self._done
        mean = sum(self._updates) / len(self._updates)
        return updates * mean + sum(count * self._latest.get(kind, 0.0) for kind, count in left.items())

    def _evaluations(self) -> int:
        """Return how many evaluations come after the last one."""
        stages, batch = self._config.stages, self._config.batch
        every = self._config.evaluation.every or batch.updates_per_stage
        end = stages.stop * batch.updates_per_stage
        first = self._evaluated - self._evaluated % every + every
        return len({*range(first, end, every), end} - {self._evaluated})

    def headline(self) -> dict[str, str]:
        """Return the estimate for a progress bar; empty without one."""
        seconds = self.seconds()
        return {"whole run": f"{duration(seconds)} left"} if seconds else {}

    def clause(self) -> str:
        """Return the estimate for the end of a printed line; empty without one."""
        seconds = self.seconds()
        return f"; about {duration(seconds)} left for the whole run" if seconds else ""


def duration(seconds: float) -> str:
    """Write a number of seconds as text, with two units at most.

    >>> duration(42.3), duration(754), duration(7530), duration(200_000)
    ('42 s', '12 min 34 s', '2 h 5 min', '2 d 7 h')
    """
    units = {"d": 86_400, "h": 3600, "min": 60, "s": 1}
    left, parts = round(seconds), list[str]()
    for name, size in units.items():
        if left >= size or (name == "s" and not parts):
            parts.append(f"{left // size} {name}")
        elif parts:
            break
        left %= size
    return " ".join(parts[:2])
