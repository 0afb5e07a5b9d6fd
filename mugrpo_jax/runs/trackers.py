"""Trackers send the journal's metrics to TensorBoard and to Weights & Biases.

When a run resumes from a checkpoint, the journal deletes the records after the checkpoint and calls `restart`
with the remaining records. The run then writes the deleted records again; a tracker must not show them twice.
"""

import importlib.util
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from mugrpo_jax.config import ConfigError, RunConfig, to_dict
from mugrpo_jax.files import absolute, is_remote, scratch_folder, write_atomically

Record = Mapping[str, Any]


class Tracker(Protocol):
    """Shows the records of a run's journal in another program."""

    def restart(self, records: Sequence[Record]) -> None:
        """Start again with these records, because a run starts or resumes."""

    def write(self, record: Record) -> None:
        """Show one more record."""

    def close(self) -> None:
        """Wait until all records are written."""


def check_trackers(config: RunConfig, folder: Path) -> None:
    """Raise an error if the config asks for a tracker that is not installed, or not for this run folder."""
    if config.tracking.tensorboard and is_remote(folder):
        raise ConfigError(f"tracking.tensorboard: not possible in a bucket ({folder}); leave the key out")
    wanted = {
        "tensorboard": ("tensorboardX", config.tracking.tensorboard),
        "wandb": ("wandb", config.tracking.wandb is not None),
    }
    for extra, (module, asked) in wanted.items():
        if asked and importlib.util.find_spec(module) is None:
            raise ConfigError(
                f"tracking.{extra}: the package {module} is not installed; "
                f"pip install 'mugrpo-jax[{extra}]', or leave the key out"
            )


def open_trackers(config: RunConfig, folder: Path) -> list[Tracker]:
    """Create the trackers that the config asks for; `folder` is the run's folder."""
    trackers: list[Tracker] = []
    if config.tracking.tensorboard:
        trackers.append(TensorBoard(folder / "tensorboard"))
    if config.tracking.wandb is not None:
        trackers.append(WandB(config.tracking.wandb, folder, to_dict(config)))
    return [FailSafeTracker(tracker) for tracker in trackers]


def scalars(record: Record) -> Iterator[tuple[str, float]]:
    """Yield the name and value of every number in a record; nested names are joined with `/`.

    >>> dict(scalars({"kind": "stage", "updates": 8, "reward": 0.5, "seconds": {"generate": 2.0}}))
    {'stage/reward': 0.5, 'stage/seconds/generate': 2.0}
    """
    rest = {name: value for name, value in record.items() if name not in ("kind", "updates")}
    return _flatten(rest, record["kind"])


def _flatten(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}/{name}")
        elif isinstance(value, int | float):
            yield f"{prefix}/{name}", value


class TensorBoard:
    """Writes event files for TensorBoard, one step per update; `restart` writes all files anew."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writer: Any = None

    def restart(self, records: Sequence[Record]) -> None:
        """See `Tracker`."""
        import tensorboardX

        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        self._writer = tensorboardX.SummaryWriter(str(self.folder))
        for record in records:
            self.write(record)

    def write(self, record: Record) -> None:
        """See `Tracker`."""
        for name, value in scalars(record):
            self._writer.add_scalar(name, value, record["updates"])

    def close(self) -> None:
        """See `Tracker`."""
        if self._writer is not None:
            self._writer.close()


class WandB:
    """Sends records to Weights & Biases: a step is a journal line, the x axis is the number of updates.

    Weights & Biases accepts only increasing steps, and an update repeated after a SIGKILL gives the same
    numbers, so each line is sent once. `wandb.json` in the run's folder stores the id of the Weights & Biases
    run and the number of lines sent.
    """

    def __init__(self, project: str, folder: Path, config: Mapping[str, Any]) -> None:
        import wandb

        self._state = folder / "wandb.json"
        known: dict[str, Any] = {"id": None, "lines": 0}
        if self._state.exists():
            known = json.loads(self._state.read_text())
        self._run: Any = wandb.init(
            project=project,
            name=absolute(folder).name,
            dir=str(scratch_folder() if is_remote(folder) else folder),
            id=known["id"],
            resume="allow",
            config=dict(config),
        )
        self._run.define_metric("updates")
        self._run.define_metric("*", step_metric="updates")
        self._sent, self._line = known["lines"], 0

    def restart(self, records: Sequence[Record]) -> None:
        """See `Tracker`."""
        self._line = 0
        for record in records:
            self.write(record)

    def write(self, record: Record) -> None:
        """See `Tracker`."""
        if self._line >= self._sent:
            self._run.log({**dict(scalars(record)), "updates": record["updates"]}, step=self._line)
            self._sent = self._line + 1
            write_atomically(self._state, json.dumps({"id": self._run.id, "lines": self._sent}))
        self._line += 1

    def close(self) -> None:
        """See `Tracker`."""
        self._run.finish()


class FailSafeTracker:
    """Wraps a tracker: prints its first error, then turns the tracker off, so that the run goes on."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker: Tracker | None = tracker

    def restart(self, records: Sequence[Record]) -> None:
        """See `Tracker`."""
        self._try(lambda tracker: tracker.restart(records))

    def write(self, record: Record) -> None:
        """See `Tracker`."""
        self._try(lambda tracker: tracker.write(record))

    def close(self) -> None:
        """See `Tracker`."""
        self._try(lambda tracker: tracker.close())

    def _try(self, action: Callable[[Tracker], None]) -> None:
        if self._tracker is None:
            return
        try:
            action(self._tracker)
        except Exception as error:  # other packages and the network may raise anything
            name = type(self._tracker).__name__
            print(f"{name}: {error}; the run goes on with metrics.jsonl alone", file=sys.stderr)
            self._tracker = None
