"""A run takes the newest checkpoint that is not damaged, and says so."""

import pytest

from mugrpo_jax.config import ConfigError
from mugrpo_jax.loop.whole_checkpoints import check_whole, move_unusable
from mugrpo_jax.training.checksums import write_checksums


@pytest.fixture
def folder(tmp_path):
    for step in (2, 4, 6):
        place = tmp_path / "checkpoints" / f"{step:06d}" / "state"
        place.mkdir(parents=True)
        (place / "weights").write_bytes(bytes(100))
        write_checksums(place.parent)
    return tmp_path / "checkpoints"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_damaged_checkpoints_are_named_and_moved_away(folder, capsys):
    move_unusable(folder)
    assert names(folder) == ["000002", "000004", "000006"] and capsys.readouterr().out == ""
    for step in ("000004", "000006"):
        (folder / step / "state" / "weights").write_bytes(b"\x01" + bytes(99))
    with pytest.raises(ConfigError, match=r"000004/state/weights: damaged, its checksum differs"):
        check_whole(folder / "000004")
    move_unusable(folder)
    assert names(folder) == ["000002"]
    assert names(folder.parent / "moved_away") == ["checkpoints-000004-0", "checkpoints-000006-0"]
    said = capsys.readouterr().out
    assert f"{folder}/000006/state/weights: damaged, its checksum differs from checksums.txt; the" in said


def test_nothing_is_moved_if_no_checkpoint_is_left(folder):
    for step in names(folder):
        (folder / step / "checksums.txt").unlink()
    with pytest.raises(ConfigError, match=r"no checkpoint is left, all are damaged; restore one"):
        move_unusable(folder)
    assert names(folder) == ["000002", "000004", "000006"]


def test_a_run_goes_back_to_a_kept_checkpoint(folder):
    with pytest.raises(ConfigError, match=r"has no checkpoint after 3 updates; kept: 2, 4, 6"):
        move_unusable(folder, back_to=3)
    move_unusable(folder, back_to=2)
    assert names(folder) == ["000002"]
    move_unusable(folder.parent / "none")
