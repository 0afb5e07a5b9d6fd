"""The journal of a run: the file `metrics.jsonl`, which stores all metrics as JSON lines."""

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from mugrpo_jax.config import ConfigError
from mugrpo_jax.files import LineFile, read_json_lines
from mugrpo_jax.runs import progress
from mugrpo_jax.runs.trackers import Tracker


class Journal:
    """Appends a run's metrics to a file: one record, which is one JSON line, per event.

    Every record has a `kind` (`warm_start`, `evaluation`, `stage`, `reference` or `update`) and `updates`,
    the number of optimizer updates so far. Wall-clock times are under the key `seconds`; all other values are
    the same when a run is repeated. Only process 0 writes the file. All processes remember the records of
    evaluations, stages and reference log-probs.

    Attributes:
      losses: a text for each time that records were found to be missing or changed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._writes = jax.process_index() == 0
        self._events: dict[tuple[str, int], dict[str, Any]] = {}
        for record in read_journal(path):
            self._remember(record)
        self._file = LineFile(path)
        self._trackers: list[Tracker] = []
        self.losses: list[str] = []
        self._written = _Position()
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
                self._file.append(json.dumps(record) + "\n")
                self._written.add(record)
            except OSError as error:
                raise ConfigError(
                    f"{self.path}: cannot be written ({error.strerror or error}); the same command continues"
                ) from None
            for tracker in self._trackers:
                tracker.write(record)

    def find(self, kind: str, updates: int) -> dict[str, Any] | None:
        """Return the record of this kind (not `update`) that was written after so many updates, or None."""
        return self._events.get((kind, updates))

    def position(self) -> dict[str, Any]:
        """Return what the file contains now, to store it in a checkpoint."""
        return self._written.as_dict() | {"losses": list(self.losses)}

    def rewind(self, updates: int, expected: Mapping[str, Any] | None = None) -> None:
        """Delete the records after `updates` updates, because the run resumes from that checkpoint.

        `expected` is the `position` in the checkpoint. Print a line if records are missing or changed.
        """
        self._events = {event: record for event, record in self._events.items() if event[1] <= updates}
        if not self._writes:
            return
        kept = [record for record in read_journal(self.path) if record["updates"] <= updates]
        if expected is not None:
            self.losses = journal_losses(self.path, kept, updates, expected)
            for loss in self.losses[len(expected["losses"]) :]:
                progress.say(f"{loss}; training goes on without them")
        self._written = _Position(kept)
        if not self.path.exists():
            return
        self._file.replace("".join(json.dumps(record) + "\n" for record in kept))
        for tracker in self._trackers:
            tracker.restart(kept)

    def sync(self) -> None:
        """Upload the journal of a run in a bucket; on a local disk, every record is written already."""
        self._file.sync()

    def _remember(self, record: dict[str, Any]) -> None:
        if record["kind"] in ("stage", "reference", "evaluation"):
            self._events[record["kind"], record["updates"]] = record


class _Position:
    """Counts the records of a journal, and computes their checksum."""

    def __init__(self, records: Iterable[Mapping[str, Any]] = ()) -> None:
        self.records, self.updates, self._digest = 0, 0, hashlib.sha256()
        for record in records:
            self.add(record)

    def add(self, record: Mapping[str, Any]) -> None:
        self.records += 1
        self.updates += record["kind"] == "update"
        self._digest.update(json.dumps(record).encode() + b"\n")

    def as_dict(self) -> dict[str, Any]:
        return {"records": self.records, "updates": self.updates, "sha256": self._digest.hexdigest()}


def journal_losses(
    path: Path, records: Sequence[Mapping[str, Any]], updates: int, expected: Mapping[str, Any]
) -> list[str]:
    """Return a text for each loss of records that the checkpoint after `updates` updates knows or reveals.

    Args:
      path: the journal file, for the text.
      records: the records in the file, up to the checkpoint.
      expected: the journal's `position` in the checkpoint.
    """
    losses, count = list(expected["losses"]), expected["records"]
    if _Position(records[:count]).as_dict() == {name: expected[name] for name in _Position().as_dict()}:
        return losses
    found = {record["updates"] for record in records if record["kind"] == "update"}
    missing = [
        number for number in range(updates - expected["updates"] + 1, updates + 1) if number not in found
    ]
    what = f"{count - len(records)} of the" if len(records) < count else "some of the"
    which = ""
    if missing:
        span = f"{len(missing)} updates from {missing[0]} to {missing[-1]}"
        which = f", among them {f'update {missing[0]}' if len(missing) == 1 else span}"
    changed = "missing" if len(records) < count else "missing or changed"
    return [*losses, f"{path}: {what} {count} records up to update {updates} are {changed}{which}"]


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records in a journal file; skip damaged lines, and yield nothing if there is no file."""
    for _, record in read_json_lines(path, skip_damaged=True):
        named = isinstance(record, dict) and isinstance(record.get("kind"), str)
        if named and isinstance(record.get("updates"), int):
            yield record
