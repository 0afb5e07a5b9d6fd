"""Save and restore Orbax checkpoints, which hold the training state and the run's progress (`Cursor`)."""

import dataclasses
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy

from mugrpo_jax.config import CheckpointsSection
from mugrpo_jax.files import absolute
from mugrpo_jax.training.state import TrainState


@dataclasses.dataclass(frozen=True)
class Cursor:
    """The progress of a run.

    Attributes:
      stage: the index of the stage whose rollouts are being generated or optimised.
      update: the number of updates done in this stage. At 0, rollouts may still be missing.
      updates: the number of updates done in the whole run.
      data: the position in the stage's stream of updates, or None before the first update of the stage.
    """

    stage: int = 0
    update: int = 0
    updates: int = 0
    data: dict[str, Any] | None = None


class CheckpointStore:
    """A folder of checkpoints. `keep` says which checkpoints to keep; with None, the folder is read-only.

    `keep.keep_stage_starts` has an effect only with `updates_per_stage`, which says where stages start.
    """

    def __init__(
        self, folder: Path, keep: CheckpointsSection | None = None, *, updates_per_stage: int | None = None
    ) -> None:
        options: dict[str, Any] = {"read_only": True, "create": False, "save_interval_steps": 0}
        if keep is not None:
            options = {
                "preservation_policy": _preservation_policy(keep, updates_per_stage),
                "enable_async_checkpointing": True,
            }
        self._manager = ocp.CheckpointManager(
            absolute(folder),
            options=ocp.CheckpointManagerOptions(best_fn=_accuracy, step_format_fixed_length=6, **options),
        )

    def save(self, state: TrainState, cursor: Cursor, *, accuracy: float | None = None) -> None:
        """Start to save in the background, unless the newest checkpoint has the same number of updates.

        The checkpoint exists once Orbax has renamed its temporary folder. `accuracy` is on held-out problems.
        """
        if self._manager.latest_step() == cursor.updates:
            return
        self._manager.save(
            cursor.updates,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state), cursor=ocp.args.JsonSave(dataclasses.asdict(cursor))
            ),
            metrics=None if accuracy is None else {"accuracy": accuracy},
        )

    def latest(self) -> int | None:
        """Return the number of updates at the newest checkpoint, or None if there is no checkpoint."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """Return the number of updates at each checkpoint in the folder, in ascending order."""
        return sorted(self._manager.all_steps())

    def best(self) -> int | None:
        """Return the number of updates at the most accurate checkpoint, or None if no accuracy was saved."""
        return self._manager.best_step()

    def restore(self, abstract: TrainState, step: int | None = None) -> tuple[TrainState, Cursor]:
        """Load state and cursor of a checkpoint (default: the newest) with the shardings of `abstract`."""
        step = self._manager.latest_step() if step is None else step
        found = self._manager.restore(
            step,
            args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract), cursor=ocp.args.JsonRestore()),
        )
        return found["state"], Cursor(**found["cursor"])

    def restore_params(self, abstract: Any, step: int) -> Any:
        """Load only the weights of a checkpoint, with the shapes, dtypes and shardings of `abstract`."""
        wanted = ocp.args.PyTreeRestore(
            {"params": abstract},
            restore_args=ocp.checkpoint_utils.construct_restore_args({"params": abstract}),
            partial_restore=True,
        )
        return self._manager.restore(step, args=ocp.args.Composite(state=wanted))["state"]["params"]

    def wait(self) -> None:
        """Block until the last save is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Finish saving and stop the background threads."""
        self._manager.close()


def _accuracy(metrics: Any) -> float:
    return metrics["accuracy"]


def _preservation_policy(keep: CheckpointsSection, updates_per_stage: int | None) -> Any:
    policies: list[Any] = [preservation_policy.LatestN(keep.keep_last)]
    if keep.keep_best:
        best = preservation_policy.BestN(
            get_metric_fn=_accuracy, n=keep.keep_best, keep_checkpoints_without_metrics=False
        )
        policies.append(best)
    if keep.keep_stage_starts and updates_per_stage is not None:
        policies.append(preservation_policy.EveryNSteps(updates_per_stage))
    return preservation_policy.AnyPreservationPolicy(policies)
