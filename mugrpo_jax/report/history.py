"""What a run wrote into its journal, arranged for tables and figures."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mugrpo_jax.config import ConfigError, RunConfig
from mugrpo_jax.run import read_config, read_journal

VETOED, CLIPPED, ESS = "vetoed/tokens", "clipped/tokens", "ess/tokens"


@dataclasses.dataclass(frozen=True)
class StageFigures:
    """One stage in numbers; NaN where nothing was recorded.

    Attributes:
      stage: its number.
      updates: updates done in it.
      reward: mean reward of its rollouts.
      vetoed: share of tokens vetoed, mean over its updates.
      ess: effective sample size as a share of tokens, at its last update.
      generate_seconds: spent on generating and scoring; 0 when it was replayed.
      update_seconds: spent on updates.
      accuracy: held out, after the stage.
    """

    stage: int
    updates: int
    reward: float
    vetoed: float
    ess: float
    generate_seconds: float
    update_seconds: float
    accuracy: float


@dataclasses.dataclass(frozen=True)
class History:
    """The records of one run, by kind, in order."""

    name: str
    folder: Path
    config: RunConfig
    warm_start: tuple[dict[str, Any], ...]
    evaluations: tuple[dict[str, Any], ...]
    generations: tuple[dict[str, Any], ...]
    updates: tuple[dict[str, Any], ...]

    @property
    def boundaries(self) -> list[int]:
        """Updates done at the start of each stage after the first."""
        mu = self.config.batch.updates_per_stage
        return [stage * mu for stage in self.config.stages[1:]]

    def by_stage(self) -> list[list[dict[str, Any]]]:
        """The update records of each stage that has any."""
        stages = sorted({record["stage"] for record in self.updates})
        return [[record for record in self.updates if record["stage"] == stage] for stage in stages]

    def stages(self) -> list[StageFigures]:
        """Every stage under way or done, in numbers."""
        generated = {record["stage"]: record for record in self.generations}
        updated = {records[0]["stage"]: records for records in self.by_stage()}
        return [
            self._stage(stage, generated.get(stage), updated.get(stage, []))
            for stage in sorted(generated.keys() | updated.keys())
        ]

    def _stage(
        self, stage: int, generated: dict[str, Any] | None, updates: Sequence[dict[str, Any]]
    ) -> StageFigures:
        after = updates[-1]["updates"] if updates else -1
        whole = len(updates) == self.config.batch.updates_per_stage
        accuracy = [record["accuracy"] for record in self.evaluations if record["updates"] == after and whole]
        return StageFigures(
            stage=stage,
            updates=len(updates),
            reward=_mean([r["reward"] for r in updates]) if generated is None else generated["reward"],
            vetoed=_mean([record.get(VETOED, math.nan) for record in updates]),
            ess=updates[-1].get(ESS, math.nan) if updates else math.nan,
            generate_seconds=0.0 if generated is None else generated["seconds"]["generate"],
            update_seconds=sum(record["seconds"]["update"] for record in updates),
            accuracy=accuracy[-1] if accuracy else math.nan,
        )


def read_run(folder: str | Path) -> History:
    """Read the journal of a run, finished or not."""
    folder = Path(folder)
    config = read_config(folder)
    path = folder / "metrics.jsonl"
    records = list(read_journal(path))
    if not records:
        raise ConfigError(f"{path}: nothing recorded yet")

    def kind(name: str) -> tuple[dict[str, Any], ...]:
        return tuple(record for record in records if record["kind"] == name)

    return History(
        name=folder.resolve().name,
        folder=folder,
        config=config,
        warm_start=kind("warm_start"),
        evaluations=kind("evaluation"),
        generations=kind("stage"),
        updates=kind("update"),
    )


def summary(run: History) -> str:
    """A run as text: accuracy before and after, and a line for each stage."""
    lines = [f"{run.folder}: {run.config.objective.name}, {len(run.updates)} updates", *_accuracy(run)]
    header = ["stage", "updates", "reward", "vetoed", "ESS", "generate s", "update s", "accuracy"]
    rows = [
        [
            str(stage.stage),
            str(stage.updates),
            _number(stage.reward),
            "–" if math.isnan(stage.vetoed) else f"{100 * stage.vetoed:.2f} %",
            _number(stage.ess),
            f"{stage.generate_seconds:.1f}",
            f"{stage.update_seconds:.1f}",
            _number(stage.accuracy),
        ]
        for stage in run.stages()
    ]
    widths = [max(map(len, column)) for column in zip(header, *rows)]
    lines += ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in [header, *rows]]
    return "\n".join(lines)


def _accuracy(run: History) -> list[str]:
    if not run.evaluations:
        return []
    first, last = run.evaluations[0], run.evaluations[-1]
    return [
        f"held-out accuracy {first['accuracy']:.3f} ± {first['standard_error']:.3f} → "
        f"{last['accuracy']:.3f} ± {last['standard_error']:.3f} on {last['problems']} problems"
    ]


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.3f}"


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else math.nan
