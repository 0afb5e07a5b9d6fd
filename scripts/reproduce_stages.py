"""How stale may the data be? Runs with several µ, the updates on one generation, and learning rates."""

import itertools
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
    """Whether a grid compares objectives over µ: several of them, each with all µ."""
    lengths = [{row["mu"] for row in rows if row["objective"] == name} for name in _objectives(rows)]
    same = all(len(some) > 1 and some == lengths[0] for some in lengths)
    return len(lengths) > 1 and same and len({row["updates"] for row in rows}) == 1 and lag_of(rows) == "µ"


def table(rows: Sequence[Run]) -> Iterable[str]:
    """The end of every objective for each µ and η: mean, all seeds, and how many collapsed.

    With several learning rates the best one of each objective and µ is bold.
    """
    lengths, rates = _lengths(rows), _rates(rows)
    yield f"| objective | η | {' | '.join(f'µ = {mu}' for mu in lengths)} |"
    yield f"|{'---|' * (2 + len(lengths))}"
    for name, rate in itertools.product(_objectives(rows), rates):
        cells = []
        for mu in lengths:
            same = _same(rows, name, mu, rate)
            ends = [end(row) for row in same]
            gone = sum(row["collapse"] is not None for row in same)
            seeds = ", ".join(f"{value:.3f}" for value in ends)
            lost = f"; {gone} of {len(same)} collapsed" if gone else ""
            mark = "**" if len(rates) > 1 and rate == _best_rate(rows, name, mu) else ""
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
    """Draw the end of the runs over µ, and return the legend.

    With several learning rates each objective has its best one at each µ. A mark is a run, hollow if it
    collapsed. The lines go through the means over seeds.
    """
    lengths = _lengths(rows)
    lines: list[Line2D] = []
    for name in _objectives(rows):
        color, label = figures.COLORS[NAMES[name]], figures.METHODS[NAMES[name]]
        best = {mu: _same(rows, name, mu, _best_rate(rows, name, mu)) for mu in lengths}
        there = [mu for mu in lengths if best[mu]]
        means = [np.mean([end(row) for row in best[mu]]) for mu in there]
        lines += axis.plot(there, means, color=color, linewidth=2, label=label)
        for row in itertools.chain.from_iterable(best.values()):
            fill = color if row["collapse"] is None else "white"
            axis.plot(row["mu"], end(row), "o", color=color, markerfacecolor=fill, markersize=6)
    start = np.mean([row["accuracy_start"] for row in rows])
    axis.axhline(start, color="0.5", linewidth=1, linestyle="--")
    axis.set(xscale="log", ylim=(-0.02, 1.02), ylabel="held-out accuracy at the end")
    axis.set_xlabel(f"µ: updates on one generation (of {max(row['updates'] for row in rows)} in all)")
    axis.set_xticks(lengths, list(map(str, lengths)))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_title(_title(rows), fontsize=10)
    return [
        *lines,
        Line2D([], [], marker="o", linestyle="", color="0.5", markerfacecolor="white", label="collapsed"),
        Line2D([], [], linestyle="--", color="0.5", label="before training"),
    ]


def _title(rows: Sequence[Run]) -> str:
    """What the figure shows: the ends with the oldest data, and how their learning rates were chosen."""
    oldest, rates = _lengths(rows)[-1], _rates(rows)
    ends = []
    for name in _objectives(rows):
        if same := _same(rows, name, oldest, _best_rate(rows, name, oldest)):
            ends.append(f"{_SHORT[name]} {np.mean([end(row) for row in same]):.2f}")
    tuned = f"each at the best of {len(rates)} learning rates"
    how = tuned if len(rates) > 1 else f"learning rate {rates[0]:g}"
    return f"µ = {oldest}: {', '.join(ends)} ({how})"


_SHORT = {"grpo": "narrow clip", "relaxed-no-veto": "no veto", "mu_grpo": "µ-GRPO"}


def end(row: Run) -> float:
    """The mean of the last evaluations."""
    return float(np.mean(row["evaluations"]["accuracy"][-LAST:]))


def _best_rate(rows: Sequence[Run], name: str, mu: int) -> float | None:
    """The learning rate whose seeds end highest on average."""
    rates = [rate for rate in _rates(rows) if _same(rows, name, mu, rate)]
    means = [np.mean([end(row) for row in _same(rows, name, mu, rate)]) for rate in rates]
    return rates[int(np.argmax(means))] if rates else None


def _objectives(rows: Sequence[Run]) -> list[str]:
    return [name for name in NAMES if any(row["objective"] == name for row in rows)]


def _lengths(rows: Sequence[Run]) -> list[int]:
    return sorted({row["mu"] for row in rows})


def _rates(rows: Sequence[Run]) -> list[float]:
    return sorted({row["learning_rate"] for row in rows})


def _same(rows: Sequence[Run], name: str, mu: int, rate: float | None) -> list[Run]:
    return [row for row in rows if (row["objective"], row["mu"], row["learning_rate"]) == (name, mu, rate)]
