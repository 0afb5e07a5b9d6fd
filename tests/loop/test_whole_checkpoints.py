"""A run takes the newest checkpoint that is not damaged, and names those that it did not take."""

import pytest

from mugrpo_jax import files
from mugrpo_jax.config import ConfigError
from mugrpo_jax.loop.whole_checkpoints import check_whole, move_unusable
from mugrpo_jax.training import checkpoint_folders
from mugrpo_jax.training.checksums import write_checksums


@pytest.fixture(params=["disk", "bucket"])
def folder(request, tmp_path, bucket):
    run = tmp_path if request.param == "disk" else files.to_path("gs://bucket/run")
    for step in (2, 4, 6):
        place = run / "checkpoints" / f"{step:06d}" / "state"
        files.make_folder(place)
        (place / "weights").write_bytes(bytes(100))
        write_checksums(place.parent)
        (place.parent / "commit_success.txt").write_text("")
    return run / "checkpoints"


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
    away = folder.parent / "moved_away"
    assert names(away) == ["checkpoints-000004-0", "checkpoints-000006-0"]
    assert files.names_below(away / "checkpoints-000006-0") == [
        "checksums.txt",
        "commit_success.txt",
        "state/weights",
    ]
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


@pytest.mark.parametrize("folder", ["bucket"], indirect=True)
def test_a_checkpoint_in_a_bucket_is_ignored_until_its_last_file_is_there(folder, capsys):
    (folder / "000006" / "commit_success.txt").unlink()  # as after a kill while it was saved
    (folder / "000006" / "checksums.txt").unlink()
    assert [path.name for path in checkpoint_folders(folder)] == ["000002", "000004"]
    move_unusable(folder)
    assert names(folder) == ["000002", "000004", "000006"] and capsys.readouterr().out == ""
