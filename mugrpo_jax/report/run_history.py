"""Read the journal of a run (`metrics.jsonl`) and sort its records for tables and figures."""

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mugrpo_jax.config import ConfigError, RunConfig
from mugrpo_jax.files import absolute, to_path
from mugrpo_jax.report.sampler_log import sampling_seconds
from mugrpo_jax.runs.journal import journal_losses, read_journal
from mugrpo_jax.runs.run_folder import read_config
from mugrpo_jax.runs.start_times import recorded_start
from mugrpo_jax.training import newest_cursor

# A record without these keys is damaged and not shown.
_NEEDED = {
    "evaluation": {"accuracy", "standard_error", "problems"},
    "stage": {"stage", "reward"},
    "update": {"stage", "reward"},
}

PHASES = (
    "warm start",
    "generation",
    "scoring",
    "waiting",
    "reference",
    "update",
    "evaluation",
    "compiling",
    "switching",
)


@dataclasses.dataclass(frozen=True)
class StageFigures:
    """The numbers of one stage; NaN if a number was not recorded.

    Attributes:
      updates: number of updates done in the stage.
      reward: mean reward of the stage's rollouts.
      clipped: share of tokens beyond the objective's bounds, mean over the stage's updates.
      vetoed: share of vetoed tokens, mean over the stage's updates; NaN without a veto.
      ess: effective sample size as a share of tokens, mean over the last tenth of the stage's updates.
      generate_seconds: seconds of generation and scoring; 0 if the stage was replayed.
      wait_seconds: seconds that the trainer waited for samplers of their own; 0 without them.
      accuracy: held-out accuracy after the stage.
    """

    stage: int
    updates: int
    reward: float
    clipped: float
    vetoed: float
    ess: float
    generate_seconds: float
    wait_seconds: float
    update_seconds: float
    accuracy: float


@dataclasses.dataclass(frozen=True)
class History:
    """The journal records of one run, sorted by kind. Records of one kind keep the order of the journal.

    `record["seconds"]["clock"]` is the running time of the run when the record was written, without pauses
    between a stop and a restart. `phases[stage][phase]` is the seconds that a stage spent in one of `PHASES`.
    Stage -1 is the time before the first stage. `losses` are texts about missing or changed records.
    """

    name: str
    folder: Path
    config: RunConfig
    environment: dict[str, Any]
    phases: dict[int, dict[str, float]]
    warm_start: tuple[dict[str, Any], ...]
    evaluations: tuple[dict[str, Any], ...]
    generations: tuple[dict[str, Any], ...]
    updates: tuple[dict[str, Any], ...]
    losses: tuple[str, ...] = ()

    @property
    def has_veto(self) -> bool:
        """Return whether the objective of the run vetoes tokens."""
        return self.config.objective.settings.get("veto", "none") != "none"

    @property
    def abandoned_ratios(self) -> set[float]:
        """Return the ratios below which updates counted a token as abandoned; 1e-4 in old records."""
        recorded = {float(record.get("abandoned_ratio", 1e-4)) for record in self.updates}
        return recorded or {self.config.abandoned_ratio}

    @property
    def done(self) -> int:
        """Return the number of updates done so far."""
        return self.updates[-1]["updates"] if self.updates else 0

    @property
    def finished(self) -> bool:
        """Return whether the last update of the last stage is done."""
        return self.done >= self.config.stages.stop * self.config.batch.updates_per_stage

    @property
    def seconds(self) -> float:
        """Return the running time of the run so far, without pauses."""
        records = (*self.warm_start, *self.evaluations, *self.generations, *self.updates)
        return max((record["seconds"]["clock"] for record in records), default=0.0)

    @property
    def start(self) -> str:
        """Return the time from the command to the first token and the first update; empty if unknown."""
        records = (*self.evaluations, *self.generations, *self.updates)
        return recorded_start(sorted(records, key=lambda record: record["seconds"]["clock"]))

    def values(self, metric: str) -> np.ndarray:
        """Return a metric, such as `vetoed/tokens`, at every update; NaN where it was not recorded.

        A mean over no items is NaN too, such as `ratio/negative_tokens` if `negative_tokens` is 0.
        """
        section, _, name = metric.partition("/")
        if section == "seconds":
            found = (record["seconds"].get(name) for record in self.updates)
        else:
            found = (record.get(metric) if record.get(name) != 0 else None for record in self.updates)
        values = np.array([math.nan if value is None else value for value in found], np.float64)
        return np.where(np.isfinite(values), values, np.nan)

    @functools.cached_property
    def stage_slices(self) -> dict[int, slice]:
        """Return {stage: slice of `updates` that belongs to the stage}."""
        slices, start = {}, 0
        for stage, records in itertools.groupby(self.updates, lambda record: record["stage"]):
            end = start + sum(1 for _ in records)
            slices[stage] = slice(start, end)
            start = end
        return slices

    def by_stage(self) -> list[list[dict[str, Any]]]:
        """Return a list of update records for each stage that has updates."""
        return [list(self.updates[part]) for part in self.stage_slices.values()]

    def stages(self) -> list[StageFigures]:
        """Return the `StageFigures` of every stage that has started."""
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
        at_end = max(1, len(updates) // 10)  # one update alone is noisy
        whole = len(updates) == self.config.batch.updates_per_stage
        accuracy = [record["accuracy"] for record in self.evaluations if record["updates"] == after and whole]
        return StageFigures(
            stage=stage,
            updates=len(updates),
            reward=_mean([r["reward"] for r in updates]) if generated is None else generated["reward"],
            clipped=_mean([record.get("clipped/tokens", math.nan) for record in updates]),
            vetoed=_mean([record.get("vetoed/tokens", math.nan) for record in updates])
            if self.has_veto
            else math.nan,
            ess=_mean([record.get("ess/tokens", math.nan) for record in updates[-at_end:]]),
            generate_seconds=0.0 if generated is None else sampling_seconds(generated).get("generate", 0.0),
            wait_seconds=0.0 if generated is None else generated["seconds"].get("wait", 0.0),
            update_seconds=sum(record["seconds"].get("update", 0.0) for record in updates),
            accuracy=accuracy[-1] if accuracy else math.nan,
        )


def read_run(folder: str | Path) -> History:
    """Read the journal of a run. The run need not be finished."""
    folder = to_path(folder)
    config = read_config(folder)
    path = folder / "metrics.jsonl"
    records = [record for record in read_journal(path) if _NEEDED.get(record["kind"], set()) <= record.keys()]
    if not records:
        raise ConfigError(f"{path}: nothing recorded yet")
    _set_clocks(records)

    def kind(name: str) -> tuple[dict[str, Any], ...]:
        return tuple(record for record in records if record["kind"] == name)

    return History(
        name=absolute(folder).name,
        folder=folder,
        config=config,
        environment=_environment(folder / "environment.json"),
        phases=_phases(records),
        warm_start=kind("warm_start"),
        evaluations=kind("evaluation"),
        generations=kind("stage"),
        updates=kind("update"),
        losses=_losses(folder, path),
    )


def _losses(folder: Path, path: Path) -> tuple[str, ...]:
    """Return texts about missing or changed records; the newest checkpoint knows what was recorded."""
    cursor = newest_cursor(folder / "checkpoints")
    if cursor is None or cursor.journal is None:
        return ()
    kept = [record for record in read_journal(path) if record["updates"] <= cursor.updates]
    try:
        return tuple(journal_losses(path, kept, cursor.updates, cursor.journal))
    except (KeyError, TypeError):  # the checkpoint is damaged; `train`, `export` and `eval` report it
        return ()


def names(runs: Sequence[History]) -> list[str]:
    """Return a name for each run: its folder's name, or the whole path if two folders have the same name."""
    short = [run.name for run in runs]
    return [str(run.folder) if short.count(run.name) > 1 else run.name for run in runs]


def _set_clocks(records: Sequence[dict[str, Any]]) -> None:
    """Set `seconds.clock` in each record. If `seconds.elapsed` is missing (old runs), add up the phases."""
    clock = 0.0
    for record in records:
        seconds = record.setdefault("seconds", {})
        known = sum(seconds.get(phase, 0.0) for phase in ("generate", "update", "evaluate"))
        clock += seconds.setdefault("elapsed", known)
        seconds["clock"] = clock


def _phases(records: Sequence[dict[str, Any]]) -> dict[int, dict[str, float]]:
    """Return {stage: {phase: seconds}}. Time outside all other phases belongs to the phase `switching`."""
    found: dict[int, dict[str, float]] = {}
    elapsed: dict[int, float] = {}
    stage = -1
    writers = {record["updates"]: record["stage"] for record in records if record["kind"] == "stage"}
    for record in records:
        if record["kind"] in ("stage", "reference", "update"):
            stage = record["stage"]
        phases = found.setdefault(stage, dict.fromkeys(PHASES, 0.0))
        elapsed[stage] = elapsed.get(stage, 0.0) + record["seconds"]["elapsed"]
        for phase, seconds in _phase_seconds(record["kind"], record["seconds"]).items():
            phases[phase] += seconds
        if record["kind"] == "stage" and (wrote := writers.get(record.get("policy_updates"), stage)) != stage:
            # Generated earlier: its time is in the records of the stage at whose start this was done.
            spent = record["seconds"].get("generate", 0.0)
            elapsed[stage] += spent
            elapsed[wrote] -= spent
    for stage, phases in found.items():
        phases["switching"] = max(elapsed[stage] - sum(phases.values()), 0.0)
    return found


def _phase_seconds(kind: str, seconds: dict[str, float]) -> dict[str, float]:
    """Return {phase: seconds} of one record. Compile time is subtracted from the phase that compiled."""
    compiling = seconds.get("compile", 0.0)
    if kind == "stage":
        phase, spent = "generation", seconds.get("sample", seconds.get("generate", 0.0))
    elif kind == "evaluation":
        phase, spent = "evaluation", seconds.get("evaluate", 0.0)
    elif kind == "reference":
        phase, spent = "reference", seconds.get("reference", 0.0)
    else:
        phase, spent = "warm start" if kind == "warm_start" else "update", seconds.get("update", 0.0)
    others = {"scoring": seconds.get("score_wait", 0.0), "waiting": seconds.get("wait", 0.0)}
    return {phase: max(spent - compiling, 0.0), "compiling": min(compiling, spent), **others}


def _environment(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):  # the file does not exist, or the run was killed while it wrote the file
        return {}


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else math.nan
