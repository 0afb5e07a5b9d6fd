"""Tables, as Markdown, and figures from the files that `reproduce_collect` wrote."""

import collections
import itertools
import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from mugrpo_jax import objectives
from mugrpo_jax.report import law

Run = dict[str, Any]
COLORS = plt.get_cmap("tab10").colors  # type: ignore[attr-defined]  # of a qualitative map
MARKERS = "o^sDvP*X"
FRESH = "grpo-mu4"  # the arm that all others are held against
DIAGNOSTICS = {
    "clipped/tokens": "clipped tokens",
    "vetoed/tokens": "vetoed tokens",
    "triggered/negative_responses": "wrong responses with an abandoned token",
    "ratio/negative_tokens": "mean ratio where A < 0",
    "ess/tokens": "effective sample size / tokens",
    "drift": "drift since the stage began",
    "gradient_cosine": "cosine of consecutive gradients",
    "gap/tokens": "mean |log ratio|",
}


def draw(results: Path, arms: Sequence[str], *, level: float) -> None:
    """All that the files allow; `arms` is the order they are shown in."""
    runs, grid = read(results, arms, level)
    if not runs and not grid:
        sys.exit(f"{results}: no results; run and collect first")
    print("\n".join(tables(runs, grid, level)))
    if runs:
        _draw_accuracy(runs, results / "accuracy.png")
        _draw_staleness(runs, results / "staleness.png")
    if grid:
        _draw_law(grid, results / "law.png")


def read(results: Path, arms: Sequence[str], level: float) -> tuple[list[Run], list[Run]]:
    """Runs of the comparison, and those of the grid that were finished."""
    runs = [_load(path) for path in results.glob("*-seed*.jsonl")]
    grid = results / "law.jsonl"
    return (
        sorted(runs, key=lambda run: (arms.index(run["arm"]), run["seed"])),
        _load_law(grid, level) if grid.exists() else [],
    )


def tables(runs: Sequence[Run], grid: Sequence[Run], level: float) -> Iterator[str]:
    """The lines that `draw` prints."""
    if runs:
        for table in (_comparison_table, _distance_table, _worst_table, _time_table):
            if lines := list(table(runs)):
                yield from [*lines, ""]
    if grid:
        yield from _law_table(grid)
        yield ""
        yield from _law_constants(grid, level)


def _load(path: Path) -> Run:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    parts = {"evaluations": "evaluation", "bins": "updates"}
    found = {name: [line for line in lines if line["kind"] == kind] for name, kind in parts.items()}
    return lines[0] | {"arm": lines[0]["run"].rsplit("-seed", 1)[0]} | found


# -- the comparison


def _comparison_table(runs: Sequence[Run]) -> Iterable[str]:
    """Accuracy of all runs, times of those that had the GPU to themselves."""
    yield "| arm | seed | updates | start | end | best | generate | update | switch | compile | in all |"
    yield f"|{'---|' * 11}"
    for run in runs:
        accuracy = [_number(run[f"{when}_accuracy"], ".3f") for when in ("first", "last", "best")]
        spent = run["seconds"]
        parts = (
            spent.get("sample", 0) + spent.get("score_wait", 0),
            *(spent.get(name, 0) for name in ("update", "switch", "compile", "training")),
        )
        times = [f"{part:.0f} s" if run["alone"] and "update" in spent else "–" for part in parts]
        done = f"{run['updates']}{'' if run['finished'] else ' so far'}"
        yield _row(run["arm"], run["seed"], done, *accuracy, *times)
    for arm in dict.fromkeys(run["arm"] for run in runs):
        same = [run for run in runs if run["arm"] == arm and run["finished"]]
        if len(same) > 1:
            ends = [np.mean([run[f"{when}_accuracy"] for run in same]) for when in ("first", "last", "best")]
            shown = [f"{end:.3f}" for end in ends]
            yield _row(arm, f"mean of {len(same)}", same[0]["updates"], *shown, *["–"] * 5)


def _distance_table(runs: Sequence[Run]) -> Iterable[str]:
    """How far each run is from fresh data with its seed on average: less noise than at the end alone."""
    if not any(_less_fresh(run, runs) for run in runs):
        return
    means = "mean of all evaluations but the first | of the last five"
    yield f"| arm | seed | distance to `{FRESH}`: {means} | ahead |"
    yield f"|{'---|' * 5}"
    of_arm: dict[str, list[Sequence[float]]] = {}
    for run in runs:
        if apart := [point["accuracy"] for point in _less_fresh(run, runs) if point["updates"]]:
            of_arm.setdefault(run["arm"], []).append(apart)
            newest = f"{np.mean(apart[-5:]):+.4f}" if len(apart) > 5 else "–"
            ahead = f"{sum(distance > 0 for distance in apart)} of {len(apart)}"
            yield _row(run["arm"], run["seed"], f"{np.mean(apart):+.4f}", newest, ahead)
    for arm, seeds in of_arm.items():
        if len(seeds) > 1:
            newest = _over_seeds([a[-5:] for a in seeds]) if min(map(len, seeds)) > 5 else "–"
            yield _row(arm, f"mean of {len(seeds)}", _over_seeds(seeds), newest, "–")


def _over_seeds(distances: Iterable[Sequence[float]]) -> str:
    means = [np.mean(apart) for apart in distances]
    return f"{np.mean(means):+.4f} ± {np.std(means, ddof=1) / math.sqrt(len(means)):.4f}"


def _worst_table(runs: Sequence[Run]) -> Iterable[str]:
    """How bad it got: a run that recovers does not show it at its end."""
    shares = "most wrong responses with an abandoned token | up to | mean ESS"
    yield f"| arm | seed | lowest accuracy | after | {shares} |"
    yield f"|{'---|' * 7}"
    for run in runs:
        low = min(run["evaluations"][1:] or run["evaluations"], key=lambda point: point["accuracy"])
        name = "triggered/negative_responses"
        most = max(run["bins"], key=lambda point: point.get(name, 0.0))
        accuracy, share = f"{low['accuracy']:.3f}", f"{100 * most.get(name, 0.0):.1f} %"
        sizes = [point["ess/tokens"] for point in run["bins"] if "ess/tokens" in point]
        ess = f"{np.mean(sizes):.3f}" if sizes else "–"
        yield _row(run["arm"], run["seed"], accuracy, low["updates"], share, most["updates"], ess)


def _time_table(runs: Sequence[Run]) -> Iterable[str]:
    """What an update costs with its share of everything, and how fresh data compares.

    Parts have compiling left out. The quickest stage is by the clock, which includes it: in a long enough
    run there is a stage in which nothing is compiled.
    """
    whole_stages = [run for run in runs if run["updates"] % run["batch"]["updates_per_stage"] == 0]
    alone = [run for run in whole_stages if run["alone"] and run["updates"]]
    fresh = next((run for run in alone if run["arm"] == FRESH), None)
    if fresh is None or len(alone) < 2:
        return
    parts = "generate | update | switch | in all, an update"
    yield f"| arm | seed | µ | updates | {parts} | `{FRESH}` takes | quickest stage | `{FRESH}` takes |"
    yield f"|{'---|' * 11}"
    for run in alone:
        spent, other = _milliseconds(run), _milliseconds(fresh)
        quickest = _quickest(run)
        shown = [f"{part:.1f} ms" for part in spent] or ["–"] * 4
        times = f"{other[-1] / spent[-1]:.2f}×" if spent and other else "–"
        by_clock = f"{quickest:.1f} ms", f"{_quickest(fresh) / quickest:.2f}×"
        mu = run["batch"]["updates_per_stage"]
        yield _row(run["arm"], run["seed"], mu, run["updates"], *shown, times, *by_clock)


def _milliseconds(run: Run) -> tuple[float, ...]:
    """Of an update: generation with scoring, the update itself, switching, and their sum.

    Nothing where the file does not tell the parts.
    """
    spent = {name: 1e3 * seconds / run["updates"] for name, seconds in run["seconds"].items()}
    if "update" not in spent:
        return ()
    parts = spent.get("sample", 0) + spent.get("score_wait", 0), spent["update"], spent.get("switch", 0)
    return *parts, sum(parts)


def _quickest(run: Run) -> float:
    """Milliseconds an update of the quickest stage, or line of the file where that has more updates."""
    clock = {0: 0.0} | {point["updates"]: point["clock"] for point in run["bins"]}
    line = min(point for point in clock if point)
    stage = max(run["batch"]["updates_per_stage"], line)
    ends = [end for end in clock if end and end % stage == 0]
    return min(1e3 * (clock[end] - clock[end - stage]) / stage for end in ends)


def _row(*cells: Any) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _number(value: float | None, form: str) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:{form}}"


def _colors(runs: Sequence[Run]) -> dict[str, Any]:
    return {arm: COLORS[i % len(COLORS)] for i, arm in enumerate(dict.fromkeys(run["arm"] for run in runs))}


def _draw_accuracy(runs: Sequence[Run], path: Path) -> None:
    """Over updates, less that of fresh data with the same seed, and, of runs that were alone, over time.

    Seeds are thin, the mean of those that finished is thick. Standard errors are those of fresh data: they
    are as large for the others, whose bands would hide it.
    """
    colors = _colors(runs)
    alone = [run for run in runs if run["alone"]]
    apart = [run | {"evaluations": points} for run in runs if (points := _less_fresh(run, runs))]
    several = len({run["arm"] for run in apart}) > 1
    banded = FRESH if FRESH in colors else next(iter(colors))
    count = 1 + several + bool(alone)
    figure, axes = plt.subplots(1, count, figsize=(2 + 5 * count, 4), squeeze=False, layout="constrained")
    panels = iter(axes[0])
    _draw_arms(axis := next(panels), runs, colors, banded)
    axis.set(xlabel="updates", ylabel="held-out accuracy")
    if several:
        _draw_arms(axis := next(panels), apart, colors)
        axis.axhline(0, color=colors[FRESH], linewidth=1.6)
        axis.set(xlabel="updates", ylabel=f"accuracy less that of {FRESH}, same seed")
    if alone:
        axis = next(panels)
        for run in alone:
            x, y, error = _curve(run, "clock")
            _line(axis, (x / 60, y, error), colors[run["arm"]], band=run["arm"] == banded)
        axis.set(
            xlabel="minutes of training with compiling, evaluations left out", ylabel="held-out accuracy"
        )
    _finish(figure, [Line2D([], [], color=color, label=arm) for arm, color in colors.items()], path)


def _draw_arms(axis: Axes, runs: Sequence[Run], colors: dict[str, Any], banded: str | None = None) -> None:
    for arm, color in colors.items():
        same = [run for run in runs if run["arm"] == arm]
        if len(same) > 1:
            for x, y, _ in (_curve(run, "updates") for run in same):
                axis.plot(x, y, color=color, linewidth=0.7, alpha=0.4)
        if whole := [run for run in same if run["finished"]] or same:
            _line(axis, _mean([_curve(run, "updates") for run in whole]), color, band=arm == banded)


def _less_fresh(run: Run, runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A run's evaluations less those of fresh data with its seed, where there are both."""
    fresh = [other for other in runs if (other["arm"], other["seed"]) == (FRESH, run["seed"])]
    there = {point["updates"]: point["accuracy"] for other in fresh for point in other["evaluations"]}
    return [
        point | {"accuracy": point["accuracy"] - there[point["updates"]]}
        for point in run["evaluations"]
        if run["arm"] != FRESH and point["updates"] in there
    ]


Curve = tuple[np.ndarray, np.ndarray, np.ndarray]  # places, accuracy, its standard error


def _curve(run: Run, over: str) -> Curve:
    points = run["evaluations"]
    x, y, error = (np.array([p[name] for p in points]) for name in (over, "accuracy", "standard_error"))
    return x, y, error


def _mean(curves: Sequence[Curve]) -> Curve:
    """Over seeds, as far as all of them are; the error is that of one: the problems are the same."""
    shortest = min(len(x) for x, _, _ in curves)
    x, y, error = (np.mean([part[:shortest] for part in parts], axis=0) for parts in zip(*curves))
    return x, y, error


def _line(axis: Axes, curve: Curve, color: Any, *, band: bool) -> None:
    x, y, error = curve
    axis.plot(x, y, color=color, linewidth=1.6, marker="o", markersize=2.5)
    if band:
        axis.fill_between(x, y - error, y + error, color=color, alpha=0.15, linewidth=0)


def _draw_staleness(runs: Sequence[Run], path: Path) -> None:
    """One seed of each arm, since all would hide one another: that of most arms, or an arm's first."""
    colors = _colors(runs)
    seeds = collections.Counter(run["seed"] for run in runs)
    runs = list(
        {run["arm"]: run for run in sorted(runs, key=lambda run: (seeds[run["seed"]], -run["seed"]))}.values()
    )
    figure, panels = plt.subplots(2, 4, figsize=(17, 6), sharex=True, layout="constrained")
    for axis, (name, label) in zip(panels.flat, DIAGNOSTICS.items()):
        for run in runs:
            points = [point for point in run["bins"] if point.get(name) is not None]
            style = {"color": colors[run["arm"]], "linewidth": 0.9, "alpha": 0.9}
            axis.plot([point["updates"] for point in points], [point[name] for point in points], **style)
        axis.set_ylabel(label, fontsize=9)
        if name == "clipped/tokens":  # of P3O nearly all, of others few
            axis.set_yscale("symlog", linthresh=1e-3)
            axis.set_ylim(bottom=0)
    for axis in panels[1]:
        axis.set_xlabel("updates")
    _finish(figure, [Line2D([], [], color=color, label=arm) for arm, color in colors.items()], path)


def _finish(figure: Figure, legend: list[Line2D], path: Path) -> None:
    for axis in figure.axes:
        axis.grid(alpha=0.2)
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(handles=legend, loc="outside right upper", fontsize=8, frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


# -- the law


def _load_law(path: Path, level: float) -> list[Run]:
    """Finished runs of the grid; what counts as a collapse is decided here, from their evaluations."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        seen = row["evaluations"]
        collapse = law.accuracy_collapse(seen["updates"], seen["accuracy"], level)
        if collapse != row["collapse"]:  # another level than that of the file
            way = None if collapse is None else float(np.interp(collapse, seen["updates"], seen["way"]))
            row |= {"collapse": collapse, "critical_drift": way}
    return [row for row in rows if row["finished"]]


def _law_table(rows: Sequence[Run]) -> Iterable[str]:
    accuracy_and_after = "start | end | best | mean | collapse at | t·η | G | R_batch | R_crit | cosine"
    yield f"| objective | µ | η | S·η | {accuracy_and_after} |"
    yield f"|{'---|' * 14}"
    for row in rows:
        collapse, rate = row["collapse"], row["learning_rate"]
        accuracy = [_number(row[f"accuracy_{when}"], ".3f") for when in ("start", "end", "best")]
        mean = _number(np.mean(row["evaluations"]["accuracy"][1:]), ".3f")
        gone = None if collapse is None else collapse * rate
        yield _row(
            *(row["objective"], row["mu"], f"{rate:.0e}", f"{row['lag_times_rate']:.1e}", *accuracy, mean),
            *(
                "–" if collapse is None else collapse,
                _number(gone, ".1e"),
                _number(row["update_size"], ".0f"),
            ),
            *(_number(row[name], ".3g") for name in ("batch_drift", "critical_drift")),
            _number(row["cosine"], ".2f"),
        )


def _fits(rows: Sequence[Run]) -> dict[str, objectives.StalenessFit]:
    """The constants of each objective of which there are runs that differ in µ or η."""
    found = {}
    for name in dict.fromkeys(row["objective"] for row in rows):
        same = [row for row in rows if row["objective"] == name]
        if len({(row["mu"], row["learning_rate"]) for row in same}) > 1:
            found[name] = objectives.fit_staleness(
                objectives.FinishedRun(row["mu"], row["learning_rate"], row["updates"], row["collapse"])
                for row in same
            )
    return found


def _law_constants(rows: Sequence[Run], level: float) -> Iterable[str]:
    yield f"Collapsed: held-out accuracy ended below {level:g} times the best before it."
    for name, fit in _fits(rows).items():
        same = [row for row in rows if row["objective"] == name]
        measured = [row["batch_drift"] / row["update_size"] for row in same if row["batch_drift"]]
        median = f" at R_batch / G = {np.median(measured):.2g} (median)" if measured else ""
        yield (
            f"{name}: S·η up to {fit.constants.stale:.2g} ({_between(fit.stale_interval)}), T·η up to "
            f"{fit.constants.horizon:.2g} ({_between(fit.horizon_interval)}), by {len(same)} runs of which "
            f"{sum(row['collapse'] is not None for row in same)} collapsed; {fit.misplaced} lie on the wrong "
            f"side of that S·η, {fit.misplaced_by_rate} on that of the best split by η alone; a stage came "
            f"into trouble in {len(measured)}{median}."
        )
    reported = law.REPORTED
    yield f"Reported for unprotected GRPO: S·η up to {reported.stale:.2g}, T·η up to {reported.horizon:.2g}."


def _between(interval: tuple[float, float]) -> str:
    low, high = interval
    if math.isinf(high):
        return f"not reached at {low:.2g}"
    if low == high:
        return "no range"
    return f"below {high:.2g}" if low == 0 else f"between {low:.2g} and {high:.2g}"


def _draw_law(rows: Sequence[Run], path: Path) -> None:
    """Accuracy at the end over S·η and over T·η, each with the bound that was fitted; hollow: collapsed."""
    colors = {name: COLORS[i] for i, name in enumerate(dict.fromkeys(row["objective"] for row in rows))}
    markers = dict(zip(sorted({row["mu"] for row in rows}), itertools.cycle(MARKERS)))
    figure, panels = plt.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
    for axis, factor, side in zip(panels, ("mu", "updates"), ("stale", "horizon")):
        for name, lag in dict.fromkeys((row["objective"], row["mu"]) for row in rows):
            same = [row for row in rows if (row["objective"], row["mu"]) == (name, lag)]
            _draw_rates(axis, same, factor, color=colors[name], marker=markers[lag])
        for name, fit in _fits(rows).items():
            _draw_bound(axis, getattr(fit.constants, side), getattr(fit, f"{side}_interval"), colors[name])
        start = np.mean([row["accuracy_start"] for row in rows])
        axis.axhline(start, color="0.5", linewidth=1, linestyle="--")
        axis.set(xscale="log", ylim=(0, None))
    panels[0].set(xlabel="S·η  (µ × learning rate)", ylabel="held-out accuracy at the end")
    panels[1].set(xlabel="T·η  (updates × learning rate)")
    _finish(figure, _law_legend(colors, markers), path)


def _draw_rates(axis: Axes, rows: Sequence[Run], factor: str, **style: Any) -> None:
    """Runs that differ in their learning rate and seed alone."""
    rows = sorted(rows, key=lambda row: row["learning_rate"])
    x = [row[factor] * row["learning_rate"] for row in rows]
    y = [row["accuracy_end"] for row in rows]
    error = [row["evaluations"]["standard_error"][-1] for row in rows]
    axis.errorbar(x, y, error, linewidth=0.6, elinewidth=1, markersize=7, clip_on=False, **style)
    hollow = style | {"markersize": 7, "markerfacecolor": "white", "zorder": 3}
    for row, place, accuracy in zip(rows, x, y):
        if row["collapse"] is not None:
            axis.plot(place, accuracy, clip_on=False, **hollow)


def _draw_bound(axis: Axes, constant: float, interval: tuple[float, float], color: Any) -> None:
    low, high = interval
    if low > 0 and math.isfinite(high):  # else the runs bound it on one side only
        axis.axvspan(low, high, color=color, alpha=0.1, linewidth=0)
        axis.axvline(constant, color=color, linewidth=1, linestyle=":")


def _law_legend(colors: dict[str, Any], markers: dict[int, str]) -> list[Line2D]:
    shapes: dict[str, Any] = {"color": "0.4", "linestyle": ""}
    return [
        *(Line2D([], [], color=color, label=name) for name, color in colors.items()),
        *(Line2D([], [], marker=marker, label=f"µ = {lag}", **shapes) for lag, marker in markers.items()),
        Line2D([], [], marker="o", markerfacecolor="white", label="collapsed", **shapes),
        Line2D([], [], color="0.5", linestyle="--", label="before training"),
        Line2D([], [], color="0.5", linestyle=":", label="fitted bound"),
    ]
