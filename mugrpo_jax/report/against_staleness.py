"""Draw metrics of runs against staleness, the number of updates since the rollouts were generated."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mugrpo_jax.report.panel_data import (
    MOST_STAGE_POINTS,
    MOST_STAGES,
    STYLES,
    Line,
    Panel,
    bin_size,
    drawn_stages,
    even_bins,
    reduce,
)
from mugrpo_jax.report.run_history import History

Metric = str | Callable[[History], np.ndarray]


def for_all(runs: Sequence[History], title: str, y: str, metrics: Mapping[str, Metric], **look: Any) -> Panel:
    """Draw the same metrics of every run against staleness."""
    return against_staleness(runs, title, y, [metrics] * len(runs), **look)


def against_staleness(
    runs: Sequence[History],
    title: str,
    y: str,
    metrics: Sequence[Mapping[str, Metric]],
    *,
    log: str = "",
    low: float | None = None,
    high: float | None = None,
    levels: tuple[tuple[str, float], ...] = (),
    note: str = "",
    wanted: bool = True,
) -> Panel:
    """Draw a line for each stage of each run. `metrics` has one {name of the line: metric} for each run.

    A metric is a name in the journal, or a function that returns a value for every update of a run. The other
    arguments are those of `Panel`.
    """
    lines = []
    for i, run in enumerate(runs):
        staleness = run.values("staleness")
        for (name, metric), style in zip(metrics[i].items(), STYLES):
            values = drawable(run.values(metric) if isinstance(metric, str) else metric(run), log)
            for stage, age in drawn_stages(run).items():
                part = run.stage_slices[stage]
                bins = even_bins(part.stop - part.start, MOST_STAGE_POINTS)
                x, mean, *_ = reduce(staleness[part], values[part], bins)
                lines.append(Line(i, name, x, mean, style=style, stage=stage, age=age))
    return Panel(
        title=title,
        x="updates since generation",
        y=y,
        lines=tuple(line for line in lines if np.isfinite(line.y).any()),
        levels=levels,
        low=low,
        high=high,
        log=log,
        wanted=wanted,
        note=" ".join(filter(None, (note, _stages_note(runs)))),
    )


def drawable(values: np.ndarray, log: str) -> np.ndarray:
    """Replace values that a logarithmic y axis cannot show (0 and below) by NaN, if `log` is not empty."""
    return np.where(values > 0, values, np.nan) if log else values


def _stages_note(runs: Sequence[History]) -> str:
    parts = []
    longest = max((p.stop - p.start for run in runs for p in run.stage_slices.values()), default=0)
    size = bin_size(longest, MOST_STAGE_POINTS)
    if size > 1:
        parts.append(f"Each point is the mean of {size} updates.")
    most = max(len(run.stage_slices) for run in runs)
    if most > MOST_STAGES:
        parts.append(f"{MOST_STAGES} of {most} stages are drawn, evenly spread.")
    return " ".join(parts)
