"""Choose colours of lines and bars. Their contrast with a white and with a dark page is at least 3 : 1."""

from mugrpo_jax.report.panel_data import Line

COLORS = ("#2b7fd0", "#d55e00", "#009572", "#c2549b", "#8a68d8", "#a07800", "#c94f4f", "#7d7d7d")
GREY = "#888888"  # for marks that belong to no run
_OLD_TO_NEW = ((43, 127, 208), (138, 104, 216), (200, 80, 140), (213, 94, 0))


def line_color(line: Line, runs: int) -> str:
    """Return the colour of a line's run or, if there is only one run, the colour of the line's stage."""
    if runs > 1 or line.stage is None:
        return nth_color(line.run)
    return ramp(line.age)


def line_strength(line: Line, runs: int) -> float:
    """Return the opacity of a line. If there are several runs, the lines of early stages are fainter."""
    return 1.0 if runs == 1 or line.stage is None else 0.35 + 0.65 * line.age


def ramp(place: float) -> str:
    """Return the colour of a stage, from blue for the first stage (`place` 0) to orange for the last (1).

    >>> ramp(0.0), ramp(1.0)
    ('#2b7fd0', '#d55e00')
    """
    first = min(int(place * (len(_OLD_TO_NEW) - 1)), len(_OLD_TO_NEW) - 2)
    share = place * (len(_OLD_TO_NEW) - 1) - first
    mixed = [round(a + share * (b - a)) for a, b in zip(_OLD_TO_NEW[first], _OLD_TO_NEW[first + 1])]
    return "#" + "".join(f"{part:02x}" for part in mixed)


def nth_color(n: int) -> str:
    """Return the colour of the nth run, or of the nth part of a bar, counted from 0."""
    return COLORS[n % len(COLORS)]
