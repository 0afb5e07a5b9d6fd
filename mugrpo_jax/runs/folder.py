"""The folder of a run: its config, its journal of metrics, its checkpoints and rollouts, and how it stops."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import jax
import yaml

from mugrpo_jax import config as configs
from mugrpo_jax import distributed
from mugrpo_jax.config import ConfigError, RunConfig
from mugrpo_jax.distributed.launch import Stopped as Stopped
from mugrpo_jax.runs.environment import environment
from mugrpo_jax.runs.trackers import Tracker


class RunFolder:
    """Paths, config and journal of one run.

    Opening an existing folder with another config is refused with the differing keys.
    """

    def __init__(self, folder: Path, config: RunConfig) -> None:
        self.folder, self.config = folder, config
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._claim()
            if jax.process_index() == 0:
                _replace(folder / "environment.json", json.dumps(environment(), indent=1))
        except OSError as error:
            raise ConfigError(f"{folder}: cannot be written ({error.strerror})") from None
        self.journal = Journal(folder / "metrics.jsonl")

    def _claim(self) -> None:
        path = self.folder / "config.yaml"
        here = configs.to_dict(self.config)
        if path.exists():
            there = configs.to_dict(configs.load(path))  # with defaults for keys that did not exist then
            same = dict.fromkeys((*configs.ONLOOKERS, "mesh"))  # a run may continue on other devices
            differing = configs.differing_keys(there | same, here | same)
            if differing:
                raise ConfigError(
                    f"{path}: this run was started with another config: {'; '.join(differing)}; "
                    "use another --out, or the config it was started with"
                )
        elif jax.process_index() == 0:
            _replace(path, yaml.safe_dump(here, sort_keys=False))
        else:
            raise ConfigError(f"{path}: not seen from here; --out must be on storage that all hosts share")

    def stage_folder(self, stage: int) -> Path:
        """Where the rollouts of a stage are."""
        return stage_folder(self.folder, stage)


def stage_folder(run: Path, stage: int) -> Path:
    """Where a run keeps the rollouts of a stage."""
    return run / "rollouts" / f"stage-{stage:03d}"


def _replace(path: Path, text: str) -> None:
    """Write a file so that it is either the old one or the new one."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def read_config(folder: Path) -> RunConfig:
    """The config a run was started with."""
    path = folder / "config.yaml"
    if not path.exists():
        raise ConfigError(f"{folder}: not the folder of a run (it has no config.yaml)")
    return configs.load(path)


class Journal:
    """Metrics as JSON lines, one record an event, in the order of the run.

    Every record has a `kind` (`warm_start`, `evaluation`, `stage`, `update`) and `updates`, the optimizer
    updates done when it was written. Wall-clock figures stand under `seconds`: they are the only part that
    differs between a run and its repetition. One host writes; all know its stages and evaluations.
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
        """Hand all records, those that are there and those to come, to a tracker too."""
        tracker.restart(list(read_journal(self.path)))
        self._trackers.append(tracker)

    def write(self, record: dict[str, Any]) -> None:
        """Append a record; `seconds.elapsed` is the time since the last, or since the process began."""
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
        """The stage or evaluation recorded after so many updates."""
        return self._events.get((kind, updates))

    def rewind(self, updates: int) -> None:
        """Forget what was recorded after a checkpoint that the run now continues from."""
        self._events = {event: record for event, record in self._events.items() if event[1] <= updates}
        if not self._writes or not self.path.exists():
            return
        kept = [record for record in read_journal(self.path) if record["updates"] <= updates]
        _replace(self.path, "".join(json.dumps(record) + "\n" for record in kept))
        for tracker in self._trackers:
            tracker.restart(kept)

    def _remember(self, record: dict[str, Any]) -> None:
        if record["kind"] in ("stage", "evaluation"):
            self._events[record["kind"], record["updates"]] = record


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """Records of a journal, in order; a line that a kill cut short is left out."""
    if not path.exists():
        return
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


class StopRequest:
    """Turns SIGTERM and Ctrl-C into a flag that the loops look at; a second Ctrl-C interrupts at once.

    Attributes:
      requested: whether this host was asked to stop.
    """

    def __init__(self) -> None:
        self.requested = False
        self._agreed = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._handle)
        distributed.share(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def agreed(self) -> bool:
        """Whether all hosts stop here: several must learn of it at the same point of the run."""
        return self._agreed or (self.requested and jax.process_count() == 1)

    def agree(self, answer: bool) -> None:
        """Tell what the hosts agreed on; a yes stays."""
        self._agreed |= answer

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True
        print("\nstopping: finishing what is under way and saving; the same command continues", flush=True)
