"""The figures of arms that replayed the same rollouts at several learning rates."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from reproduce_rates import TRIGGERED
from reproduce_regimes import Run

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
COLORS = {  # colours that people with a colour blindness can tell apart (Okabe and Ito)
    "grpo-mu4": "#000000",
    "grpo-stale": "#0072b2",
    "relaxed-no-veto": "#d55e00",
    "mu_grpo": "#009e73",
    "mu_grpo-trigger": "#cc79a7",
    "mu_grpo-sequence": "#56b4e9",
}


def draw(runs: Sequence[Run], folder: Path) -> None:
    """Draw the methods at each learning rate, and the scopes of the veto at the highest."""
    draw_methods(runs, folder / "methods.png")
    if any(run["arm"] in SCOPES.keys() - METHODS.keys() for run in runs):
        draw_scopes(runs, folder / "scopes.png")


def draw_methods(runs: Sequence[Run], path: Path) -> None:
    """One column per learning rate: accuracy above, triggers below. Thin lines are seeds."""
    columns = _rates(runs)
    figure, axes = plt.subplots(
        2, len(columns), figsize=(4.2 * len(columns), 5.4), squeeze=False, sharex=True, sharey="row",
        layout="constrained",
    )  # fmt: skip
    for column, rate in enumerate(columns):
        same = [run for run in runs if run["rate"] == rate]
        _draw_column(axes[:, column], same, METHODS)
        axes[0, column].set_title(f"learning rate {rate:g}", fontsize=10)
    _finish(figure, axes, path)


def draw_scopes(runs: Sequence[Run], path: Path) -> None:
    """What the veto removes, at the highest learning rate: accuracy on the left, triggers on the right."""
    rate = _rates(run for run in runs if run["arm"] in SCOPES.keys() - METHODS.keys())[-1]
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), squeeze=False, layout="constrained")
    _draw_column(axes[0], [run for run in runs if run["rate"] == rate], SCOPES)
    figure.suptitle(f"The veto removes ... (learning rate {rate:g})", fontsize=10)
    _finish(figure, axes.reshape(2, 1), path)


def _rates(runs: Iterable[Run]) -> list[float]:
    return sorted({run["rate"] for run in runs})


def _draw_column(axes: Sequence[Axes] | np.ndarray, runs: Sequence[Run], names: Mapping[str, str]) -> None:
    for arm, label in names.items():
        same = [run for run in runs if run["arm"] == arm]
        style: dict[str, Any] = {"color": COLORS[arm]}
        for axis, points, name in ((axes[0], "evaluations", "accuracy"), (axes[1], "bins", TRIGGERED)):
            curves = [_curve(run[points], name) for run in same]
            for x, y in curves if len(curves) > 1 else []:
                axis.plot(x, y, linewidth=0.8, alpha=0.4, **style)
            if curves:
                length = min(len(x) for x, _ in curves)
                x, y = (np.mean([curve[part][:length] for curve in curves], axis=0) for part in (0, 1))
                axis.plot(x, y, linewidth=2, label=label, **style)


def _curve(points: Iterable[Mapping[str, float]], name: str) -> tuple[list[float], list[float]]:
    known = [point for point in points if point.get(name) is not None]
    return [point["updates"] for point in known], [point[name] for point in known]


def _finish(figure: Figure, axes: np.ndarray, path: Path) -> None:
    for axis in axes.flat:
        axis.grid(alpha=0.2)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_ylim(bottom=0)
    for axis in axes[-1]:
        axis.set_xlabel("updates on one generation")
    axes[0, 0].set_ylabel("held-out accuracy")
    axes[1, 0].set_ylabel("wrong responses with a trigger")
    handles = {label: line for axis in figure.axes for line, label in zip(*axis.get_legend_handles_labels())}
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)
