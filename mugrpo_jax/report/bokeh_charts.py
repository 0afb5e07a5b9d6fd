"""Turn panels into JSON data. `assets/charts.js` draws the data in the browser, so writing a page is fast."""

import math
from typing import Any

import numpy as np

from mugrpo_jax.report.colors import GREY, line_color, line_strength, nth_color
from mugrpo_jax.report.panel_data import ACCURACY, Bars, Line, Panel

_MOST_DOTS = 64  # a line with more points is drawn without dots, because dots would overlap


def chart(panel: Panel | Bars, target: str, names: list[str]) -> dict[str, Any]:
    """Return the chart of a panel for the HTML element with id `target`. `names` are the runs' names."""
    shared = {"target": target, "y": panel.y}
    return shared | (_bars(panel, names) if isinstance(panel, Bars) else _lines(panel, names))


def _lines(panel: Panel, names: list[str]) -> dict[str, Any]:
    drawn = [line for line in panel.lines if np.isfinite(line.y).any()]
    highest = max((float(np.nanmax(line.y)) for line in drawn), default=0.0)
    found: dict[str, Any] = {
        "kind": "lines",
        "x": panel.x,
        "log": panel.log,
        "y_range": None if panel.low is None else [panel.low, panel.high or 1.08 * highest or 1.0],
        "x_range": None,
        "marks": [
            {"label": label, "place": x, "run": run, "color": GREY if run is None else nth_color(run)}
            for label, x, run in panel.marks
        ],
        "levels": [{"label": label, "place": y, "run": None, "color": GREY} for label, y in panel.levels],
        "lines": [_line(line, names) for line in drawn],
    }
    if panel.log == "y":
        found["y_range"] = _decades([y for line in drawn for y in line.y if np.isfinite(y)])
    if panel.log == "xy":  # show all marks, also those far from the data
        xs = [*(x for line in drawn for x in line.x), *(x for _, x, _ in panel.marks)]
        ys = [*(y for line in drawn for y in line.y), *(y for _, y in panel.levels)]
        found |= {"x_range": [min(xs) / 3, max(xs) * 3], "y_range": [min(ys) / 3, max(ys) * 3]}
    return found


def _decades(values: list[float]) -> list[float] | None:
    """Return the whole decades around values over one decade or more, so that few labels stand at the axis.

    >>> _decades([3e-7, 2e-5]), _decades([2.0, 3.0])
    ([1e-07, 0.0001], None)
    """
    if not values or min(values) <= 0 or max(values) < 10 * min(values):
        return None
    return [10.0 ** math.floor(math.log10(min(values))), 10.0 ** math.ceil(math.log10(max(values)))]


def _line(line: Line, names: list[str]) -> dict[str, Any]:
    run = [names[line.run]] if len(names) > 1 else []
    stage = [] if line.stage is None else [f"stage {line.stage}"]
    few = len(line.x) <= _MOST_DOTS
    found = {
        "run": line.run,
        "what": " · ".join([*run, *stage, line.name]),
        "xs": numbers(line.x),
        "ys": numbers(line.y),
        "style": line.style,
        "color": line_color(line, len(names)),
        "alpha": round(line_strength(line, len(names)), 2),
        "dots": line.style == "points" or len(line.x) == 1 or (few and line.name == ACCURACY),
        "size": 7 if few else 3,
        "errors": few and line.name == ACCURACY,
    }
    if line.low is not None and line.high is not None and line.banded:
        found |= {"low": numbers(line.low), "high": numbers(line.high)}
    return found


def _bars(bars: Bars, names: list[str]) -> dict[str, Any]:
    several = len(names) > 1
    return {
        "kind": "bars",
        "groups": [[_short(names[run]), label] if several else label for run, label in bars.groups],
        "parts": [
            {"what": name, "color": nth_color(i), "heights": numbers(heights)}
            for i, (name, heights) in enumerate(bars.parts.items())
        ],
    }


def _short(name: str) -> str:
    return name if len(name) <= 18 else f"…{name[-17:]}"


def numbers(values: np.ndarray) -> list[float | None]:
    """Round values to five digits, which is finer than a screen shows. NaN and infinity become None.

    >>> numbers(np.array([1 / 3, np.nan]))
    [0.33333, None]
    """
    return [float(f"{value:.5g}") if np.isfinite(value) else None for value in values]
