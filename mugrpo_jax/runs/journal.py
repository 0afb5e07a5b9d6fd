"""The journal of a run: the file `metrics.jsonl`, which stores all metrics as JSON lines."""

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
    """Appends a run's metrics to a file: one record, which is one JSON line, per event.

    Every record has a `kind` (`warm_start`, `evaluation`, `stage`, `reference` or `update`) and `updates`,
    the number of optimizer updates so far. Wall-clock times are under the key `seconds`; all other values are
    the same when a run is repeated. Only process 0 writes the file. All processes remember the records of
    evaluations, stages and reference log-probs.
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
        """Send all existing records to a tracker now, and each new record when it is written."""
        tracker.restart(list(read_journal(self.path)))
        self._trackers.append(tracker)

    def write(self, record: dict[str, Any]) -> None:
        """Append a record, with the seconds since the last record (or the start) as `seconds.elapsed`."""
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
        """Return the record of this kind (not `update`) that was written after so many updates, or None."""
        return self._events.get((kind, updates))

    def rewind(self, updates: int) -> None:
        """Delete the records after `updates` updates, because the run resumes from that checkpoint."""
        self._events = {event: record for event, record in self._events.items() if event[1] <= updates}
        if not self._writes or not self.path.exists():
            return
        kept = [record for record in read_journal(self.path) if record["updates"] <= updates]
        write_atomically(self.path, "".join(json.dumps(record) + "\n" for record in kept))
        for tracker in self._trackers:
            tracker.restart(kept)

    def _remember(self, record: dict[str, Any]) -> None:
        if record["kind"] in ("stage", "reference", "evaluation"):
            self._events[record["kind"], record["updates"]] = record


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records in a journal file; skip damaged lines, and yield nothing if there is no file."""
    return (record for _, record in read_json_lines(path, skip_damaged=True))
