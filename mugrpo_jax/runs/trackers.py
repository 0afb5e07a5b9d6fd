"""Metrics elsewhere than in the journal: TensorBoard and Weights & Biases.

The journal of a run is the truth; a tracker shows what stands in it. It is handed every record and, when a
run continues from a checkpoint, the records that are left (`restart`): what was recorded behind the
checkpoint is done again and must not stand there twice.
"""

import importlib.util
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from mugrpo_jax.config import ConfigError, RunConfig, to_dict

Record = Mapping[str, Any]


class Tracker(Protocol):
    """Shows the records of a journal somewhere."""

    def restart(self, records: Sequence[Record]) -> None:
        """Show these records and no others."""
        ...

    def write(self, record: Record) -> None:
        """Show one more."""
        ...

    def close(self) -> None:
        """Wait until everything is written."""
        ...


def check_trackers(config: RunConfig) -> None:
    """Refuse a config whose trackers are not installed."""
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
    """The trackers that a config asks for."""
    trackers: list[Tracker] = []
    if config.tracking.tensorboard:
        trackers.append(TensorBoard(folder / "tensorboard"))
    if config.tracking.wandb is not None:
        trackers.append(WandB(config.tracking.wandb, folder, to_dict(config)))
    return [Harmless(tracker) for tracker in trackers]


def scalars(record: Record) -> Iterator[tuple[str, float]]:
    """The numbers of a record by name, such as `update/reward` or `stage/seconds/generate`.

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
    """Event files in a folder, one step an update; a run that continues writes them anew from its journal."""

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
    """A run of Weights & Biases whose steps are the lines of the journal, its x axis the updates.

    Its steps only ever grow, and a repeated update gives the numbers it gave before. So lines that were sent
    once are not sent again; `wandb.json` in the run's folder remembers the run's id and how many they are.
    """

    def __init__(self, project: str, folder: Path, config: Mapping[str, Any]) -> None:
        import wandb

        self._state = folder / "wandb.json"
        known: dict[str, Any] = {"id": None, "lines": 0}
        if self._state.exists():
            known = json.loads(self._state.read_text())
        self._run: Any = wandb.init(
            project=project,
            name=folder.resolve().name,
            dir=str(folder),
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
            self._state.write_text(json.dumps({"id": self._run.id, "lines": self._sent}))
        self._line += 1

    def close(self) -> None:
        """See `Tracker`."""
        self._run.finish()


class Harmless:
    """A tracker that is dropped, with a word, when it fails: it must not end a run."""

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
        except Exception as error:  # whatever a foreign package or a network may raise
            name = type(self._tracker).__name__
            print(f"{name}: {error}; the run goes on with metrics.jsonl alone", file=sys.stderr)
            self._tracker = None
