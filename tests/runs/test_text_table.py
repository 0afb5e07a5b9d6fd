"""The text table of evaluations, plans and reports."""

import pytest

from mugrpo_jax.runs.text_table import text_table

ROWS = [["name", "n"], ["a", "10"], ["long name", ""]]


def test_columns_are_as_wide_as_their_widest_cell():
    assert text_table(ROWS).splitlines() == ["name       n", "a          10", "long name"]
    assert text_table(ROWS, align="right").splitlines() == ["     name   n", "        a  10", "long name"]


def test_every_row_has_the_same_number_of_cells():
    with pytest.raises(ValueError, match="shorter"):
        text_table([*ROWS, ["b"]])
