"""Panels as interactive charts of the page, in Bokeh.

Text, grid and background colours are the page's, set in the browser (`assets/page.js`); the legend is HTML
beside the chart. Everything that belongs to one run carries the tag `run-0`, `run-1`, ... to be switched off.
"""

from typing import Any

import bokeh.models
import bokeh.plotting
import numpy as np
from bokeh.embed import json_item

from mugrpo_jax.report.colors import COLORS, line_color, line_strength
from mugrpo_jax.report.panel import ACCURACY, Bars, Line, Panel

# Bokeh describes its models to people, not to type checkers.
models: Any = bokeh.models
plotting: Any = bokeh.plotting

_TOOLS = "xbox_zoom,box_zoom,xpan,reset,save"
_GREY = "#888888"


def chart(panel: Panel | Bars, target: str, names: list[str]) -> dict[str, Any]:
    """A chart as data that BokehJS puts into the page's element `target`."""
    drawn = _bars(panel, names) if isinstance(panel, Bars) else _lines(panel, names)
    return dict(json_item(drawn, target))  # type: ignore[arg-type]


def _figure(x: str, y: str, **options: Any) -> Any:
    drawn = plotting.figure(
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
    scales = {axis: "log" if axis in panel.log else "linear" for axis in "xy"}
    drawn = _figure(panel.x, panel.y, x_axis_type=scales["x"], y_axis_type=scales["y"])
    many, single = [], []
    for run in range(len(names)):
        mine = [line for line in panel.lines if line.run == run and np.isfinite(line.y).any()]
        for style in {line.style: None for line in mine if line.style != "points"}:
            many.append(_strokes(drawn, [line for line in mine if line.style == style], names))
        for line in mine:
            if line.style == "points" or line.name == ACCURACY or len(line.x) == 1:
                single.append(_points(drawn, line, names))
            elif line.banded:
                _band(drawn, line, names)
    form = "{0.00e+0}" if "x" in panel.log else "{0.[0000]}"
    shown = [("", "@what"), (panel.x, f"$snap_x{form}"), (panel.y, f"$snap_y{form}")]
    drawn.add_tools(models.HoverTool(tooltips=shown, renderers=many, line_policy="nearest"))
    shown = [("", "@what"), (panel.x, f"@x{form}"), (panel.y, f"@y{form}")]
    if single:
        drawn.add_tools(models.HoverTool(tooltips=shown, renderers=single, visible=False))
    for label, x in panel.marks:
        _mark(drawn, "height", label, x)
    for label, y in panel.levels:
        _mark(drawn, "width", label, y)
    _set_range(drawn, panel)
    return drawn


def _set_range(drawn: Any, panel: Panel) -> None:
    if panel.low is not None:
        highest = max(
            (float(np.nanmax(line.y)) for line in panel.lines if np.isfinite(line.y).any()), default=0.0
        )
        drawn.y_range = models.Range1d(panel.low, panel.high or 1.08 * highest or 1.0)
    if panel.x == "stage":
        drawn.xaxis.ticker.min_interval = 1
        drawn.xaxis.formatter = models.NumeralTickFormatter(format="0")


def _strokes(drawn: Any, lines: list[Line], names: list[str]) -> Any:
    """The lines of one run that share a style, as one glyph."""
    source = models.ColumnDataSource(
        {
            "xs": [_small(line.x) for line in lines],
            "ys": [_small(line.y) for line in lines],
            "color": [line_color(line, len(names)) for line in lines],
            "alpha": [line_strength(line, len(names)) for line in lines],
            "what": [_what(line, names) for line in lines],
        }
    )
    look = {"line_color": "color", "line_alpha": "alpha", "line_dash": lines[0].style, "line_width": 1.8}
    return drawn.multi_line("xs", "ys", source=source, tags=_tags(lines[0]), **look)


def _points(drawn: Any, line: Line, names: list[str]) -> Any:
    color = line_color(line, len(names))
    columns = {"x": _small(line.x), "y": _small(line.y), "what": [_what(line, names)] * len(line.x)}
    if line.low is not None and line.high is not None:
        columns |= {"low": _small(line.low), "high": _small(line.high)}
    source = models.ColumnDataSource(columns)
    if line.name == ACCURACY:
        look = {"line_color": color, "upper_head": None, "lower_head": None, "line_width": 1.5}
        drawn.add_layout(
            models.Whisker(base="x", lower="low", upper="high", source=source, tags=_tags(line), **look)
        )
    return drawn.scatter(
        "x", "y", source=source, tags=_tags(line), fill_color=color, line_color=color, size=7
    )


def _band(drawn: Any, line: Line, names: list[str]) -> None:
    assert line.low is not None and line.high is not None
    look = {"fill_color": line_color(line, len(names)), "fill_alpha": 0.15, "tags": _tags(line)}
    drawn.varea(_small(line.x), _small(line.low), _small(line.high), **look)


def _what(line: Line, names: list[str]) -> str:
    run = [names[line.run]] if len(names) > 1 else []
    stage = [] if line.stage is None else [f"stage {line.stage}"]
    return " · ".join([*run, *stage, line.name])


def _tags(line: Line) -> list[str]:
    return [f"run-{line.run}"]


def _mark(drawn: Any, dimension: str, label: str, place: float) -> None:
    drawn.add_layout(
        models.Span(location=place, dimension=dimension, line_color=_GREY, line_dash="dotted", line_width=1)
    )
    if not label:
        return
    look: dict[str, Any] = {"text": label, "text_font_size": "10px", "text_color": _GREY}
    if dimension == "height":
        look |= {"x": place, "y": 0, "y_units": "screen", "x_offset": 3, "y_offset": 3}
    else:
        look |= {"x": 0, "x_units": "screen", "y": place, "x_offset": 3, "y_offset": 3}
    drawn.add_layout(models.Label(**look))


def _bars(bars: Bars, names: list[str]) -> Any:
    several = len(names) > 1
    factors = [(_short(names[run]), label) if several else label for run, label in bars.groups]
    drawn = _figure("stage", bars.y, x_range=models.FactorRange(*factors))
    columns: dict[str, Any] = {"group": factors}
    base = np.zeros(len(factors))
    for i, (name, heights) in enumerate(bars.parts.items()):
        top = base + heights
        part = columns | {"low": _small(base), "top": _small(top), "y": _small(heights)}
        part["what"] = [name] * len(factors)
        source = models.ColumnDataSource(part)
        look = {"color": COLORS[i % len(COLORS)], "width": 0.8}
        drawn.vbar("group", bottom="low", top="top", source=source, **look)
        base = top
    drawn.add_tools(models.HoverTool(tooltips=[("", "@what"), ("stage", "@group"), (bars.y, "@y{0.[000]}")]))
    drawn.y_range = models.Range1d(0, bars.high or 1.08 * float(base.max()))
    drawn.xaxis.group_text_font_size = "11px"
    drawn.xaxis.major_label_orientation = 0.0 if len(factors) <= 12 else 0.9
    return drawn


def _short(name: str) -> str:
    return name if len(name) <= 18 else f"…{name[-17:]}"


def _small(values: np.ndarray) -> np.ndarray:
    return np.asarray(values, np.float32)
