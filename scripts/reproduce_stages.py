"""How stale may the data be? Runs at one learning rate that differ in µ, the updates on one generation."""

from collections.abc import Iterable, Sequence

import numpy as np
import reproduce_rates_figures as figures
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator
from reproduce_held_out import lag_of
from reproduce_rates import LAST
from reproduce_regimes import Run, row_of

NAMES = {  # objective of the grid: its arm in other figures
    "grpo": "grpo-stale",
    "relaxed-no-veto": "relaxed-no-veto",
    "mu_grpo": "mu_grpo",
}
MOST = 8  # generations in one line of a table


def are(rows: Sequence[Run]) -> bool:
    """Whether these runs of a grid differ only in objective, seed and µ: all objectives have the same µ."""
    lengths = [{row["mu"] for row in rows if row["objective"] == name} for name in _objectives(rows)]
    others = {(row["learning_rate"], row["updates"]) for row in rows}
    same = all(len(some) > 1 and some == lengths[0] for some in lengths)
    return len(others) == 1 and same and lag_of(rows) == "µ"


def table(rows: Sequence[Run]) -> Iterable[str]:
    """The end of every objective for each µ: mean, all seeds, and how many collapsed."""
    lengths = sorted({row["mu"] for row in rows})
    yield f"| objective | {' | '.join(f'µ = {mu}' for mu in lengths)} |"
    yield f"|{'---|' * (1 + len(lengths))}"
    for name in _objectives(rows):
        cells = []
        for mu in lengths:
            same = _same(rows, name, mu)
            ends = [end(row) for row in same]
            gone = sum(row["collapse"] is not None for row in same)
            seeds = ", ".join(f"{value:.3f}" for value in ends)
            lost = f"; {gone} of {len(same)} collapsed" if gone else ""
            cells.append(f"{np.mean(ends):.3f} ({seeds}{lost})" if same else "–")
        yield row_of(name, *cells)


def generations(rows: Sequence[Run]) -> Iterable[str]:
    """Each generation of the runs that have a few: its mean reward, and its groups that teach nothing."""
    few = [row for row in rows if 1 < len(row.get("generations", ())) <= MOST]
    if few:
        yield "| objective | µ | seed | mean reward of each generation | groups with equal rewards |"
        yield f"|{'---|' * 5}"
    for row in few:
        rewards = ", ".join(f"{made['reward']:.3f}" for made in row["generations"])
        equal = ", ".join(f"{100 * made['equal_groups']:.0f} %" for made in row["generations"])
        yield row_of(row["objective"], row["mu"], row["seed"], rewards, equal)


def plot(axis: Axes, rows: Sequence[Run]) -> list[Line2D]:
    """Draw the end of every run over µ, and return the legend.

    A mark is a run, hollow if it collapsed. The lines go through the means over seeds.
    """
    lengths = sorted({row["mu"] for row in rows})
    lines: list[Line2D] = []
    for name in _objectives(rows):
        color, label = figures.COLORS[NAMES[name]], figures.METHODS[NAMES[name]]
        there = [mu for mu in lengths if _same(rows, name, mu)]
        means = [np.mean([end(row) for row in _same(rows, name, mu)]) for mu in there]
        lines += axis.plot(there, means, color=color, linewidth=2, label=label)
        for row in (row for row in rows if row["objective"] == name):
            fill = color if row["collapse"] is None else "white"
            axis.plot(row["mu"], end(row), "o", color=color, markerfacecolor=fill, markersize=6)
    start = np.mean([row["accuracy_start"] for row in rows])
    axis.axhline(start, color="0.5", linewidth=1, linestyle="--")
    axis.set(xscale="log", ylim=(-0.02, 1.02), ylabel="held-out accuracy at the end")
    axis.set_xlabel(f"µ: updates on one generation (of {max(row['updates'] for row in rows)} in all)")
    axis.set_xticks(lengths, list(map(str, lengths)))
    axis.xaxis.set_minor_locator(NullLocator())
    return [
        *lines,
        Line2D([], [], marker="o", linestyle="", color="0.5", markerfacecolor="white", label="collapsed"),
        Line2D([], [], linestyle="--", color="0.5", label="before training"),
    ]


def end(row: Run) -> float:
    """The mean of the last evaluations."""
    return float(np.mean(row["evaluations"]["accuracy"][-LAST:]))


def _objectives(rows: Sequence[Run]) -> list[str]:
    return [name for name in NAMES if any(row["objective"] == name for row in rows)]


def _same(rows: Sequence[Run], name: str, mu: int) -> list[Run]:
    return [row for row in rows if (row["objective"], row["mu"]) == (name, mu)]
