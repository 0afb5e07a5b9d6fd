"""Figures of one run, or of several side by side. Every function returns a matplotlib `Figure`.

from mugrpo_jax.report import figures, read_run
figures.learning([read_run("runs/quickstart")]).savefig("learning.svg")
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from mugrpo_jax.report import panels
from mugrpo_jax.report.colors import COLORS, line_color, line_strength, run_color
from mugrpo_jax.report.panel_data import ACCURACY, Bars, Line, Panel
from mugrpo_jax.report.run_history import History, names

_GREY = "0.35"
_WIDE, _HALF = (10, 4), (5.6, 3.6)


def overview(runs: Sequence[History]) -> Figure:
    """Everything on one page: the learning curve above, what staleness does to the updates below."""
    figure = Figure(figsize=(10, 7), dpi=120, layout="constrained")
    top, left, right = figure.subplot_mosaic([["top", "top"], ["left", "right"]]).values()
    for axes, panel in ((top, panels.learning), (left, panels.vetoed), (right, panels.effective_sample_size)):
        draw(axes, panel(runs), runs)
    _name_colors(figure, panels.vetoed(runs), runs)
    return figure


def learning(runs: Sequence[History]) -> Figure:
    """Held-out accuracy and training reward over updates, the stages marked."""
    return _one(panels.learning, runs, _WIDE)


def learning_by_time(runs: Sequence[History]) -> Figure:
    """Held-out accuracy and training reward over what the run took."""
    return _one(panels.learning_by_time, runs, _WIDE)


def clipped(runs: Sequence[History]) -> Figure:
    """Share of tokens whose gradient the clip removes, against staleness."""
    return _one(panels.clipped, runs)


def vetoed(runs: Sequence[History]) -> Figure:
    """Share of tokens that the veto removes, against staleness."""
    return _one(panels.vetoed, runs)


def effective_sample_size(runs: Sequence[History]) -> Figure:
    """Effective sample size of tokens and responses, against staleness."""
    return _one(panels.effective_sample_size, runs)


def ratios_positive(runs: Sequence[History]) -> Figure:
    """Quantiles of the ratio where A > 0, against staleness."""
    return _one(panels.ratios_positive, runs)


def ratios_negative(runs: Sequence[History]) -> Figure:
    """Quantiles of the ratio where A < 0, against staleness."""
    return _one(panels.ratios_negative, runs)


def mean_ratio_negative(runs: Sequence[History]) -> Figure:
    """E[ρ | A < 0], against staleness."""
    return _one(panels.mean_ratio_negative, runs)


def gap(runs: Sequence[History]) -> Figure:
    """Gap between sampler and trainer, against staleness."""
    return _one(panels.gap, runs)


def response_length(runs: Sequence[History]) -> Figure:
    """Mean length of the responses."""
    return _one(panels.response_length, runs)


def finish_reasons(runs: Sequence[History]) -> Figure:
    """How the responses of each stage ended."""
    return _one(panels.finish_reasons, runs)


def time_spent(runs: Sequence[History]) -> Figure:
    """What the time of each stage went into."""
    return _one(panels.time_spent, runs)


def throughput(runs: Sequence[History]) -> Figure:
    """Response tokens a second, generated and trained on."""
    return _one(panels.throughput, runs)


def slot_occupancy(runs: Sequence[History]) -> Figure:
    """Share of the sampler's slots that were busy."""
    return _one(panels.slot_occupancy, runs)


def staleness_law(runs: Sequence[History]) -> Figure:
    """Where each run stands between S·η and T·η."""
    return _one(panels.staleness_law, runs)


def drift(runs: Sequence[History]) -> Figure:
    """Distance from the behavior policy, against staleness."""
    return _one(panels.drift, runs)


def gradient_cosine(runs: Sequence[History]) -> Figure:
    """Cosine of consecutive gradients, against staleness."""
    return _one(panels.gradient_cosine, runs)


def gradient_norm(runs: Sequence[History]) -> Figure:
    """Norm of the gradient."""
    return _one(panels.gradient_norm, runs)


def _one(
    panel: Callable[[Sequence[History]], Panel | Bars],
    runs: Sequence[History],
    size: tuple[float, float] = _HALF,
) -> Figure:
    figure = Figure(figsize=size, dpi=120, layout="constrained")
    shown = panel(runs)
    draw(figure.subplots(), shown, runs)
    if isinstance(shown, Panel):
        _name_colors(figure, shown, runs)
    return figure


def draw(axes: Axes, panel: Panel | Bars, runs: Sequence[History]) -> None:
    """Draw a panel into axes of your own."""
    if isinstance(panel, Bars):
        _draw_bars(axes, panel, runs)
        return
    for line in panel.lines:
        _draw_line(axes, line, len(runs))
    for label, x, run in panel.marks:
        color = "0.6" if run is None else run_color(run)
        axes.axvline(x, color=color, linewidth=0.8, linestyle=":", zorder=0)
        axes.annotate(label, (x, 1), xycoords=("data", "axes fraction"), xytext=(3, -3), **_SMALL)
    for label, y in panel.levels:
        axes.axhline(y, color="0.6", linewidth=0.8, linestyle=":", zorder=0)
        axes.annotate(
            label, (1, y), xycoords=("axes fraction", "data"), xytext=(-3, -3), ha="right", **_SMALL
        )
    if panel.x == "stage":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if "x" in panel.log:
        axes.set_xscale("log")
    if panel.log:
        axes.set_yscale("log")
    _finish(axes, panel.x, panel.y, panel.title)
    axes.set_ylim(bottom=panel.low, top=panel.high)
    handles = [_handle(name, style) for name, style in panel.styles.items()]
    _legend(axes, handles if len(handles) > 1 else [])


_SMALL: dict[str, Any] = {"textcoords": "offset points", "va": "top", "fontsize": 8, "color": "0.4"}


def _draw_line(axes: Axes, line: Line, runs: int) -> None:
    look: dict[str, Any] = {
        "color": line_color(line, runs),
        "alpha": line_strength(line, runs),
        "linewidth": 1.5,
    }
    if line.style == "points":
        axes.plot(line.x, line.y, marker="o", markersize=6, **look | {"linewidth": 0.8})
    elif line.name == ACCURACY and line.low is not None and line.high is not None:
        spread = np.stack([line.y - line.low, line.high - line.y])
        axes.errorbar(line.x, line.y, yerr=spread, marker="o", markersize=5, capsize=3, **look)
    else:
        marker = "o" if len(line.x) == 1 else None
        axes.plot(line.x, line.y, linestyle=line.style, marker=marker, markersize=4, **look)
        if line.low is not None and line.high is not None and line.banded:
            axes.fill_between(line.x, line.low, line.high, color=look["color"], alpha=0.15, linewidth=0)


def _handle(name: str, style: str) -> Line2D:
    marked = style == "points" or name == ACCURACY
    shape: Any = "none" if style == "points" else style
    return Line2D(
        [], [], color=_GREY, linewidth=1.5, linestyle=shape, marker="o" if marked else None, label=name
    )


def _draw_bars(axes: Axes, bars: Bars, runs: Sequence[History]) -> None:
    places = np.arange(len(bars.groups)) + [group[0] * 0.5 for group in bars.groups]
    base = np.zeros(len(bars.groups))
    for i, (name, heights) in enumerate(bars.parts.items()):
        axes.bar(places, heights, bottom=base, color=COLORS[i % len(COLORS)], width=0.8, label=name)
        base = base + heights
    axes.set_xticks(places, [label for _, label in bars.groups])
    _finish(axes, "stage" if len(runs) == 1 else "", bars.y, bars.title)
    if len(runs) > 1:
        for i, name in enumerate(names(runs)):
            mine = [place for place, group in zip(places, bars.groups) if group[0] == i]
            if mine:
                below: dict[str, Any] = {"xytext": (0, -24), "textcoords": "offset points", "ha": "center"}
                axes.annotate(name, (np.mean(mine), 0), xycoords=("data", "axes fraction"), **below)
    handles = [Patch(color=COLORS[i % len(COLORS)], label=name) for i, name in enumerate(bars.parts)]
    axes.legend(handles=handles, fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))


def _finish(axes: Axes, x: str, y: str, title: str) -> None:
    axes.set_xlabel(x, fontsize=10)
    axes.set_ylabel(y, fontsize=10)
    axes.set_title(title, fontsize=11, loc="left", fontweight="bold")
    axes.tick_params(labelsize=9)
    axes.grid(axis="y", color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.02, y=0.12)


def _legend(axes: Axes, handles: Sequence[Line2D]) -> None:
    """Above the axes, beside the title: nothing that is drawn can be hidden."""
    if handles:
        place: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1, 0.98), "borderaxespad": 0}
        axes.legend(handles=list(handles), fontsize=9, frameon=False, ncols=len(handles), **place)


def _name_colors(figure: Figure, panel: Panel, runs: Sequence[History]) -> None:
    """Which colour is which run or, of one run, which stage; below everything."""
    if len(runs) > 1:
        named = dict(zip(names(runs), map(run_color, range(len(runs)))))
    else:
        staged = [line for line in panel.lines if line.stage is not None]
        named = {f"stage {line.stage}": line_color(line, 1) for line in staged}
    if len(named) > 1:
        lines = [Line2D([], [], color=color, linewidth=3) for color in named.values()]
        width = int(10 * figure.get_figwidth())
        columns = max(1, min(len(named), width // (max(map(len, named)) + 6)))
        place: Any = "outside lower center"
        figure.legend(lines, list(named), loc=place, fontsize=9, frameon=False, ncols=columns)
