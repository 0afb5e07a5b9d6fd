"""Define the data of one figure (`Panel` or `Bars`), and average many updates into few points.

`figures` draws panels with matplotlib for papers and notebooks, `bokeh_charts` with Bokeh for the page.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np

from mugrpo_jax.report.run_history import History

MOST_POINTS = 512  # most points of a line over a whole run
MOST_STAGE_POINTS = 128  # most points of a line over one stage
MOST_STAGES = 12  # most stages of one run that a figure draws
MOST_BARS = 32
ACCURACY = "held-out accuracy"  # the line that is drawn with points and error bars
STYLES = ("solid", "dashed", "dotted")

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of a panel, or a set of points.

    Attributes:
      run: index of the run in the list of runs.
      name: the metric that the line shows, as in the legend.
      x, y: coordinates of the points.
      low, high: lower and upper limit of a band around the line at each point; None without a band.
      style: one of `STYLES`, `dashdot`, or `points` for points without a line.
      stage: the stage that the line shows; None for a line over all stages.
      age: position of the stage among the drawn stages, from 0 (first) to 1 (last).
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
        """Return whether the line has a band, and `low` and `high` differ."""
        if self.low is None or self.high is None:
            return False
        return not np.array_equal(self.low, self.high, equal_nan=True)


@dataclasses.dataclass(frozen=True)
class Panel:
    """The data of a figure with lines over a common x axis.

    Attributes:
      x, y: labels of the axes.
      marks: vertical lines, such as starts of stages, as tuples (label, x, index of the run or None).
      levels: horizontal lines as tuples (label, y).
      low, high: limits of the y axis; None to fit the data.
      log: which axes have a logarithmic scale: "", "y" or "xy".
      note: caption of the figure.
      wanted: False if the runs have no such quantity by their configs; the page then leaves the figure out.
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
    wanted: bool = True

    @property
    def empty(self) -> bool:
        """Return whether there are no values to draw."""
        return not any(np.isfinite(line.y).any() for line in self.lines)

    @property
    def styles(self) -> dict[str, str]:
        """Return {name of a line: style of the line}."""
        return {line.name: line.style for line in self.lines}


@dataclasses.dataclass(frozen=True)
class Bars:
    """The data of a figure with stacked bars. Each bar shows one stage of a run or some neighbouring stages.

    Attributes:
      y: label of the y axis.
      groups: a tuple (index of the run, label) for each bar.
      parts: {name of a part: height of the part in each bar}.
      note: caption of the figure.
    """

    title: str
    y: str
    groups: tuple[tuple[int, str], ...]
    parts: Mapping[str, np.ndarray]
    note: str = ""

    @property
    def empty(self) -> bool:
        """Return whether all bars have height 0."""
        return not any(values.any() for values in self.parts.values())


def reduce(
    x: np.ndarray, y: np.ndarray, starts: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Divide a line into pieces and return the mean x, mean y, smallest y and largest y of each piece.

    `starts` are the indices where the pieces begin. NaN in y is ignored; a piece with only NaN gives NaN.

    >>> x, y, low, high = reduce(np.arange(4.0), np.array([1.0, 3.0, np.nan, 8.0]), np.array([0, 2]))
    >>> x.tolist(), y.tolist(), low.tolist(), high.tolist()
    ([0.5, 2.5], [2.0, 8.0], [1.0, 8.0], [3.0, 8.0])
    """
    if not len(x):
        return x, y, y, y
    known = np.isfinite(y)
    sizes = np.diff(np.append(starts, len(x)))
    counts = np.add.reduceat(known, starts, dtype=np.float64)
    sums = np.add.reduceat(np.where(known, y, 0.0), starts)
    low = np.minimum.reduceat(np.where(known, y, np.inf), starts)
    high = np.maximum.reduceat(np.where(known, y, -np.inf), starts)
    found = counts > 0
    mean = np.divide(sums, counts, out=np.full_like(sums, np.nan), where=found)
    return (
        np.add.reduceat(x, starts) / sizes,
        mean,
        np.where(found, low, np.nan),
        np.where(found, high, np.nan),
    )


def even_bins(count: int, most: int) -> np.ndarray:
    """Divide `count` items into at most `most` pieces of equal length; return the first index of each piece.

    >>> even_bins(10, most=4).tolist()
    [0, 3, 6, 9]
    """
    return np.arange(0, count, bin_size(count, most))


def bin_size(count: int, most: int) -> int:
    """Return the length of each piece if `count` items are divided into at most `most` pieces."""
    return max(-(-count // most), 1)


def run_bins(run: History) -> np.ndarray:
    """Return the first index of each piece of a run. Unless stages are short, no piece spans two stages."""
    size = bin_size(len(run.updates), MOST_POINTS)
    if size > run.config.batch.updates_per_stage:
        return np.arange(0, len(run.updates), size)
    parts = [np.arange(part.start, part.stop, size) for part in run.stage_slices.values()]
    return np.concatenate(parts) if parts else np.arange(0)


def over_stages(
    run: History, x: np.ndarray, y: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """`reduce` values of all updates, with a gap (NaN) before each new stage, so that no line joins stages.

    If a point shows several stages, there are no gaps.
    """
    starts = run_bins(run)
    reduced = reduce(x, y, starts)
    if bin_size(len(run.updates), MOST_POINTS) > run.config.batch.updates_per_stage:
        return reduced
    firsts = [part.start for part in list(run.stage_slices.values())[1:]]
    places = np.searchsorted(starts, firsts)
    x, *values = reduced
    mean, low, high = (np.insert(array, places, np.nan) for array in values)
    return np.insert(x, places, x[places]), mean, low, high


def spread(items: Sequence[T], most: int) -> list[T]:
    """Return at most `most` items, evenly spread, with the first and the last item.

    >>> spread(list(range(10)), 4)
    [0, 3, 6, 9]
    """
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def drawn_stages(run: History) -> dict[int, float]:
    """Return the stages of a run that figures draw, with the `Line.age` of each stage."""
    stages = spread(list(run.stage_slices), MOST_STAGES)
    return {stage: i / (len(stages) - 1) if len(stages) > 1 else 1.0 for i, stage in enumerate(stages)}


def time_unit(seconds: float) -> tuple[str, float]:
    """Return a readable unit for a time, and the number of seconds in the unit.

    >>> time_unit(90), time_unit(600), time_unit(86400)
    (('seconds', 1.0), ('minutes', 60.0), ('hours', 3600.0))
    """
    if seconds < 180:
        return "seconds", 1.0
    return ("minutes", 60.0) if seconds < 3 * 3600 else ("hours", 3600.0)
