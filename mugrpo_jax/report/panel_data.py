"""What a figure shows, as numbers, and how many updates become few enough points.

A panel is drawn twice: by `figures` (matplotlib) for papers and notebooks, by `charts` (Bokeh) for the page.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np

from mugrpo_jax.report.run_history import History

MOST_POINTS = 512  # of a line over a whole run
MOST_STAGE_POINTS = 128  # of a line over one stage
MOST_STAGES = 12  # lines of one run in one figure
MOST_BARS = 32
ACCURACY = "held-out accuracy"  # the line that is drawn with points and error bars
STYLES = ("solid", "dashed", "dotted")

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Line:
    """One line, or the points of one run.

    Attributes:
      run: which of the runs, counted from 0.
      name: what it shows.
      x, y: the points.
      low, high: a band around them, or None.
      style: one of `STYLES`, or `points`.
      stage: which stage, None if it goes over all.
      age: place of the stage among those drawn, from 0 to 1.
    """

    run: int
    name: str
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    style: str = "solid"
    stage: int | None = None
    age: float = 1.0

    @property
    def banded(self) -> bool:
        """Whether there is a band that can be seen."""
        if self.low is None or self.high is None:
            return False
        return not np.array_equal(self.low, self.high, equal_nan=True)


@dataclasses.dataclass(frozen=True)
class Panel:
    """Lines over a common axis.

    Attributes:
      title, x, y: what the figure and its axes are called.
      lines: what is drawn.
      marks: labelled places on the x axis, such as the beginnings of stages, and whose they are.
      levels: labelled places on the y axis.
      low, high: ends of the y axis, None to follow the data.
      log: axes with a logarithmic scale: "", "y" or "xy".
      note: what to know when reading it.
    """

    title: str
    x: str
    y: str
    lines: tuple[Line, ...]
    marks: tuple[tuple[str, float, int | None], ...] = ()
    levels: tuple[tuple[str, float], ...] = ()
    low: float | None = None
    high: float | None = None
    log: str = ""
    note: str = ""

    @property
    def empty(self) -> bool:
        """Whether nothing was recorded that could be drawn."""
        return not any(np.isfinite(line.y).any() for line in self.lines)

    @property
    def styles(self) -> dict[str, str]:
        """What each line style shows."""
        return {line.name: line.style for line in self.lines}


@dataclasses.dataclass(frozen=True)
class Bars:
    """Stacked bars, one for a stage (or some neighbouring ones) of a run.

    Attributes:
      title, y: what the figure and its axis are called.
      groups: run and label of each bar.
      parts: heights by name, one for each bar.
      high: end of the y axis, None to follow the data.
      note: what to know when reading it.
    """

    title: str
    y: str
    groups: tuple[tuple[int, str], ...]
    parts: Mapping[str, np.ndarray]
    high: float | None = None
    note: str = ""

    @property
    def empty(self) -> bool:
        """Whether there is no bar with a height."""
        return not any(values.any() for values in self.parts.values())


def reduce(
    x: np.ndarray, y: np.ndarray, starts: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Means of x and y, and the least and largest y, over the pieces that begin at `starts`; NaN is left out.

    >>> x, y, low, high = reduce(np.arange(4.0), np.array([1.0, 3.0, np.nan, 8.0]), np.array([0, 2]))
    >>> x.tolist(), y.tolist(), low.tolist(), high.tolist()
    ([0.5, 2.5], [2.0, 8.0], [1.0, 8.0], [3.0, 8.0])
    """
    if not len(x):
        return x, y, y, y
    there = np.isfinite(y)
    sizes = np.diff(np.append(starts, len(x)))
    counts = np.add.reduceat(there, starts, dtype=np.float64)
    sums = np.add.reduceat(np.where(there, y, 0.0), starts)
    low = np.minimum.reduceat(np.where(there, y, np.inf), starts)
    high = np.maximum.reduceat(np.where(there, y, -np.inf), starts)
    found = counts > 0
    mean = np.divide(sums, counts, out=np.full_like(sums, np.nan), where=found)
    return (
        np.add.reduceat(x, starts) / sizes,
        mean,
        np.where(found, low, np.nan),
        np.where(found, high, np.nan),
    )


def even_bins(count: int, most: int) -> np.ndarray:
    """Where pieces of equal length begin, so that there are at most so many.

    >>> even_bins(10, most=4).tolist()
    [0, 3, 6, 9]
    """
    return np.arange(0, count, bin_size(count, most))


def bin_size(count: int, most: int) -> int:
    """Updates in one piece."""
    return max(-(-count // most), 1)


def run_bins(run: History) -> np.ndarray:
    """Pieces of a whole run; none reaches into another stage unless stages are shorter than a piece."""
    size = bin_size(len(run.updates), MOST_POINTS)
    if size > run.config.batch.updates_per_stage:
        return np.arange(0, len(run.updates), size)
    parts = [np.arange(part.start, part.stop, size) for part in run.stage_slices.values()]
    return np.concatenate(parts) if parts else np.arange(0)


def spread(items: Sequence[T], most: int) -> list[T]:
    """At most so many of the items, the first and the last among them, evenly spread.

    >>> spread(list(range(10)), 4)
    [0, 3, 6, 9]
    """
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def time_unit(seconds: float) -> tuple[str, float]:
    """The unit in which a time reads well, and its seconds.

    >>> time_unit(90), time_unit(600), time_unit(86400)
    (('seconds', 1.0), ('minutes', 60.0), ('hours', 3600.0))
    """
    if seconds < 180:
        return "seconds", 1.0
    return ("minutes", 60.0) if seconds < 3 * 3600 else ("hours", 3600.0)
