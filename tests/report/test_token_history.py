"""The map and the table of one response over the checkpoints of its stage."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.patches import Rectangle

from mugrpo_jax.report import token_map
from mugrpo_jax.report.token_history import TokenHistory, _triggers


@pytest.fixture
def history():
    """A response of five tokens. A trigger appears at token 3, later another one at token 1."""
    log_ratio = np.zeros((3, 5), np.float32)
    log_ratio[1, 3] = -10.0
    log_ratio[2] = [0.5, -12.0, -2.0, -20.0, -np.inf]
    return TokenHistory(
        run=Path("run"),
        stage=1,
        response=7,
        prompt="1+1=",
        pieces=["3", "$", "\n", "x$", ""],
        reward=0.0,
        advantage=-1.0,
        threshold=1e-4,
        updates=np.array([0, 16, 32]),
        log_ratio=log_ratio,
        triggers=_triggers(log_ratio, -1.0, 1e-4),
        texts=["2", "2$ 2$\n", "\x00漢" + 99 * "+"],
    )


def test_only_responses_with_negative_advantage_have_triggers(history):
    assert history.first_triggers == [None, 3, 1]
    assert history.triggers.sum(axis=1).tolist() == [0, 1, 3]
    assert not _triggers(history.log_ratio, 1.0, 1e-4).any()
    assert _triggers(history.log_ratio, -1.0, 1e-5).sum() == 3


def test_the_table_has_a_line_per_checkpoint(history):
    lines = token_map.history_text(history).split("\n")
    assert "Response 7 of stage 1" in lines[0] and "appears by update 16" in lines[0]
    assert lines[2] == r"response  3$\nx$"
    rows = [line.split() for line in lines[5:]]
    assert rows[0] == ["0", "-", "1.0e+00", "-", "2"]
    assert rows[1][:7] == ["16", "3:", "'x$'", "4.5e-05", "1", "tokens,", "mean"]
    assert rows[2][:6] == ["32", "1:", "'$'", "0", "3", "tokens,"]


def test_the_map_marks_first_triggers_and_hatches_what_is_behind(history):
    axes = token_map.token_map(history).axes[0]
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines] == [(3, 1), (1, 2)]
    frames = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    assert [(frame.get_x(), frame.get_y(), frame.get_width()) for frame in frames] == [
        (3.5, 0.5, 1),
        (1.5, 1.5, 3),
    ]
    assert all(frame.get_hatch() for frame in frames)
    shown = np.asarray(axes.images[0].get_array())
    assert shown.min() == -6 and shown[2, 0] == pytest.approx(0.5 / np.log(10))


@pytest.mark.parametrize("ending", [".png", ".svg", ".html"])
def test_a_map_is_written_whatever_the_text(history, tmp_path, ending):
    out = tmp_path / "new" / f"map{ending}"
    token_map.write_map(history, out)
    content = out.read_bytes()
    assert len(content) > 5000
    if ending != ".png":
        assert "\x00" not in content.decode()
    if ending == ".html":
        assert content.startswith(b"<!doctype html>") and "漢" in content.decode()
