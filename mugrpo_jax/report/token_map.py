"""Show the history of one response: a table for the terminal, and a map of checkpoints × tokens."""

import html
import io
import math
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mugrpo_jax.config import ConfigError
from mugrpo_jax.files import make_folder, write_atomically
from mugrpo_jax.report.token_history import TokenHistory
from mugrpo_jax.runs.text_table import text_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ENDINGS = (".png", ".svg", ".pdf", ".html")
_LOW, _HIGH = -6.0, 1.0  # log10 of the ratios at the ends of the colour scale
_NAMED = 96  # with more tokens than this, the map has numbers instead of the tokens' text
_TEXT = 56  # characters of a greedy text beside its row


def check_ending(out: Path) -> None:
    """Raise an error if a map cannot be written to a file with this name."""
    if out.suffix not in ENDINGS:
        raise ConfigError(f"{out}: {out.suffix or 'no ending'}; possible: {', '.join(ENDINGS)}")


def history_text(history: TokenHistory) -> str:
    """Describe a history in the terminal: the response, and one line per checkpoint.

    The mean ratio behind the trigger is the geometric mean.
    """
    rows = [["updates", "first trigger", "lowest ratio", "behind the trigger", "greedy text"]]
    for ratios, place, updates, text in zip(
        history.log_ratio, history.first_triggers, history.updates, history.texts
    ):
        trigger, behind = "-", "-"
        if place is not None:
            trigger = f"{place}: {_shown(history.pieces[place])!r}"
            suffix = ratios[place + 1 :]
            behind = f"{len(suffix)} tokens" + (
                f", mean ratio {_power(suffix.mean())}" if len(suffix) else ""
            )
        rows.append([str(updates), trigger, _power(ratios.min()), behind, _shown(text)])
    said = [
        _title(history),
        f"prompt    {_shown(history.prompt)}",
        f"response  {_shown(''.join(history.pieces))}",
    ]
    return "\n".join([*said, "", text_table(rows)])


def write_map(history: TokenHistory, out: Path) -> None:
    """Write the map as a picture, or with the table as a page (.html)."""
    check_ending(out)
    page = out.suffix == ".html"
    file = io.BytesIO()
    with warnings.catch_warnings():  # a collapsed policy writes characters that the font does not have
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        token_map(history).savefig(file, format="svg" if page else out.suffix[1:])
    make_folder(out.parent)
    write_atomically(out, _page(history, file.getvalue().decode()) if page else file.getvalue())


def token_map(history: TokenHistory) -> "Figure":
    """Draw one row per checkpoint and one column per token; darker means less likely than when sampled.

    A cross marks the first trigger. The tokens behind it are hatched. The greedy text is beside the row.
    """
    from matplotlib.colors import LinearSegmentedColormap  # here, because matplotlib loads slowly
    from matplotlib.figure import Figure

    checkpoints, tokens = history.log_ratio.shape
    width = min(max(0.19 * tokens, 4.0), 18.0)
    figure = Figure(figsize=(width + 6.0, 0.24 * checkpoints + 2.2), dpi=120, layout="constrained")
    figure.suptitle(_title(history), x=0.01, ha="left", fontsize=10, fontweight="bold")
    axes = figure.subplots()
    # The lower the ratio, the darker the colour, so that the map also reads in black and white.
    colors = LinearSegmentedColormap.from_list("ratio", ["#a63603", "#fd8d3c", "#fdd0a2", "#ffffff"])
    values = np.nan_to_num(history.log_ratio / math.log(10), nan=_LOW).clip(_LOW, _HIGH)
    image = axes.imshow(values, cmap=colors, vmin=_LOW, vmax=_HIGH, aspect="auto", interpolation="nearest")
    _mark_triggers(axes, history)
    _label(axes, history)
    bar = figure.colorbar(image, ax=axes, location="left", shrink=0.8, pad=0.02)
    bar.set_label("log10 of policy / behavior", fontsize=8)
    return figure


def _mark_triggers(axes: "Axes", history: TokenHistory) -> None:
    from matplotlib.patches import Rectangle

    look: Any = {"fill": False, "hatch": "////", "edgecolor": "0.25", "linewidth": 0.8}
    for row, place in enumerate(history.first_triggers):
        if place is not None:
            axes.plot(place, row, marker="x", color="black", markersize=6, markeredgewidth=1.8)
            behind = len(history.pieces) - place - 1
            axes.add_patch(Rectangle((place + 0.5, row - 0.5), behind, 1, **look))


def _label(axes: "Axes", history: TokenHistory) -> None:
    plain: Any = {"family": "monospace", "parse_math": False}  # a dollar sign starts no formula
    beside: Any = plain | {"fontsize": 7, "va": "center"}
    for row, text in enumerate(history.texts):
        axes.annotate(_cut(text), (1, row), (6, 0), ("axes fraction", "data"), "offset points", **beside)
    axes.annotate("greedy text", (1, 1), (6, 3), "axes fraction", "offset points", fontsize=8, color="0.3")
    axes.set_yticks(range(len(history.updates)), map(str, history.updates), fontsize=8)
    axes.set_ylabel("updates since the start of the stage", fontsize=9)
    if len(history.pieces) <= _NAMED:
        marks = [_shown(piece) or "·" for piece in history.pieces]
        turn = 90 if max(map(len, marks)) > 1 else 0
        axes.set_xticks(range(len(marks)), marks, rotation=turn, fontsize=8, **plain)
    axes.set_xlabel("tokens of the stored response; × first trigger, //// tokens behind it", fontsize=9)


def _title(history: TokenHistory) -> str:
    said = "no token becomes a trigger"
    triggered = history.updates[history.triggers.any(axis=1)]
    if len(triggered):
        said = f"a trigger (ratio below {history.threshold:g}) appears by update {triggered[0]}"
    return (
        f"Response {history.response} of stage {history.stage} (reward {history.reward:g}, advantage "
        f"{history.advantage:.2f}): {said}"
    )


def _power(log_ratio: float) -> str:
    return "0" if log_ratio < -700 else f"{math.exp(log_ratio):.1e}"


def _shown(text: str) -> str:
    """Return the text in one line, with escapes for line breaks and control characters."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _cut(text: str) -> str:
    shown = _shown(text)
    return shown if len(shown) <= _TEXT else shown[: _TEXT - 1] + "…"


def _page(history: TokenHistory, picture: str) -> str:
    title = html.escape(_title(history))
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title>\n'
        "<style>body { font-family: sans-serif; margin: 2em } svg { max-width: 100%; height: auto } "
        "pre { overflow-x: auto }</style>\n"
        f"<body>\n{picture[picture.index('<svg') :]}\n<pre>{html.escape(history_text(history))}</pre>\n"
        "</body></html>\n"
    )
