"""The journal of a run: its metrics as JSON lines, in `metrics.jsonl`."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from mugrpo_jax.config import ConfigError
from mugrpo_jax.files import read_json_lines, write_atomically
from mugrpo_jax.runs.trackers import Tracker


class Journal:
    """Metrics as JSON lines, one record per event, in the order of the run.

    Every record has a `kind` (`warm_start`, `evaluation`, `stage`, `update`) and `updates`, the number of
    optimizer updates done when it was written. Wall-clock times are under `seconds`; everything else is the
    same when a run is repeated. Only process 0 writes the file. All processes keep the records of stages and
    evaluations in memory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._writes = jax.process_index() == 0
        self._events: dict[tuple[str, int], dict[str, Any]] = {}
        for record in read_journal(path):
            self._remember(record)
        self._trackers: list[Tracker] = []
        self._last = time.monotonic()

    def follow(self, tracker: Tracker) -> None:
        """Send all existing records, and every new one, to a tracker."""
        tracker.restart(list(read_journal(self.path)))
        self._trackers.append(tracker)

    def write(self, record: dict[str, Any]) -> None:
        """Append a record; its `seconds.elapsed` is the time since the last record or the start."""
        self._remember(record)
        if self._writes:
            now = time.monotonic()
            record = record | {"seconds": record.get("seconds", {}) | {"elapsed": now - self._last}}
            self._last = now
            try:
                with self.path.open("a") as file:
                    file.write(json.dumps(record) + "\n")
            except OSError as error:
                raise ConfigError(
                    f"{self.path}: cannot be written ({error.strerror}); the same command continues"
                ) from None
            for tracker in self._trackers:
                tracker.write(record)

    def find(self, kind: str, updates: int) -> dict[str, Any] | None:
        """The record of the stage or evaluation that was written after so many updates."""
        return self._events.get((kind, updates))

    def rewind(self, updates: int) -> None:
        """Delete all records after the checkpoint from which the run continues."""
        self._events = {event: record for event, record in self._events.items() if event[1] <= updates}
        if not self._writes or not self.path.exists():
            return
        kept = [record for record in read_journal(self.path) if record["updates"] <= updates]
        write_atomically(self.path, "".join(json.dumps(record) + "\n" for record in kept))
        for tracker in self._trackers:
            tracker.restart(kept)

    def _remember(self, record: dict[str, Any]) -> None:
        if record["kind"] in ("stage", "evaluation"):
            self._events[record["kind"], record["updates"]] = record


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a journal, in order, without a line that a kill cut off; none if there is no file."""
    return (record for _, record in read_json_lines(path, skip_damaged=True))
