"""The folder of a run: its config, its journal of metrics, its checkpoints and rollouts, and how it stops."""

import json
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import jax
import yaml

from mugrpo_jax import config as configs
from mugrpo_jax.config import ConfigError, RunConfig


class Stopped(Exception):
    """The run was asked to stop (SIGTERM or Ctrl-C) and everything is on disk."""


class RunFolder:
    """Paths, config and journal of one run.

    Opening an existing folder with another config is refused with the differing keys.
    """

    def __init__(self, folder: Path, config: RunConfig) -> None:
        self.folder, self.config = folder, config
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._claim()
        except OSError as error:
            raise ConfigError(f"{folder}: cannot be written ({error.strerror})") from None
        self.journal = Journal(folder / "metrics.jsonl")

    def _claim(self) -> None:
        path = self.folder / "config.yaml"
        here = configs.to_dict(self.config)
        if path.exists():
            there = yaml.safe_load(path.read_text())
            differing = configs.differing_keys(there, here)
            if differing:
                raise ConfigError(
                    f"{path}: this run was started with another config: {'; '.join(differing)}; "
                    "use another --out, or the config it was started with"
                )
        elif jax.process_index() == 0:
            temporary = path.with_suffix(".tmp")
            temporary.write_text(yaml.safe_dump(here, sort_keys=False))
            os.replace(temporary, path)

    def stage_folder(self, stage: int) -> Path:
        """Where the rollouts of a stage are."""
        return stage_folder(self.folder, stage)


def stage_folder(run: Path, stage: int) -> Path:
    """Where a run keeps the rollouts of a stage."""
    return run / "rollouts" / f"stage-{stage:03d}"


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
    differs between a run and its repetition.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.enabled = jax.process_index() == 0

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record."""
        if not self.enabled:
            return
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def read(self, kind: str | None = None) -> list[dict[str, Any]]:
        """All records, or those of one kind; a line that a kill cut short is left out."""
        return [record for record in read_journal(self.path) if kind in (None, record["kind"])]

    def has(self, kind: str, updates: int) -> bool:
        """Whether an event is recorded."""
        return any(record["updates"] == updates for record in self.read(kind))

    def rewind(self, updates: int) -> None:
        """Forget what was recorded after a checkpoint that the run now continues from."""
        if not self.enabled or not self.path.exists():
            return
        kept = [json.dumps(record) for record in self.read() if record["updates"] <= updates]
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(line + "\n" for line in kept))
        os.replace(temporary, self.path)


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """Records of a journal, in order."""
    if not path.exists():
        return
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


class StopRequest:
    """Turns SIGTERM and Ctrl-C into a flag that the loops look at; a second Ctrl-C interrupts at once."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True
        print("\nstopping: finishing what is under way and saving; the same command continues", flush=True)
