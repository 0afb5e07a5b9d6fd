"""Colours that can be told from a white and from a dark page alike: at least 3 : 1 against both."""

from mugrpo_jax.report.panel_data import Line

COLORS = ("#2b7fd0", "#d55e00", "#009572", "#c2549b", "#8a68d8", "#a07800", "#7d7d7d")
GREY = "#888888"  # of what belongs to no run
_OLD_TO_NEW = ((43, 127, 208), (138, 104, 216), (200, 80, 140), (213, 94, 0))


def line_color(line: Line, runs: int) -> str:
    """By run where there are several; else by stage, from blue (first) to orange (last)."""
    if runs > 1 or line.stage is None:
        return run_color(line.run)
    return ramp(line.age)


def line_strength(line: Line, runs: int) -> float:
    """Opacity: where the colour names the run, older stages are fainter."""
    return 1.0 if runs == 1 or line.stage is None else 0.35 + 0.65 * line.age


def ramp(place: float) -> str:
    """A colour between the first and the last stage, from 0 to 1.

    >>> ramp(0.0), ramp(1.0)
    ('#2b7fd0', '#d55e00')
    """
    first = min(int(place * (len(_OLD_TO_NEW) - 1)), len(_OLD_TO_NEW) - 2)
    share = place * (len(_OLD_TO_NEW) - 1) - first
    mixed = [round(a + share * (b - a)) for a, b in zip(_OLD_TO_NEW[first], _OLD_TO_NEW[first + 1])]
    return "#" + "".join(f"{part:02x}" for part in mixed)


def run_color(run: int) -> str:
    """The colour of a run, counted from 0."""
    return COLORS[run % len(COLORS)]
