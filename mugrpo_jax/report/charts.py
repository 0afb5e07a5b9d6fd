"""Panels as interactive charts of the page, in Bokeh.

Text, grid and background colours are the page's, set in the browser (`assets/page.js`); the legend is HTML
beside the chart. Everything that belongs to one run carries the tag `run-0`, `run-1`, ... to be switched off.
"""

from typing import Any

import numpy as np
from bokeh.embed import json_item
from bokeh.models import (
    ColumnDataSource,
    FactorRange,
    HoverTool,
    Label,
    Range1d,
    Span,
    Whisker,
)
from bokeh.plotting import figure as bokeh_figure

from mugrpo_jax.report.colors import COLORS, line_color, line_strength
from mugrpo_jax.report.panel import Bars, Line, Panel

_TOOLS = "xbox_zoom,box_zoom,xpan,reset,save"
_GREY = "#888888"


def chart(panel: Panel | Bars, target: str, names: list[str]) -> dict[str, Any]:
    """A chart as data that BokehJS puts into the page's element `target`."""
    drawn = _bars(panel, names) if isinstance(panel, Bars) else _lines(panel, names)
    return dict(json_item(drawn, target))


def _figure(x: str, y: str, **options: Any) -> Any:
    drawn = bokeh_figure(
        height=270,
        sizing_mode="stretch_width",
        x_axis_label=x,
        y_axis_label=y,
        tools=_TOOLS,
        toolbar_location="above",
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
        **options,
    )
    drawn.toolbar.logo = None
    drawn.toolbar.autohide = True
    drawn.xgrid.visible = False
    drawn.axis.axis_label_text_font_style = "normal"
    drawn.axis.minor_tick_line_color = None
    return drawn


def _lines(panel: Panel, names: list[str]) -> Any:
    axes = {
        "x_axis_type": "log" if "x" in panel.log else "linear",
        "y_axis_type": "log" if panel.log else "linear",
    }
    drawn = _figure(panel.x, panel.y, **axes)
    hover = HoverTool(
        tooltips=[("", "@what"), (panel.x, "@x{0.[000]}"), (panel.y, "@y{0.[00000]}")],
        renderers=[],
        mode="mouse",
        line_policy="nearest",
    )
    if "x" in panel.log:
        hover.tooltips = [("", "@what"), (panel.x, "@x{0.00e+0}"), (panel.y, "@y{0.00e+0}")]
    for line in panel.lines:
        hover.renderers = [*hover.renderers, *_line(drawn, line, names)]
    drawn.add_tools(hover)
    for label, x in panel.marks:
        _mark(drawn, "height", label, x)
    for label, y in panel.levels:
        _mark(drawn, "width", label, y)
    if panel.low is not None:
        drawn.y_range.start = panel.low
    if panel.high is not None:
        drawn.y_range.end = panel.high
    if not panel.log and panel.low == 0 and panel.high is None:
        highest = max((np.nanmax(line.y) for line in panel.lines if np.isfinite(line.y).any()), default=1.0)
        drawn.y_range.end = 1.08 * highest or 1.0
    if panel.x == "stage":
        drawn.xaxis.ticker.desired_num_ticks = 8
        drawn.xaxis.ticker.mantissas = [1, 2, 5, 10]
        drawn.xaxis.ticker.min_interval = 1
    return drawn


def _line(drawn: Any, line: Line, names: list[str]) -> list[Any]:
    """Draw a line; returns what shows its values under the pointer."""
    color, strength = line_color(line, len(names)), line_strength(line, len(names))
    parts = [names[line.run]] * (len(names) > 1) + [f"stage {line.stage}"] * (line.stage is not None)
    columns = {"x": _small(line.x), "y": _small(line.y)}
    if line.low is not None and line.high is not None:
        columns |= {"low": _small(line.low), "high": _small(line.high)}
    source = ColumnDataSource(columns | {"what": [" · ".join([*parts, line.name])] * len(line.x)})
    tags = [f"run-{line.run}"]
    shown = []
    if line.style != "points":
        look = {"line_color": color, "line_alpha": strength, "line_dash": line.style, "line_width": 1.8}
        shown.append(drawn.line("x", "y", source=source, tags=tags, **look))
    if line.style == "points" or line.name == "held-out accuracy" or len(line.x) == 1:
        look = {"fill_color": color, "line_color": color, "fill_alpha": strength, "size": 7}
        shown.append(drawn.scatter("x", "y", source=source, tags=tags, **look))
    if "low" in columns and not np.array_equal(columns["low"], columns["high"], equal_nan=True):
        if line.name == "held-out accuracy":
            look = {"line_color": color, "upper_head": None, "lower_head": None, "line_width": 1.5}
            drawn.add_layout(Whisker(base="x", lower="low", upper="high", source=source, tags=tags, **look))
        else:
            look = {"fill_color": color, "fill_alpha": 0.15}
            drawn.varea("x", "low", "high", source=source, tags=tags, **look)
    return shown


def _mark(drawn: Any, dimension: str, label: str, place: float) -> None:
    drawn.add_layout(
        Span(location=place, dimension=dimension, line_color=_GREY, line_dash="dotted", line_width=1)
    )
    if not label:
        return
    look: dict[str, Any] = {"text": label, "text_font_size": "10px", "text_color": _GREY}
    if dimension == "height":
        look |= {"x": place, "y": 0, "y_units": "screen", "x_offset": 3, "y_offset": 3}
    else:
        look |= {"x": 0, "x_units": "screen", "y": place, "x_offset": 3, "y_offset": 3}
    drawn.add_layout(Label(**look))


def _bars(bars: Bars, names: list[str]) -> Any:
    several = len(names) > 1
    factors = [(_short(names[run]), label) if several else label for run, label in bars.groups]
    drawn = _figure("stage", bars.y, x_range=FactorRange(*factors))
    columns: dict[str, Any] = {"group": factors}
    base = np.zeros(len(factors))
    for i, (name, heights) in enumerate(bars.parts.items()):
        top = base + heights
        part = columns | {"low": _small(base), "top": _small(top), "y": _small(heights)}
        part["what"] = [name] * len(factors)
        source = ColumnDataSource(part)
        look = {"color": COLORS[i % len(COLORS)], "width": 0.8}
        drawn.vbar("group", bottom="low", top="top", source=source, **look)
        base = top
    drawn.add_tools(HoverTool(tooltips=[("", "@what"), ("stage", "@group"), (bars.y, "@y{0.[000]}")]))
    drawn.y_range = Range1d(0, bars.high or 1.08 * float(base.max()))
    drawn.xaxis.group_text_font_size = "11px"
    drawn.xaxis.major_label_orientation = 0.0 if len(factors) <= 12 else 0.9
    return drawn


def _short(name: str) -> str:
    return name if len(name) <= 18 else f"…{name[-17:]}"


def _small(values: np.ndarray) -> np.ndarray:
    return np.asarray(values, np.float32)
