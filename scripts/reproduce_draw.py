"""Draw the figures of the reproduction from the files that `reproduce_collect` wrote."""

import collections
import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import reproduce_rates_figures as figures
import reproduce_settings as settings
import reproduce_stages as stages
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from reproduce_held_out import RULES, lag_of, other_grid_table, walk_of
from reproduce_regimes import Measured, Run, measured_row
from reproduce_tables import less_fresh, read, tables
from reproduce_times import FRESH

from mugrpo_jax import objectives

COLORS = plt.get_cmap("tab10").colors  # type: ignore[attr-defined]  # of a qualitative map
MARKERS = "o^sDvP*X"
DIAGNOSTICS = {
    "abandoned/negative_responses": "share of wrong responses with a trigger",
    "gap/tokens": "mean |log ratio|",
    "drift": "drift since the stage began",
    "gradient_cosine": "cosine of consecutive gradients, smoothed",
}
SMOOTH = 16  # points of the file whose mean is one point of the smoothed cosine


def draw(
    results: Path,
    arms: Sequence[str],
    *,
    level: float,
    fresh: Path | None = None,
    fitted: Path | None = None,
) -> None:
    """Draw all figures that the files allow; `arms` gives the order of the arms."""
    runs, grid = read(results, arms, level, fresh)
    if not runs and not grid:
        sys.exit(f"{results}: no results; run and collect first")
    print("\n".join(tables(runs, grid, level)))
    if fitted:
        print("\n".join(["", *other_grid_table(grid, read(fitted, arms, level)[1])]))
    if settings.are(runs):
        figures.draw_settings(runs, results / "settings.png")
    elif runs and all(run["rate"] for run in runs):
        figures.draw(runs, results)
    elif _colors(runs):
        _draw_accuracy(runs, results / "accuracy.png")
        _draw_staleness(runs, results / "staleness.png")
    if stages.are(grid):
        _draw_stages(grid, results)
    elif grid:
        _draw_law(grid, results / "law.png")
        if lag_of(grid) == "µ":  # else stages are short, and the drift begins anew in each
            _draw_regimes([measured_row(row) for row in grid], results / "regimes.png")


# -- the comparison


def _colors(runs: Sequence[Run]) -> dict[str, str]:
    """The arms of the figures, at most four; the tables have all."""
    there = {run["arm"] for run in runs}
    return {arm: figures.COLORS[arm] for arm in figures.METHODS if arm in there}


def _legend(colors: Mapping[str, str]) -> list[Line2D]:
    return [Line2D([], [], color=color, label=figures.METHODS[arm]) for arm, color in colors.items()]


def _draw_accuracy(runs: Sequence[Run], path: Path) -> None:
    """Draw accuracy over updates, its distance to fresh data with the same seed, and accuracy over time.

    Only runs that had the GPU to themselves are drawn over time. Thin lines are seeds, thick lines the mean
    of the finished seeds. Only fresh data has a band of standard errors; the others are as large and would
    hide it.
    """
    colors = _colors(runs)
    runs = [run for run in runs if run["arm"] in colors]
    alone = [run for run in runs if run["alone"]]
    apart = [run | {"evaluations": points} for run in runs if (points := less_fresh(run, runs))]
    several = len({run["arm"] for run in apart}) > 1
    banded = FRESH if FRESH in colors else next(iter(colors))
    count = 1 + several + bool(alone)
    figure, axes = plt.subplots(1, count, figsize=(2 + 5 * count, 4), squeeze=False, layout="constrained")
    panels = iter(axes[0])
    _draw_arms(axis := next(panels), runs, colors, banded)
    axis.set(xlabel="updates", ylabel="held-out accuracy")
    axis.set_title(figures.ends_of(runs, colors), fontsize=9)
    if several:
        _draw_arms(axis := next(panels), apart, colors)
        axis.axhline(0, color=colors[FRESH], linewidth=1.6)
        axis.set_title("below 0: behind fresh data", fontsize=9)
        axis.set(xlabel="updates", ylabel="accuracy less that of fresh data, same seed")
    if alone:
        axis = next(panels)
        for run in alone:
            x, y, error = _curve(run, "clock")
            _line(axis, (x / 60, y, error), colors[run["arm"]], band=run["arm"] == banded)
        axis.set_title("the same over time, of runs alone on the GPU", fontsize=9)
        axis.set(
            xlabel="minutes of training with compiling, evaluations left out", ylabel="held-out accuracy"
        )
    _finish(figure, _legend(colors), path)


def _draw_arms(axis: Axes, runs: Sequence[Run], colors: dict[str, Any], banded: str | None = None) -> None:
    for arm, color in colors.items():
        same = [run for run in runs if run["arm"] == arm]
        if len(same) > 1:
            for x, y, _ in (_curve(run, "updates") for run in same):
                axis.plot(x, y, color=color, linewidth=0.7, alpha=0.4)
        if whole := [run for run in same if run["finished"]] or same:
            _line(axis, _mean([_curve(run, "updates") for run in whole]), color, band=arm == banded)


Curve = tuple[np.ndarray, np.ndarray, np.ndarray]  # places, accuracy, its standard error


def _curve(run: Run, over: str) -> Curve:
    points = run["evaluations"]
    x, y, error = (np.array([p[name] for p in points]) for name in (over, "accuracy", "standard_error"))
    return x, y, error


def _mean(curves: Sequence[Curve]) -> Curve:
    """The mean over seeds, up to the shortest; the error is that of one seed: problems are the same."""
    shortest = min(len(x) for x, _, _ in curves)
    x, y, error = (np.mean([part[:shortest] for part in parts], axis=0) for parts in zip(*curves))
    return x, y, error


def _line(axis: Axes, curve: Curve, color: Any, *, band: bool) -> None:
    x, y, error = curve
    axis.plot(x, y, color=color, linewidth=1.6, marker="o", markersize=2.5)
    if band:
        axis.fill_between(x, y - error, y + error, color=color, alpha=0.15, linewidth=0)


def _draw_staleness(runs: Sequence[Run], path: Path) -> None:
    """One seed per arm, because all seeds would hide each other: the most common seed, or the arm's first."""
    colors = _colors(runs)
    runs = [run for run in runs if run["arm"] in colors]
    seeds = collections.Counter(run["seed"] for run in runs)
    runs = list(
        {run["arm"]: run for run in sorted(runs, key=lambda run: (seeds[run["seed"]], -run["seed"]))}.values()
    )
    figure, panels = plt.subplots(2, 2, figsize=(12, 6), sharex=True, layout="constrained")
    for axis, (name, label) in zip(panels.flat, DIAGNOSTICS.items(), strict=True):
        most = {}
        for run in runs:
            points = [point for point in run["bins"] if point.get(name) is not None]
            if not points:
                continue
            x, y = (np.array([point[key] for point in points], float) for key in ("updates", name))
            if name == "gradient_cosine" and len(points) > SMOOTH:
                x, y = (np.convolve(values, np.full(SMOOTH, 1 / SMOOTH), "valid") for values in (x, y))
            axis.plot(x, y, color=colors[run["arm"]], linewidth=1.2, alpha=0.9)
            most[run["arm"]] = y.max()
        if most:
            arm = max(most, key=most.__getitem__)
            axis.set_title(f"highest: {most[arm]:.2g}, {figures.METHODS[arm]}", fontsize=9)
        axis.set_ylabel(label, fontsize=9)
    for axis in panels[1]:
        axis.set_xlabel("updates")
    _finish(figure, _legend(colors), path)


def _finish(figure: Figure, legend: list[Line2D], path: Path) -> None:
    for axis in figure.axes:
        axis.grid(alpha=0.2)
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(handles=legend, loc="outside right upper", fontsize=8, frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


# -- the length of stages


def _draw_stages(rows: Sequence[Run], folder: Path) -> None:
    """Draw the ends over µ, and over the learning rate where several were tried."""
    figure, axis = plt.subplots(figsize=(8, 3.8), layout="constrained")
    _finish(figure, stages.plot(axis, rows), folder / "stages.png")
    if lengths := stages.tuned(rows):
        width = 2 + 5 * len(lengths)
        figure, axes = plt.subplots(
            1, len(lengths), figsize=(width, 3.8), squeeze=False, layout="constrained"
        )
        _finish(figure, stages.plot_rates(axes[0], rows), folder / "rates.png")


# -- the law


LIMITS = ("S·η", "predicted drift since the start")  # that the figure compares, of RULES
LIMITS_WITH_LAG = ("S·η", "√S·η", "η alone")
OBJECTIVES = {
    "grpo": "GRPO: narrow clip [0.8, 1.2]",
    "mu_grpo": figures.METHODS["mu_grpo"],
    "relaxed-no-veto": figures.METHODS["relaxed-no-veto"],
}


def _draw_law(rows: Sequence[Run], path: Path) -> None:
    """Draw the accuracy at the end over S·η and over other limits; hollow marks collapsed.

    A grid with a lag has one more panel: when runs collapsed. The objective with the most runs is drawn first
    and largest, so that others are seen above it.
    """
    counts = collections.Counter(row["objective"] for row in rows)
    colors = {name: figures.COLORS[stages.NAMES[name]] for name in counts}
    sizes = {name: max(8 - 2 * i, 4) for i, (name, _) in enumerate(counts.most_common())}
    markers = dict(zip(sorted({row["mu"] for row in rows}), itertools.cycle(MARKERS)))
    lag_name = lag_of(rows)
    lagged = lag_name != "µ"
    limits = LIMITS_WITH_LAG if lagged else LIMITS
    in_title = _compared(rows)
    rows_of_panels, size = (2, (13, 8)) if lagged else (1, (11, 4))
    figure, grid = plt.subplots(rows_of_panels, 2, figsize=size, sharey=not lagged, layout="constrained")
    panels = list(grid.flat)
    for axis, limit in zip(panels, limits):
        wrong = compared = 0
        for name in sizes:
            group = [row for row in rows if row["objective"] == name]
            walk, bad = walk_of(group), [row["collapse"] is not None for row in group]
            places = [RULES[limit](walk, row) for row in group]
            interval, errors = objectives.best_split(places, bad)
            if name in in_title:
                wrong, compared = wrong + errors, compared + len(group)
                _draw_bound(axis, interval, colors[name])
            for lag in sorted({row["mu"] for row in group}):
                same = [(row, place) for row, place in zip(group, places) if row["mu"] == lag]
                style = {"color": colors[name], "marker": markers[lag], "markersize": sizes[name]}
                _draw_rates(axis, same, joined=not lagged, **style)
        start = np.mean([row["accuracy_start"] for row in rows])
        axis.axhline(start, color="0.5", linewidth=1, linestyle="--")
        axis.set(xscale="log", ylim=(0, None), xlabel=limit, ylabel="held-out accuracy at the end")
        axis.xaxis.set_minor_formatter(NullFormatter())
        low, high = axis.get_xlim()
        if high < 20 * low:  # else powers of ten are enough
            axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_title(f"{limit}: {wrong} of {compared} runs on the wrong side", fontsize=9)
    if lagged:
        _draw_times(panels[-1], rows, colors, sizes, markers)
    else:
        panels[1].set_ylabel("")
    _finish(figure, _law_legend(colors, markers, lag_name), path)


def _draw_times(
    axis: Axes, rows: Sequence[Run], colors: dict[str, Any], sizes: dict[str, int], markers: dict[int, str]
) -> None:
    """Draw t·η: at the collapse, hollow, or at the end of a run that held, over S."""
    for number, name in enumerate(sizes):
        for row in (row for row in rows if row["objective"] == name):
            held = row["collapse"] is None
            time = (row["updates"] if held else row["collapse"]) * row["learning_rate"]
            fill = colors[name] if held else "white"
            style = {"color": colors[name], "markerfacecolor": fill, "markersize": sizes[name]}
            axis.plot(row["mu"] * 1.12**number, time, marker=markers[row["mu"]], **style)
    axis.set(xscale="log", yscale="log", xlabel="S + 1", ylabel="t·η")
    axis.set_xticks(list(markers), list(map(str, markers)))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_title("t·η of the collapse (hollow), or of the end of a run that held", fontsize=10)


def _compared(rows: Sequence[Run]) -> set[str]:
    """The objectives that the titles count: some of their runs collapse, and some do not.

    In a grid with a lag it is only the one with the most runs, as in the text: others have few.
    """
    outcomes: dict[str, list[bool]] = {}
    for row in rows:
        outcomes.setdefault(row["objective"], []).append(row["collapse"] is not None)
    both = {name: len(bad) for name, bad in outcomes.items() if any(bad) and not all(bad)}
    return set(both) if lag_of(rows) == "µ" else {max(both, key=both.__getitem__)} if both else set()


def _draw_rates(axis: Axes, runs: Sequence[tuple[Run, float]], *, joined: bool, **style: Any) -> None:
    """Runs that differ only in learning rate and seed, each with its place; lines may join means."""
    runs = sorted(runs, key=lambda run: run[1])
    rows, x = [row for row, _ in runs], [place for _, place in runs]
    y = [row["accuracy_end"] for row in rows]
    error = [row["evaluations"]["standard_error"][-1] for row in rows]
    axis.errorbar(x, y, error, linewidth=0, elinewidth=1, clip_on=False, **style)
    if joined:
        places = sorted(set(x))
        means = [np.mean([accuracy for place, accuracy in zip(x, y) if place == mean]) for mean in places]
        axis.plot(places, means, linewidth=0.6, color=style["color"])
    hollow = style | {"markerfacecolor": "white", "zorder": 3}
    for row, place, accuracy in zip(rows, x, y):
        if row["collapse"] is not None:
            axis.plot(place, accuracy, clip_on=False, **hollow)


def _draw_bound(axis: Axes, interval: tuple[float, float], color: Any) -> None:
    low, high = interval
    if low > 0 and math.isfinite(high):  # otherwise there is a bound on one side only
        axis.axvspan(low, high, color=color, alpha=0.1, linewidth=0)
        axis.axvline(math.sqrt(low * high), color=color, linewidth=1, linestyle=":")


def _law_legend(colors: dict[str, Any], markers: dict[int, str], lags: str) -> list[Line2D]:
    shapes: dict[str, Any] = {"color": "0.4", "linestyle": ""}
    return [
        *(Line2D([], [], color=color, label=OBJECTIVES.get(name, name)) for name, color in colors.items()),
        *(
            Line2D([], [], marker=marker, label=f"{lags} = {lag}", **shapes)
            for lag, marker in markers.items()
        ),
        Line2D([], [], marker="o", markerfacecolor="white", label="collapsed", **shapes),
        Line2D([], [], color="0.5", linestyle="--", label="before training"),
        Line2D([], [], color="0.5", linestyle=":", label="best limit"),
    ]


def _draw_regimes(runs: Sequence[Measured], path: Path) -> None:
    """Draw the drift of the longest first stages, divided by η·G, beside both limits of the law.

    A band has all runs of an objective, its line is their geometric mean.
    """
    lag = max(run.lag for run in runs)
    longest = [run for run in runs if run.lag == lag and run.stages and run.stages[0][2]]
    if not longest:
        return
    figure, axis = plt.subplots(figsize=(8, 4), layout="constrained")
    colors = {name: COLORS[i] for i, name in enumerate(dict.fromkeys(run.name for run in longest))}
    ends = []
    for name, color in colors.items():
        curves = [(run.stages[0][0], _moved(run)) for run in longest if run.name == name]
        updates = curves[0][0]
        moved = [np.interp(updates, *curve) for curve in curves]
        ends += [curve[-1] for curve in moved]
        axis.fill_between(updates, np.min(moved, axis=0), np.max(moved, axis=0), color=color, alpha=0.2)
        axis.plot(updates, np.exp(np.mean(np.log(moved), axis=0)), color=color, linewidth=2)
    first = min(run.stages[0][0][0] for run in longest)
    updates = np.arange(max(round(first / 4), 1), lag + 1)
    noise, straight = (
        objectives.effective_updates(updates, signal, longest[0].momentum, first_stage=True)
        for signal in (0.0, 1.0)
    )
    axis.plot(updates, noise, color="black", linewidth=1.6, linestyle="--")
    axis.plot(updates, straight, color="0.5", linewidth=1.6, linestyle=":")
    axis.set(xscale="log", yscale="log", xlabel="updates since the start", ylabel="drift / (η·G)")
    near = "noise" if np.median(ends) ** 2 < noise[-1] * straight[-1] else "parallel updates"
    title = f"The drift of {len(longest)} runs with µ = {lag}, at all learning rates, is near that of {near}"
    axis.set_title(title, fontsize=10)
    legend = [
        *(Line2D([], [], color=color, label=OBJECTIVES.get(name, name)) for name, color in colors.items()),
        Line2D([], [], color="black", linestyle="--", label="noise with Adam's momentum"),
        Line2D([], [], color="0.5", linestyle=":", label="parallel updates"),
    ]
    _finish(figure, legend, path)


def _moved(run: Measured) -> np.ndarray:
    """The drift in the first stage in units of η·G: the number of parallel updates that go as far."""
    return np.asarray(run.stages[0][1]) / (run.learning_rate * run.update_size)
