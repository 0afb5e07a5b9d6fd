"""The warning about a disk that may be too small."""

import shutil
from types import SimpleNamespace

from mugrpo_jax.files import to_path
from mugrpo_jax.planning.disk_space import little_disk


def test_a_disk_that_may_be_too_small_is_said_before_the_run(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: asked.append(path) or SimpleNamespace(free=5e9))
    folder = tmp_path / "runs" / "new"  # does not exist yet, so its nearest parent is asked
    assert little_disk(folder, 5e9) == "" and asked == [tmp_path]
    said = little_disk(folder, 6.62e15)
    assert said.startswith(f"disk        {folder}: the run needs up to 6.62 PB, and 5 GB are free; ")
    assert little_disk(to_path("gs://bucket/run"), 6e15) == ""


def test_what_a_run_has_written_is_not_needed_again(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    (tmp_path / "best").write_bytes(bytes(100))  # the need does not contain it
    assert "needs up to 1.1 kB" in little_disk(tmp_path, 1100, continues=True)
    (tmp_path / "rollouts" / "000000").mkdir(parents=True)
    (tmp_path / "rollouts" / "000000" / "shard").write_bytes(bytes(100))
    (tmp_path / "rollouts" / "gone").symlink_to("nowhere")  # as a file that is renamed while we look
    assert little_disk(tmp_path, 1100, continues=True) == ""
    assert "needs up to 1.1 kB" in little_disk(tmp_path, 1100)  # a new run, the old one is moved aside
