"""Save and restore Orbax checkpoints, which hold the training state and the run's progress (`Cursor`)."""

import contextlib
import dataclasses
import hashlib
import json
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from mugrpo_jax.config import CheckpointsSection, ConfigError
from mugrpo_jax.files import absolute, is_remote, write_atomically
from mugrpo_jax.training.checksums import ACCURACY, COMMITTED, damage, write_checksums
from mugrpo_jax.training.state import TrainState

_REMOVAL_S = 2.0  # how long the removal of a checkpoint may take
_EXTRA = "extra"  # a file that marks a checkpoint which was saved only because the run was stopped


@dataclasses.dataclass(frozen=True)
class Cursor:
    """The progress of a run.

    Attributes:
      stage: the index of the stage whose rollouts are being generated or optimised.
      update: the number of updates done in this stage. At 0, rollouts may still be missing.
      updates: the number of updates done in the whole run.
      data: the position in the stage's stream of updates, or None before the first update of the stage.
      journal: what the journal contained when the checkpoint was saved, see `Journal.position`.
    """

    stage: int = 0
    update: int = 0
    updates: int = 0
    data: dict[str, Any] | None = None
    journal: dict[str, Any] | None = None


def not_written(path: Path, error: Exception) -> ConfigError:
    """Return one line about an error with which Orbax did not write a folder."""
    known = re.findall(r"([^:]+) \[os_error_code|\[Errno \d+\] ([^:]+)", str(error))
    reason = "".join(known[-1]).strip() if known else " ".join(str(error).split())[:300]
    return ConfigError(f"{path}: cannot be written ({reason}); the same command continues")


class CheckpointStore:
    """A folder of checkpoints. `keep` says which checkpoints to keep; with None, the folder is read-only.

    `keep.keep_stage_starts` has an effect only with `updates_per_stage`, which says where stages start.
    """

    def __init__(
        self, folder: Path, keep: CheckpointsSection | None = None, *, updates_per_stage: int | None = None
    ) -> None:
        self.folder = absolute(folder)
        self._keep, self._updates_per_stage = keep, updates_per_stage
        options: dict[str, Any] = {"read_only": True, "create": False, "save_interval_steps": 0}
        if keep is not None:
            options = {
                "preservation_policy": self,
                "async_options": ocp.AsyncOptions(post_finalization_callback=self._before_commit),
            }
        self._manager = ocp.CheckpointManager(
            self.folder,
            # A lightweight start does not read the files of the checkpoints, which may be damaged.
            options=ocp.CheckpointManagerOptions(
                step_format_fixed_length=6, lightweight_initialize=True, **options
            ),
        )
        self._accuracy = {step: _read_accuracy(self.path(step) / ACCURACY) for step in self.steps()}
        self._extra = {step for step in self.steps() if (self.path(step) / _EXTRA).exists()}
        self._saving, self._failed = -1, False

    def save(
        self, state: TrainState, cursor: Cursor, *, accuracy: float | None = None, extra: bool = False
    ) -> None:
        """Start to save in the background. If the newest checkpoint is this one, only add its accuracy.

        The checkpoint exists once Orbax has renamed its temporary folder (in a bucket, see `_before_commit`).

        Args:
          accuracy: the accuracy on held-out problems, if it was measured.
          extra: the run saves only because it was stopped. The next checkpoint replaces this one.
        """
        self.wait()  # so that `_before_commit` of the last save has ended
        step = self._saving = cursor.updates
        if self._manager.latest_step() == step:
            if accuracy is not None and self._accuracy.get(step) != accuracy:
                self._rate(step, accuracy)
            return
        self._accuracy[step] = accuracy
        if extra:
            self._extra.add(step)
        with self._writing():
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state), cursor=ocp.args.JsonSave(dataclasses.asdict(cursor))
                ),
            )

    def path(self, step: int) -> Path:
        """Return the folder of the checkpoint after `step` updates."""
        return self.folder / f"{step:06d}"

    def latest(self) -> int | None:
        """Return the number of updates at the newest checkpoint, or None if there is no checkpoint."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """Return the number of updates at each checkpoint in the folder, in ascending order."""
        return sorted(self._manager.all_steps())

    def best(self) -> int | None:
        """Return the number of updates at the most accurate checkpoint, or None if no accuracy was saved."""
        return next(reversed(self._by_accuracy(self.steps())), None)

    def check(self, step: int) -> None:
        """Raise an error that names a damaged file of a checkpoint and the other checkpoints."""
        with self.still_kept(step):
            if (problem := damage(self.path(step))) is not None:
                others = ", ".join(str(other) for other in self.steps() if other != step) or "none"
                raise ConfigError(f"{problem}; choose another checkpoint by its updates; kept: {others}")

    def restore(self, abstract: TrainState, step: int | None = None) -> tuple[TrainState, Cursor]:
        """Load state and cursor of a checkpoint (default: the newest) with the shardings of `abstract`."""
        step = self._manager.latest_step() if step is None else step
        assert step is not None
        wanted = ocp.args.Composite(state=ocp.args.StandardRestore(abstract), cursor=ocp.args.JsonRestore())
        with self.still_kept(step):
            found = self._manager.restore(step, args=wanted)
        cursor = Cursor(**found["cursor"])
        if cursor.updates != step:
            raise ConfigError(f"{self.path(step)}: holds the state after {cursor.updates} updates")
        return found["state"], cursor

    def restore_params(self, abstract: Any, step: int) -> Any:
        """Load only the weights of a checkpoint, with the shapes, dtypes and shardings of `abstract`."""
        wanted = ocp.args.PyTreeRestore(
            {"params": abstract},
            restore_args=ocp.checkpoint_utils.construct_restore_args({"params": abstract}),
            partial_restore=True,
        )
        with self.still_kept(step):
            return self._manager.restore(step, args=ocp.args.Composite(state=wanted))["state"]["params"]

    @contextlib.contextmanager
    def still_kept(self, step: int) -> Iterator[None]:
        """Read a checkpoint in a `with` block. If that fails because its run has removed it, say so.

        A run that trains on may remove any checkpoint but its newest one, file by file.
        """
        try:
            yield
        except Exception:
            end = time.monotonic() + _REMOVAL_S
            while (kept := _steps(self.folder)) and step in kept:
                if step == kept[-1] or time.monotonic() > end:
                    raise
                time.sleep(0.1)
            known = ", ".join(map(str, kept)) or "none"
            raise ConfigError(
                f"{self.path(step)}: removed by its run, which trains on, before it was read; kept: {known}"
            ) from None

    def wait(self) -> None:
        """Block until the last save is on disk."""
        with self._writing():
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Finish saving and stop the background threads."""
        if not self._failed:
            self.wait()
            self._manager.close()

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Tell Orbax which checkpoints to keep. Orbax calls this method when it saves a new checkpoint."""
        kept = self._kept([info.step for info in checkpoints])
        return [info.step in kept for info in checkpoints]

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn an error of Orbax into one line, and do not use Orbax any more after it."""
        try:
            yield
        except (ValueError, OSError) as error:
            self._failed = True
            raise not_written(self.path(self._saving), error) from None

    def _kept(self, steps: Sequence[int]) -> set[int]:
        keep = self._keep
        assert keep is not None
        steps = sorted(steps)
        kept = {*steps[-1:], *[step for step in steps if step not in self._extra][-keep.keep_last :]}
        if keep.keep_best:
            kept.update(self._by_accuracy(steps)[-keep.keep_best :])
        if keep.keep_stage_starts and self._updates_per_stage is not None:
            kept.update(step for step in steps if step % self._updates_per_stage == 0)
        return kept

    def _by_accuracy(self, steps: Sequence[int]) -> list[int]:
        """Return the steps whose accuracy is known, the best one last; of equal ones, the newest last."""
        known = {step: value for step in steps if (value := self._accuracy.get(step)) is not None}
        return sorted(known, key=lambda step: (known[step], step))

    def _rate(self, step: int, accuracy: float) -> None:
        """Add the accuracy to a checkpoint that was saved without it, and delete those not kept any more."""
        if jax.process_index() == 0:
            with self._writing():
                _write_accuracy(self.path(step) / ACCURACY, accuracy)
        self._accuracy[step] = accuracy
        for old in sorted(set(self.steps()) - self._kept(self.steps())):
            self._manager.delete(old)

    def _before_commit(self) -> None:
        """Complete the files of a checkpoint. Orbax calls this before it makes the checkpoint valid.

        It does that by renaming the temporary folder. In a bucket, it writes directly into the final folder,
        and makes the checkpoint valid by writing the file `COMMITTED`.
        """
        step, name = self._saving, self.path(self._saving).name
        for folder in (path for path in self.folder.iterdir() if path.name.partition(".")[0] == name):
            if step in self._extra:
                write_atomically(folder / _EXTRA, b"")
            if (accuracy := self._accuracy[step]) is not None:
                _write_accuracy(folder / ACCURACY, accuracy)
            write_checksums(folder)


def checkpoint_folders(folder: Path) -> list[Path]:
    """Return the folders of all checkpoints in `folder` whose saving was finished, the oldest first."""
    found = sorted(path for path in folder.glob("*") if path.name.isdigit())
    return [path for path in found if not is_remote(path) or (path / COMMITTED).exists()]


def _steps(folder: Path) -> list[int]:
    return [int(path.name) for path in checkpoint_folders(folder)]


def newest_cursor(folder: Path) -> Cursor | None:
    """Read the cursor of the newest checkpoint without Orbax; None if there is none that can be read."""
    found = checkpoint_folders(folder)
    if not found:
        return None
    try:
        return Cursor(**json.loads((found[-1] / "cursor" / "metadata").read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def _write_accuracy(path: Path, accuracy: float) -> None:
    write_atomically(path, _accuracy_text(repr(float(accuracy))))


def _accuracy_text(number: str) -> str:
    return f"{number} {hashlib.sha256(number.encode()).hexdigest()}\n"


def _read_accuracy(path: Path) -> float | None:
    """Return the accuracy in a file; None if there is no file, or if the file is damaged."""
    try:
        text = path.read_bytes().decode("latin-1")
    except FileNotFoundError:
        return None
    number = text.partition(" ")[0]
    if text != _accuracy_text(number):
        print(f"{path}: damaged; this checkpoint counts as not evaluated")
        return None
    return float(number)
