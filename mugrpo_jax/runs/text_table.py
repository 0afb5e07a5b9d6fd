"""Text tables for terminals."""

from collections.abc import Sequence
from typing import Literal


def text_table(rows: Sequence[Sequence[str]], *, align: Literal["left", "right"] = "left") -> str:
    """Format rows of cells as columns, two spaces apart; the first row is usually the header.

    >>> print(text_table([["stage", "reward"], ["0", "0.125"]], align="right"))
    stage  reward
        0   0.125
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    place = str.ljust if align == "left" else str.rjust
    return "\n".join("  ".join(map(place, row, widths)).rstrip() for row in rows)
