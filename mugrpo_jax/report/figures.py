"""Draw figures for papers and notebooks. Every function takes runs and returns a matplotlib `Figure`.

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
from mugrpo_jax.report.colors import line_color, line_strength, nth_color
from mugrpo_jax.report.panel_data import ACCURACY, Bars, Line, Panel
from mugrpo_jax.report.run_history import History, names
from mugrpo_jax.report.trigger_panels import triggered


def overview(runs: Sequence[History]) -> Figure:
    """Draw three panels in one figure: the learning curve, the triggers, and the veto or the clip."""
    figure = Figure(figsize=(10, 7), dpi=120, layout="constrained")
    top, left, right = figure.subplot_mosaic([["top", "top"], ["left", "right"]]).values()
    removed = panels.vetoed if any(run.has_veto for run in runs) else panels.clipped
    for axes, panel in ((top, panels.learning), (left, triggered), (right, removed)):
        draw(axes, panel(runs), runs)
    _name_colors(figure, triggered(runs), runs)
    return figure


def _figure_of(
    panel: Callable[[Sequence[History]], Panel | Bars], size: tuple[float, float] = (5.6, 3.6)
) -> Callable[[Sequence[History]], Figure]:
    """Make a function that draws one panel as a figure, with the panel function's name and docstring."""

    def figure_of(runs: Sequence[History]) -> Figure:
        figure = Figure(figsize=size, dpi=120, layout="constrained")
        shown = panel(runs)
        draw(figure.subplots(), shown, runs)
        if isinstance(shown, Panel):
            _name_colors(figure, shown, runs)
        return figure

    figure_of.__name__ = figure_of.__qualname__ = panel.__name__
    figure_of.__doc__ = panel.__doc__
    return figure_of


learning = _figure_of(panels.learning, (10, 4))
learning_by_time = _figure_of(panels.learning_by_time, (10, 4))
rewards = _figure_of(panels.rewards, (10, 4))
clipped = _figure_of(panels.clipped)
vetoed = _figure_of(panels.vetoed)
adapted = _figure_of(panels.adapted)
abandoned = _figure_of(panels.abandoned)
pull_behind_trigger = _figure_of(panels.pull_behind_trigger)
effective_sample_size = _figure_of(panels.effective_sample_size)
ratios_positive = _figure_of(panels.ratios_positive)
ratios_negative = _figure_of(panels.ratios_negative)
mean_ratio_negative = _figure_of(panels.mean_ratio_negative)
log_ratio = _figure_of(panels.log_ratio)
gap = _figure_of(panels.gap)
behavior_reward = _figure_of(panels.behavior_reward)
behavior_ratio = _figure_of(panels.behavior_ratio)
behavior_sample_size = _figure_of(panels.behavior_sample_size)
behavior_kl = _figure_of(panels.behavior_kl)
behavior_log_ratio = _figure_of(panels.behavior_log_ratio)
behavior_abandoned = _figure_of(panels.behavior_abandoned)
behavior_entropy = _figure_of(panels.behavior_entropy)
loss = _figure_of(panels.loss)
response_length = _figure_of(panels.response_length)
entropy = _figure_of(panels.entropy)
kl = _figure_of(panels.kl)
equal_groups = _figure_of(panels.equal_groups)
finish_reasons = _figure_of(panels.finish_reasons)
broken_responses = _figure_of(panels.broken_responses)
time_spent = _figure_of(panels.time_spent)
throughput = _figure_of(panels.throughput)
slot_occupancy = _figure_of(panels.slot_occupancy)
staleness_law = _figure_of(panels.staleness_law)
drift = _figure_of(panels.drift)
gradient_cosine = _figure_of(panels.gradient_cosine)
gradient_norm = _figure_of(panels.gradient_norm)


def draw(axes: Axes, panel: Panel | Bars, runs: Sequence[History]) -> None:
    """Draw a panel into existing axes."""
    if isinstance(panel, Bars):
        _draw_bars(axes, panel, runs)
        return
    for line in panel.lines:
        _draw_line(axes, line, len(runs))
    for label, x, run in panel.marks:
        color = "0.6" if run is None else nth_color(run)
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
        [], [], color="0.35", linewidth=1.5, linestyle=shape, marker="o" if marked else None, label=name
    )


def _draw_bars(axes: Axes, bars: Bars, runs: Sequence[History]) -> None:
    places = np.arange(len(bars.groups)) + [group[0] * 0.5 for group in bars.groups]
    base = np.zeros(len(bars.groups))
    for i, (name, heights) in enumerate(bars.parts.items()):
        axes.bar(places, heights, bottom=base, color=nth_color(i), width=0.8, label=name)
        base = base + heights
    axes.set_xticks(places, [label for _, label in bars.groups])
    _finish(axes, "stage" if len(runs) == 1 else "", bars.y, bars.title)
    if len(runs) > 1:
        for i, name in enumerate(names(runs)):
            mine = [place for place, group in zip(places, bars.groups) if group[0] == i]
            if mine:
                below: dict[str, Any] = {"xytext": (0, -24), "textcoords": "offset points", "ha": "center"}
                axes.annotate(name, (np.mean(mine), 0), xycoords=("data", "axes fraction"), **below)
    handles = [Patch(color=nth_color(i), label=name) for i, name in enumerate(bars.parts)]
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
    """Place the legend above the axes, beside the title, so that it hides no data."""
    if handles:
        place: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1, 0.98), "borderaxespad": 0}
        axes.legend(handles=list(handles), fontsize=9, frameon=False, ncols=len(handles), **place)


def _name_colors(figure: Figure, panel: Panel, runs: Sequence[History]) -> None:
    """Add a legend below the figure: the colour of each run or, for one run, of each stage."""
    if len(runs) > 1:
        named = dict(zip(names(runs), map(nth_color, range(len(runs)))))
    else:
        staged = [line for line in panel.lines if line.stage is not None]
        named = {f"stage {line.stage}": line_color(line, 1) for line in staged}
    if len(named) > 1:
        lines = [Line2D([], [], color=color, linewidth=3) for color in named.values()]
        width = int(10 * figure.get_figwidth())
        columns = max(1, min(len(named), width // (max(map(len, named)) + 6)))
        place: Any = "outside lower center"
        figure.legend(lines, list(named), loc=place, fontsize=9, frameon=False, ncols=columns)
