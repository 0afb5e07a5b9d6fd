"""Figures of one run, or of several side by side. Every function returns a matplotlib `Figure`.

from mugrpo_jax.report import overview, read_run
overview([read_run("runs/quickstart")])
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from mugrpo_jax.report.history import CLIPPED, ESS, VETOED, History

# Okabe and Ito's palette: told apart with every common form of colour blindness.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MOST_BOUNDARIES = 16  # more stages than this are a texture, not information
_FAINT = 0.25


def overview(runs: Sequence[History]) -> Figure:
    """Everything on one page: the learning curve above, what staleness does to the updates below."""
    figure = _figure(10, 7)
    top, left, right = figure.subplot_mosaic([["top", "top"], ["left", "right"]]).values()
    _learning_axes(top, runs)
    _staleness_axes(left, right, runs)
    _name_runs(figure, runs)
    return figure


def learning_curve(runs: Sequence[History]) -> Figure:
    """Held-out accuracy and training reward over updates, the stages marked."""
    figure = _figure(10, 4)
    _learning_axes(figure.subplots(), runs)
    _name_runs(figure, runs)
    return figure


def staleness(runs: Sequence[History]) -> Figure:
    """Vetoed and clipped share of tokens, and effective sample size, over the updates within a stage."""
    figure = _figure(10, 3.6)
    left, right = figure.subplots(1, 2)
    _staleness_axes(left, right, runs)
    _name_runs(figure, runs)
    return figure


def _figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), dpi=120, layout="constrained")


def _learning_axes(axes: Axes, runs: Sequence[History]) -> None:
    for color, run in zip(_colors(runs), runs):
        for stage in run.by_stage():
            updates = [record["updates"] for record in stage]
            reward = np.array([record["reward"] for record in stage])
            axes.plot(updates, reward, color=color, linewidth=0.8, alpha=_FAINT)
            axes.plot(updates, _smooth(reward), color=color, linewidth=1.4, linestyle="--")
        if run.evaluations:
            axes.errorbar(
                [record["updates"] for record in run.evaluations],
                [record["accuracy"] for record in run.evaluations],
                yerr=[record["standard_error"] for record in run.evaluations],
                color=color,
                linewidth=2,
                marker="o",
                markersize=6,
                capsize=3,
            )
    _mark_stages(axes, runs)
    solid = Line2D([], [], color="0.3", marker="o", linewidth=2, label="held-out accuracy (± s.e.)")
    dashed = Line2D([], [], color="0.3", linestyle="--", linewidth=1.4, label="training reward")
    _finish(axes, "updates", "accuracy, reward", "Learning")
    _legend(axes, [solid, dashed])


def _staleness_axes(left: Axes, right: Axes, runs: Sequence[History]) -> None:
    for color, run in zip(_colors(runs), runs):
        _by_staleness(left, run, VETOED, color, "-")
        _by_staleness(left, run, CLIPPED, color, "--")
        _by_staleness(right, run, ESS, color, "-")
    solid = Line2D([], [], color="0.3", linewidth=2, label="vetoed")
    dashed = Line2D([], [], color="0.3", linewidth=2, linestyle="--", label="clipped")
    _finish(left, "updates since generation", "share of tokens", "Vetoed and clipped")
    _finish(right, "updates since generation", "ESS / tokens", "Effective sample size")
    left.set_ylim(bottom=0)
    right.set_ylim(0, 1.05)
    _legend(left, [solid, dashed])


def _by_staleness(axes: Axes, run: History, metric: str, color: str, style: str) -> None:
    """Each stage faintly, their mean on top."""
    stages = [
        [(record["staleness"], record[metric]) for record in stage if metric in record]
        for stage in run.by_stage()
    ]
    values: dict[int, list[float]] = {}
    for stage in filter(None, stages):
        if 1 < len(stages) <= _MOST_BOUNDARIES:
            axes.plot(*zip(*stage), color=color, linewidth=0.7, linestyle=style, alpha=_FAINT)
        for place, value in stage:
            values.setdefault(place, []).append(value)
    if values:
        places = sorted(values)
        means = [float(np.mean(values[place])) for place in places]
        axes.plot(places, means, color=color, linewidth=1.8, linestyle=style)


def _mark_stages(axes: Axes, runs: Sequence[History]) -> None:
    boundaries = sorted({boundary for run in runs for boundary in run.boundaries})
    if len(boundaries) > _MOST_BOUNDARIES:
        return
    for boundary in boundaries:
        axes.axvline(boundary, color="0.6", linewidth=0.8, linestyle=":", zorder=0)
    if len(runs) == 1:
        mu = runs[0].config.batch.updates_per_stage
        for stage in runs[0].config.stages:
            axes.annotate(
                f"stage {stage}",
                ((stage + 0.5) * mu, 1),
                xycoords=("data", "axes fraction"),
                xytext=(0, -3),
                textcoords="offset points",
                ha="center",
                va="top",
                fontsize=9,
                color="0.4",
            )


def _finish(axes: Axes, x: str, y: str, title: str) -> None:
    axes.set_xlabel(x, fontsize=11)
    axes.set_ylabel(y, fontsize=11)
    axes.set_title(title, fontsize=12, loc="left", fontweight="bold")
    axes.tick_params(labelsize=10)
    axes.grid(axis="y", color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.02, y=0.12)


def _legend(axes: Axes, styles: Sequence[Any]) -> None:
    """Above the axes, beside the title: nothing that is drawn can be hidden."""
    axes.legend(
        handles=list(styles),
        fontsize=10,
        frameon=False,
        loc="lower right",
        bbox_to_anchor=(1, 0.98),
        ncols=len(styles),
        borderaxespad=0,
    )


def _name_runs(figure: Figure, runs: Sequence[History]) -> None:
    """Which colour is which run, below everything; one run needs no name."""
    if len(runs) < 2:
        return
    names = _names(runs)
    lines = [Line2D([], [], color=color, linewidth=3) for color in _colors(runs)]
    columns = max(1, min(len(runs), 100 // (max(map(len, names)) + 6)))
    figure.legend(lines, names, loc="outside lower center", fontsize=10, frameon=False, ncols=columns)


def _names(runs: Sequence[History]) -> list[str]:
    """Folder names; where two are the same, whole paths."""
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.folder) for run in runs]


def _colors(runs: Sequence[History]) -> list[str]:
    return [COLORS[i % len(COLORS)] for i in range(len(runs))]


def _smooth(values: np.ndarray) -> np.ndarray:
    """Mean over a window of about a tenth of a stage, shorter at its ends."""
    half = max(len(values) // 20, 1)
    total = np.concatenate([[0.0], np.cumsum(values)])
    places = np.arange(len(values))
    low, high = np.maximum(places - half, 0), np.minimum(places + half + 1, len(values))
    return (total[high] - total[low]) / (high - low)
