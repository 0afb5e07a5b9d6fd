"""The figures of arms that replayed the same rollouts at several learning rates."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator
from reproduce_rates import TRIGGERED, collapsed, end
from reproduce_regimes import Run
from reproduce_settings import SETTINGS, setting

METHODS = {
    "grpo-mu4": "GRPO, fresh data (µ = 4)",
    "grpo-stale": "narrow clip [0.8, 1.2]",
    "relaxed-no-veto": "relaxed clip [0, 5], no veto",
    "mu_grpo": "µ-GRPO: relaxed clip, veto",
}
SCOPES = {
    "relaxed-no-veto": "no veto",
    "mu_grpo-trigger": "the trigger alone",
    "mu_grpo": "the suffix (µ-GRPO)",
    "mu_grpo-sequence": "the whole response",
}
OBJECTIVES = {
    "grpo-stale": "GRPO (narrow clip)",
    "mu_grpo": "µ-GRPO",
    "m2po": "M2PO",
    "p3o": "P3O",
}
SHORT = {
    "grpo-mu4": "fresh data",
    "grpo-stale": "narrow clip",
    "relaxed-no-veto": "no veto",
    "mu_grpo": "µ-GRPO",
    "mu_grpo-trigger": "trigger alone",
    "mu_grpo-sequence": "whole response",
    "m2po": "M2PO",
    "p3o": "P3O",
}
COLORS = {  # colours that people with a colour blindness can tell apart (Okabe and Ito)
    "grpo-mu4": "#000000",
    "grpo-stale": "#0072b2",
    "relaxed-no-veto": "#d55e00",
    "mu_grpo": "#009e73",
    "mu_grpo-trigger": "#8c6d31",
    "mu_grpo-sequence": "#56b4e9",
    "m2po": "#e69f00",
    "p3o": "#cc79a7",
}


PANELS = {  # label of the axis: where the points are, and their name; all but the accuracy are in percent
    "held-out accuracy": ("evaluations", "accuracy"),
    "wrong responses with a trigger": ("bins", TRIGGERED),
    "vetoed tokens": ("bins", "vetoed/tokens"),
}


def draw(runs: Sequence[Run], folder: Path) -> None:
    """Draw the methods at each learning rate, the scopes of the veto at the highest, and ends over rates."""
    if any(run["arm"] in METHODS for run in runs):
        (draw_methods if len(_rates(runs)) > 1 else draw_side_by_side)(runs, folder / "methods.png")
    if any(run["arm"] in SCOPES.keys() - METHODS.keys() for run in runs):
        draw_scopes(runs, folder / "scopes.png")
    if len(_rates(run for run in runs if run["arm"] == "mu_grpo")) > 2:
        draw_ends(runs, folder / "ends.png")


def draw_methods(runs: Sequence[Run], path: Path) -> None:
    """One column per learning rate: accuracy above, triggers below. Thin lines are seeds."""
    columns, panels = _rates(runs), list(PANELS)[:2]
    figure, axes = plt.subplots(
        2, len(columns), figsize=(4.2 * len(columns), 5.4), squeeze=False, sharex=True, sharey="row",
        layout="constrained",
    )  # fmt: skip
    for column, rate in enumerate(columns):
        same = [run for run in runs if run["rate"] == rate]
        _draw_panels(axes[:, column], panels, same, METHODS, _seeds(runs))
        title = "\n".join(filter(None, [f"learning rate {rate:g}", _rescue(same)]))
        axes[0, column].set_title(title, fontsize=10)
        axes[1, column].set_xlabel("updates")
    for axis, label in zip(axes[:, 0], panels, strict=True):
        axis.set_ylabel(label)
    _finish(figure, path)


def draw_side_by_side(runs: Sequence[Run], path: Path) -> None:
    """The methods at one learning rate: accuracy, triggers, vetoed tokens. Thin lines are seeds.

    Dotted lines are generations of stale data, if a run has more than one.
    """
    figure, axes = plt.subplots(1, len(PANELS), figsize=(12, 3.6), layout="constrained")
    _draw_panels(axes, list(PANELS), runs, METHODS, _seeds(runs))
    stage = max(run["batch"]["updates_per_stage"] for run in runs)
    later = range(stage, max(run["updates"] for run in runs), stage)
    for axis, label in zip(axes, PANELS, strict=True):
        axis.set_title(label, fontsize=10)
        axis.set_xlabel("updates" if later else "updates on one generation")
        for start in later:
            axis.axvline(start, linestyle=":", linewidth=1, color="0.6")
    figure.suptitle(_rescue(runs).capitalize() or ends_of(runs, METHODS), fontsize=11)
    _finish(figure, path)


def draw_scopes(runs: Sequence[Run], path: Path) -> None:
    """What the veto removes, at the highest learning rate: accuracy on the left, triggers on the right."""
    rate = _rates(run for run in runs if run["arm"] in SCOPES.keys() - METHODS.keys())[-1]
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    panels = list(PANELS)[:2]
    same = [run for run in runs if run["rate"] == rate]
    _draw_panels(axes, panels, same, SCOPES, _seeds(same))
    for axis, label in zip(axes, panels, strict=True):
        axis.set_ylabel(label)
        axis.set_xlabel("updates on one generation")
    counts = [f"{label} {count}" for arm, label in SCOPES.items() if (count := _collapses(same, arm))]
    figure.suptitle(f"Collapsed at {rate:g}: {', '.join(counts)}", fontsize=10)
    _finish(figure, path)


def draw_ends(runs: Sequence[Run], path: Path) -> None:
    """The end of each arm over the learning rate: objectives on the left, scopes of the veto on the right.

    The titles compare the best ends among those rates that all arms of a panel have. The arms are drawn side
    by side, so that none covers another.
    """
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    rates = _rates(runs)
    for axis, names in zip(axes, (OBJECTIVES, SCOPES), strict=True):
        found = {arm: ends for arm in names if (ends := _ends(runs, arm))}
        beside = SIDE ** (np.arange(len(found)) - (len(found) - 1) / 2)
        lines = [
            draw_over(axis, {rate * shift: marks for rate, marks in ends.items()}, COLORS[arm], names[arm])
            for shift, (arm, ends) in zip(beside, found.items())
        ]
        axis.set(xscale="log", xlabel="learning rate")
        axis.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axis.xaxis.set_minor_locator(NullLocator())
        if shared := [rate for rate in rates if all(rate in ends for ends in found.values())]:
            best = [f"{SHORT[arm]} {best_of(ends, shared):.2f}" for arm, ends in found.items()]
            where = "at" if len(shared) == 1 else "best of"
            title = f"{where} {', '.join(f'{rate:g}' for rate in shared)}: {', '.join(best)}"
            axis.set_title("\n".join(textwrap.wrap(title, 64)), fontsize=10)
        axis.legend(handles=[*lines, LOST], fontsize=8, frameon=False)
        axis.grid(alpha=0.2)
        axis.spines[["top", "right"]].set_visible(False)
    highest = axes[0].get_ylim()[1]  # both panels share this axis
    axes[0].set(ylabel="held-out accuracy at the end", ylim=(-0.03 * highest, highest))
    figure.savefig(path, dpi=130)
    plt.close(figure)


SIDE = 1.06  # a rate times this is a place beside it
Ends = Mapping[float, Sequence[tuple[float, bool]]]  # for each place: the ends of runs, and which collapsed
LOST = Line2D([], [], marker="o", linestyle="", color="0.5", markerfacecolor="white", label="collapsed")


def _ends(runs: Sequence[Run], arm: str) -> Ends:
    same = [run for run in runs if run["arm"] == arm]
    return {
        rate: [(end(run), collapsed(run)) for run in same if run["rate"] == rate] for rate in _rates(same)
    }


def best_of(found: Ends, rates: Iterable[float]) -> float:
    """The highest mean end at these rates."""
    return max(float(np.mean([height for height, _ in found[rate]])) for rate in rates)


def draw_over(axis: Axes, found: Ends, color: str, label: str) -> Line2D:
    """A mark for each run, hollow if it collapsed, and a line through the means; return the line."""
    places = [place for place, ends in found.items() if ends]
    means = [np.mean([height for height, _ in found[place]]) for place in places]
    (line,) = axis.plot(places, means, color=color, linewidth=2, label=label)
    for place in places:
        for height, gone in found[place]:
            fill = "white" if gone else color
            axis.plot(place, height, "o", color=color, markerfacecolor=fill, markersize=6)
    return line


def draw_settings(runs: Sequence[Run], path: Path) -> None:
    """One panel per setting: accuracy. Thin lines are seeds."""
    columns = list(dict.fromkeys(map(setting, runs)))
    figure, axes = plt.subplots(
        1, len(columns), figsize=(4 * len(columns), 3.6), squeeze=False, sharey=True, layout="constrained"
    )
    panels = list(PANELS)[:1]
    for axis, column in zip(axes[0], columns, strict=True):
        same = [run for run in runs if setting(run) == column]
        _draw_panels(np.array([axis]), panels, same, OBJECTIVES, _seeds(runs))
        axis.set_title(f"sampled {SETTINGS[column]}\nbest: {_ranked(same, OBJECTIVES)[0]}", fontsize=9)
        axis.set_xlabel("updates on one generation")
    axes[0, 0].set_ylabel(panels[0])
    _finish(figure, path)


def ends_of(runs: Sequence[Run], arms: Iterable[str]) -> str:
    """How these arms end, the best one first, such as "ends: µ-GRPO 0.6, P3O 0.5"."""
    return "ends: " + ", ".join(_ranked(runs, arms))


def _ranked(runs: Sequence[Run], arms: Iterable[str]) -> list[str]:
    """The mean end of the longest runs of each arm, the best arm first."""
    updates = {arm: max((run["updates"] for run in runs if run["arm"] == arm), default=0) for arm in arms}
    ends = {}
    for arm, last in updates.items():
        if same := [end(run) for run in runs if run["arm"] == arm and run["updates"] == last]:
            ends[arm] = float(np.mean(same))
    several = len({updates[arm] for arm in ends}) > 1
    return [
        f"{SHORT[arm]} {ends[arm]:.3f}{f' after {updates[arm]:,} updates' * several}"
        for arm in sorted(ends, key=ends.__getitem__, reverse=True)
    ]


def _rescue(runs: Sequence[Run]) -> str:
    """How many runs collapse without the veto, and with it; "" if one of the two was not run."""
    without, with_veto = _collapses(runs, "relaxed-no-veto"), _collapses(runs, "mu_grpo")
    return f"without the veto {without} runs collapse, with it {with_veto}" if without and with_veto else ""


def _collapses(runs: Sequence[Run], arm: str) -> str:
    """How many runs of an arm collapse, such as "2 of 3"; "" without a run."""
    gone = [collapsed(run) for run in runs if run["arm"] == arm]
    return f"{sum(gone)} of {len(gone)}" if gone else ""


def _rates(runs: Iterable[Run]) -> list[float]:
    return sorted({run["rate"] for run in runs})


def _seeds(runs: Iterable[Run]) -> int:
    return len({run["seed"] for run in runs})


def _draw_panels(
    axes: np.ndarray, panels: Sequence[str], runs: Sequence[Run], names: Mapping[str, str], seeds: int
) -> None:
    """Draw these runs of a figure; in a figure with several seeds, an arm with only one of them is dashed."""
    for arm, label in names.items():
        same = [run for run in runs if run["arm"] == arm]
        style = "--" if len(same) == 1 and seeds > 1 else "-"
        for axis, (points, name) in zip(axes, (PANELS[panel] for panel in panels), strict=True):
            if points == "bins":
                axis.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.3g} %")
            _draw_arm(axis, [_curve(run[points], name) for run in same], label, COLORS[arm], style)


def _draw_arm(
    axis: Axes, curves: Sequence[tuple[list[float], list[float]]], label: str, color: str, style: str
) -> None:
    """Thin lines for the runs of an arm and a thick one for their mean, as far as all runs go."""
    length = min((len(x) for x, _ in curves), default=0)
    for x, y in curves if len(curves) > 1 else []:
        axis.plot(x, y, linewidth=0.8, alpha=0.4, color=color)
    if length:
        x, y = (np.mean([curve[part][:length] for curve in curves], axis=0) for part in (0, 1))
        axis.plot(x, y, style, linewidth=2, label=label, color=color)


def _curve(points: Iterable[Mapping[str, float]], name: str) -> tuple[list[float], list[float]]:
    known = [point for point in points if point.get(name) is not None]
    return [point["updates"] for point in known], [point[name] for point in known]


def _finish(figure: Figure, path: Path) -> None:
    for axis in figure.axes:
        axis.grid(alpha=0.2)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_ylim(bottom=0)
    handles = {label: line for axis in figure.axes for line, label in zip(*axis.get_legend_handles_labels())}
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)
