"""How stale may the data be? Runs with several µ, the updates on one generation, and learning rates."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

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
    """Whether a grid compares objectives over µ: several of them, each with all µ."""
    lengths = [{row["mu"] for row in rows if row["objective"] == name} for name in _objectives(rows)]
    same = all(len(some) > 1 and some == lengths[0] for some in lengths)
    return len(lengths) > 1 and same and len({row["updates"] for row in rows}) == 1 and lag_of(rows) == "µ"


def table(rows: Sequence[Run]) -> Iterable[str]:
    """The end of every objective for each µ and η: mean, all seeds, and how many collapsed.

    The best of several learning rates is bold.
    """
    lengths, rates = _lengths(rows), _rates(rows)
    yield f"| objective | η | {' | '.join(f'µ = {mu}' for mu in lengths)} |"
    yield f"|{'---|' * (2 + len(lengths))}"
    for name, rate in itertools.product(_objectives(rows), rates):
        if not any(_same(rows, name, mu, rate) for mu in lengths):
            continue
        cells = []
        for mu in lengths:
            same = _same(rows, name, mu, rate)
            ends = [end(row) for row in same]
            gone = sum(row["collapse"] is not None for row in same)
            seeds = ", ".join(f"{value:.3f}" for value in ends)
            lost = f"; {gone} of {len(same)} collapsed" if gone else ""
            several = len(_rates(_same(rows, name, mu))) > 1
            mark = "**" if several and rate == _best_rate(rows, name, mu) else ""
            cells.append(f"{mark}{np.mean(ends):.3f}{mark} ({seeds}{lost})" if same else "–")
        yield row_of(name, f"{rate:g}", *cells)


def generations(rows: Sequence[Run]) -> Iterable[str]:
    """Each generation of the runs that have a few: its mean reward, and its groups that teach nothing."""
    few = [row for row in rows if 1 < len(row.get("generations", ())) <= MOST]
    if few:
        yield "| objective | η | µ | seed | mean reward of each generation | groups with equal rewards |"
        yield f"|{'---|' * 6}"
    for row in few:
        rewards = ", ".join(f"{made['reward']:.3f}" for made in row["generations"])
        equal = ", ".join(f"{100 * made['equal_groups']:.0f} %" for made in row["generations"])
        yield row_of(row["objective"], f"{row['learning_rate']:g}", row["mu"], row["seed"], rewards, equal)


def plot(axis: Axes, rows: Sequence[Run]) -> list[Line2D]:
    """Draw the end of the runs over µ, at the learning rate that ends highest; return the legend.

    Only rates are used that all objectives have at all µ, if there are any. A mark is a run, hollow if it
    collapsed. The lines go through the means over seeds.
    """
    lengths = _lengths(rows)
    rows = _at_shared_rates(rows)
    lines = []
    for name in _objectives(rows):
        best = {mu: _same(rows, name, mu, _best_rate(rows, name, mu)) for mu in lengths}
        lines.append(_line(axis, name, best))
    _start(axis, rows)
    axis.set_xlabel(f"µ: updates on one generation (of {max(row['updates'] for row in rows)} in all)")
    axis.set_xticks(lengths, list(map(str, lengths)))
    axis.xaxis.set_minor_locator(NullLocator())
    rates = _rates(rows)
    how = f"learning rate {rates[0]:g}" if len(rates) == 1 else f"best of {len(rates)} learning rates"
    axis.set_title(f"{_ends(rows, lengths[-1])} ({how})", fontsize=10)
    return [*lines, figures.LOST]


def tuned(rows: Sequence[Run]) -> list[int]:
    """The µ at which every objective was run at more than two learning rates."""
    names = _objectives(rows)
    return [mu for mu in _lengths(rows) if all(len(_rates(_same(rows, name, mu))) > 2 for name in names)]


def plot_rates(axes: Sequence[Axes], rows: Sequence[Run]) -> list[Line2D]:
    """Draw the end of the runs over the learning rate, a panel for each µ; return the legend.

    The dashed black line is fresh data: GRPO with the smallest µ, at its best learning rate.
    """
    freshest = _lengths(rows)[0]
    fresh = _same(rows, "grpo", freshest, _best_rate(rows, "grpo", freshest))
    label = figures.METHODS["grpo-mu4"] if freshest == 4 else f"GRPO, µ = {freshest}"
    lines: list[Line2D] = []
    for axis, mu in zip(axes, tuned(rows), strict=True):
        rates = _rates([row for row in rows if row["mu"] == mu])
        same = {name: {rate: _same(rows, name, mu, rate) for rate in rates} for name in _objectives(rows)}
        lines = [_line(axis, name, found) for name, found in same.items()]
        _start(axis, rows)
        if fresh and mu != freshest:
            height = float(np.mean([end(row) for row in fresh]))
            lines.append(
                axis.axhline(height, color="black", linewidth=1.2, linestyle=(0, (4, 2)), label=label)
            )
        axis.set_xlabel("learning rate")
        axis.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_title(f"{_ends(rows, mu)} (best rates)", fontsize=10)
    return [*lines, figures.LOST]


def _line(axis: Axes, name: str, found: Mapping[Any, Sequence[Run]]) -> Line2D:
    """Draw the runs of an objective at several places, and a line through their means."""
    ends = {place: [(end(row), row["collapse"] is not None) for row in same] for place, same in found.items()}
    return figures.draw_over(axis, ends, figures.COLORS[NAMES[name]], figures.METHODS[NAMES[name]])


def _start(axis: Axes, rows: Sequence[Run]) -> None:
    start = np.mean([row["accuracy_start"] for row in rows])
    axis.axhline(start, color="0.5", linewidth=1, linestyle=":")
    place = axis.get_yaxis_transform()  # x from 0 to 1 across the panel
    axis.text(0.01, start - 0.015, "before training", color="0.4", fontsize=8, va="top", transform=place)
    axis.set(xscale="log", ylim=(-0.02, 1.02), ylabel="held-out accuracy at the end")


def _ends(rows: Sequence[Run], mu: int) -> str:
    """What a figure shows: the ends of the objectives with this µ, each at its best learning rate."""
    ends = []
    for name in _objectives(rows):
        if same := _same(rows, name, mu, _best_rate(rows, name, mu)):
            ends.append(f"{figures.SHORT[NAMES[name]]} {np.mean([end(row) for row in same]):.2f}")
    return f"µ = {mu}: {', '.join(ends)}"


def _at_shared_rates(rows: Sequence[Run]) -> Sequence[Run]:
    cells = {(row["objective"], row["mu"]) for row in rows}
    shared = [rate for rate in _rates(rows) if all(_same(rows, *cell, rate) for cell in cells)]
    return [row for row in rows if row["learning_rate"] in shared] if shared else rows


def end(row: Run) -> float:
    """The mean of the last evaluations."""
    return float(np.mean(row["evaluations"]["accuracy"][-LAST:]))


def _best_rate(rows: Sequence[Run], name: str, mu: int) -> float | None:
    """The learning rate whose seeds end highest on average."""
    ends = {rate: [end(row) for row in _same(rows, name, mu, rate)] for rate in _rates(_same(rows, name, mu))}
    return max(ends, key=lambda rate: float(np.mean(ends[rate])), default=None)


def _objectives(rows: Sequence[Run]) -> list[str]:
    return [name for name in NAMES if any(row["objective"] == name for row in rows)]


def _lengths(rows: Sequence[Run]) -> list[int]:
    return sorted({row["mu"] for row in rows})


def _rates(rows: Sequence[Run]) -> list[float]:
    return sorted({row["learning_rate"] for row in rows})


def _same(rows: Sequence[Run], name: str, mu: int, rate: float | None = None) -> list[Run]:
    """The runs of an objective with this µ, at this learning rate or at all."""
    found = [row for row in rows if (row["objective"], row["mu"]) == (name, mu)]
    return [row for row in found if rate in (None, row["learning_rate"])]
