"""Show a run as text: its accuracy, and a table of its stages. Show several runs as one table."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mugrpo_jax.objectives import ObjectiveConfig
from mugrpo_jax.report.run_history import History
from mugrpo_jax.report.trigger_panels import low_ratio
from mugrpo_jax.runs.text_table import text_table

TRIGGERED = "abandoned/negative_responses"


def summary(run: History) -> str:
    """Return a text about a run: its accuracy before and after, its start, and a table of its stages."""
    lines = [f"{run.folder}: {run.config.objective.name}, {len(run.updates)} updates", *_accuracy(run)]
    lines += [run.start] if run.start else []
    return "\n".join([*lines, *run.losses, text_table(stage_table(run), align="right")])


def comparison(runs: Sequence[History]) -> str:
    """Return a table with one line per run: its held-out accuracies, and what happened to its tokens.

    The shares are means over all updates. The last column has the wrong responses with an abandoned token.
    """
    header = ["run", "objective", "updates", "accuracy", "clipped", "vetoed", f"wrong, {low_ratio(runs)}"]
    rows = [
        [
            run.name,
            _objective(run),
            str(run.done),
            _first_and_last(run),
            *(_percent(_mean(run, metric)) for metric in ("clipped/tokens", "vetoed/tokens", TRIGGERED)),
        ]
        for run in runs
    ]
    return text_table([header, *rows], align="right")


def _objective(run: History) -> str:
    """Return the name of the objective, and its knobs that are not the defaults."""
    objective = run.config.objective
    default = ObjectiveConfig(objective.name).settings
    knobs = {knob: value for knob, value in objective.knobs.items() if value != default[knob]}
    return " ".join([objective.name, *(f"{knob}={value}" for knob, value in knobs.items())])


def _first_and_last(run: History) -> str:
    if not run.evaluations:
        return "–"
    return " → ".join(f"{record['accuracy']:.3f}" for record in _ends(run))


def _ends(run: History) -> list[Any]:
    """Return the first and the last evaluation; one if there is only one."""
    return [*run.evaluations[:1], *run.evaluations[1:][-1:]]


def _mean(run: History, metric: str) -> float:
    values = run.values(metric)
    return float(np.nanmean(values)) if np.isfinite(values).any() else math.nan


def stage_table(run: History) -> list[list[str]]:
    """Return a table with a header and one row per stage.

    The columns `clipped` and `vetoed` are there if the objective of the run clips or vetoes tokens.
    """
    stages = run.stages()
    shares = {"clipped": [stage.clipped for stage in stages], "vetoed": [stage.vetoed for stage in stages]}
    shares = {name: values for name, values in shares.items() if not all(map(math.isnan, values))}
    waits = ["wait s"] if any(stage.wait_seconds for stage in stages) else []
    times = ["generate s", *waits, "update s"]
    header = ["stage", "updates", "reward", *shares, "ESS at its end", *times, "accuracy"]
    rows = [
        [
            str(stage.stage),
            str(stage.updates),
            _number(stage.reward),
            *(_percent(values[i]) for values in shares.values()),
            _number(stage.ess),
            f"{stage.generate_seconds:.1f}",
            *([f"{stage.wait_seconds:.1f}"] if waits else []),
            f"{stage.update_seconds:.1f}",
            _number(stage.accuracy),
        ]
        for i, stage in enumerate(stages)
    ]
    return [header, *rows]


def _percent(share: float) -> str:
    return "–" if math.isnan(share) else f"{100 * share:.2f} %"


def _accuracy(run: History) -> list[str]:
    if not run.evaluations:
        return []
    ends = _ends(run)
    values = " → ".join(f"{record['accuracy']:.3f} ± {record['standard_error']:.3f}" for record in ends)
    return [f"held-out accuracy {values} on {ends[-1]['problems']} problems"]


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.3f}"
