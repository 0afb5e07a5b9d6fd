"""Files after a kill: whole content or the old one, and JSON lines without the part that was cut off."""

import errno
import fcntl
import importlib.util
import os
import shutil
import tempfile
import time
from pathlib import Path

import pytest

from mugrpo_jax import files
from mugrpo_jax.files import line_files, storage


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path):
    path = tmp_path / "config.yaml"
    files.write_atomically(path, "old")
    files.write_atomically(path, "µ = 1024\n")
    assert path.read_bytes() == "µ = 1024\n".encode()
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_the_old_file_stays_when_writing_fails(tmp_path, monkeypatch, step):
    path = tmp_path / "metrics.jsonl"
    files.write_atomically(path, "old\n")

    def full(*arguments):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, step, full)
    with pytest.raises(OSError, match="no space left"):
        files.write_atomically(path, "new\n")
    assert path.read_text() == "old\n" and list(tmp_path.iterdir()) == [path]
    monkeypatch.undo()
    files.write_atomically(path, "new\n")
    assert path.read_text() == "new\n"


def test_the_text_is_on_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(storage, "flush", lambda path: calls.append(("flush", path.read_text())))
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda *paths: (calls.append(("replace", "")), replace(*paths)))
    files.write_atomically(tmp_path / "a", "text")
    assert calls == [("flush", "text"), ("replace", "")]


def test_lines_are_numbered_as_in_the_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n\n[2, "µ"]\n', encoding="utf-8")
    assert list(files.read_json_lines(path)) == [(1, {"a": 1}), (3, [2, "µ"])]
    assert list(files.read_json_lines(tmp_path / "none.jsonl")) == []


@pytest.mark.parametrize("rest", ['{"a": ', '{"a": 2}', "{\udcc3"])
def test_an_unfinished_last_line_is_left_out_and_cut(tmp_path, rest):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n' + rest, encoding="utf-8", errors="surrogateescape")
    assert list(files.read_json_lines(path)) == [(1, {"a": 1})]
    files.cut_unfinished_line(path)
    assert path.read_text() == '{"a": 1}\n'
    files.cut_unfinished_line(path)
    assert path.read_text() == '{"a": 1}\n'


def test_a_damaged_line_is_named_with_file_and_number(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"a": \n{"a": 3}\n{"a": 4}')
    with pytest.raises(ValueError, match=r"rows.jsonl:2: not valid JSON \(Expecting value") as caught:
        list(files.read_json_lines(path))
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)
    # Readers that only show a file keep what they can read, also when the last line break is missing.
    kept = list(files.read_json_lines(path, skip_damaged=True))
    assert kept == [(1, {"a": 1}), (3, {"a": 3}), (4, {"a": 4})]


def test_a_file_of_another_host_is_waited_for_until_it_is_complete(tmp_path, capsys):
    path = tmp_path / "manifest.json"
    seen = iter([FileNotFoundError(path), ValueError("empty"), ValueError("half")])

    def read():
        if (problem := next(seen, None)) is not None:
            raise problem
        return "whole"

    assert files.wait_for(read, path, 5.0) == "whole"
    assert capsys.readouterr().out == f"{path}: missing or incomplete here; waiting for it up to 5 s\n"


def test_the_wait_for_a_file_ends(tmp_path):
    started = time.monotonic()
    with pytest.raises(FileNotFoundError):
        files.wait_for((tmp_path / "never").read_bytes, tmp_path / "never", 0.2)
    assert 0.2 <= time.monotonic() - started < 2
    with pytest.raises(FileNotFoundError):  # without patience there is one attempt
        files.wait_for((tmp_path / "never").read_bytes, tmp_path / "never", 0.0)


# -- buckets


def test_lines_in_a_bucket_are_uploaded_when_asked_and_after_a_while(bucket, monkeypatch):
    path = files.to_path("gs://bucket/run/metrics.jsonl")
    file = files.LineFile(path)
    file.append("1\n")
    assert not path.exists()  # an upload for every line would be slow
    file.sync()
    assert path.read_bytes() == b"1\n"
    monkeypatch.setattr(line_files, "UPLOAD_S", 0.0)
    again = files.LineFile(path)  # as after a restart
    again.append("2\n")
    assert list(files.read_json_lines(path)) == [(1, 1), (2, 2)]
    again.replace("3\n")
    again.append("4\n")
    assert path.read_bytes() == b"3\n4\n"


@pytest.mark.filterwarnings("ignore:Sending a large body")  # aiohttp says it of gcsfs
def test_a_file_in_a_bucket_appears_only_when_it_is_complete(bucket):
    path = files.to_path("gs://bucket/run/shard.arrayrecord")
    temporary = files.temporary_for(path)
    temporary.write_bytes(b"whole" * 2_000_000)  # larger than one part of an upload
    assert not path.exists()
    files.publish(temporary, path)
    assert not temporary.exists() and files.size(path) == 10_000_000
    copy = files.local_copy(path, files.scratch_folder())
    assert copy.read_bytes() == b"whole" * 2_000_000
    copy.unlink()
    assert bucket.objects.keys() == {"run/shard.arrayrecord"}


def test_an_object_is_created_or_replaced_only_if_nobody_was_faster(bucket, tmp_path):
    remote = files.to_path("gs://bucket/run/lock.json")
    for path in (tmp_path / "lock.json", remote):
        assert files.create(path, b"first\r\n") and not files.create(path, b"second")
        assert path.read_bytes() == b"first\r\n"
    assert not files.replace_object(remote, b"another", b"second")
    assert files.replace_object(remote, b"first\r\n", b"second") and remote.read_bytes() == b"second"
    put, faster = bucket.put, iter([b"third"])

    def interrupted(*arguments):  # another process uploads in the middle of our replacement
        for content in faster:
            put("bucket", "run/lock.json", content)
        return put(*arguments)

    bucket.put = interrupted
    try:
        assert not files.replace_object(remote, b"second", b"fourth")
    finally:
        bucket.put = put
    assert remote.read_bytes() == b"third"
    remote.unlink()
    assert not files.replace_object(remote, b"third", b"fifth") and not remote.exists()


def test_a_folder_in_a_bucket_is_copied_whole_before_anything_is_deleted(bucket):
    folder, target = (files.to_path(f"gs://bucket/run/{name}") for name in ("000004", "moved_away/4"))
    for name in ("checksums.txt", "state/d/0"):
        (folder / name).write_text(name)
    contents = []

    class Watched(dict):
        def pop(self, *arguments):
            contents.append(sorted(name for name in self if name.startswith("run/moved_away/")))
            return super().pop(*arguments)

    bucket.objects = Watched(bucket.objects)
    files.move_folder(folder, target)
    copied = ["run/moved_away/4/checksums.txt", "run/moved_away/4/state/d/0"]
    assert contents == [copied] * 2 and sorted(bucket.objects) == copied
    assert (target / "state/d/0").read_text() == "state/d/0"


def test_the_files_of_killed_processes_are_removed_and_those_of_living_ones_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead, alive, young = (tmp_path / f"mugrpo-scratch-{name}" for name in ("dead", "alive", "young"))
    for folder in (dead, alive, young):
        folder.mkdir()
    for folder in (dead, alive):
        os.utime(folder, (0, 0))
    descriptor = os.open(alive, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    mine = files.scratch_folder.__wrapped__()
    os.close(descriptor)
    assert set(tmp_path.iterdir()) == {alive, young, mine}


@pytest.mark.parametrize("name", ["s3://bucket/run", "gs://", "http://host/run"])
def test_other_urls_are_refused_in_one_line(name):
    with pytest.raises(ValueError, match="not supported; use a local folder or gs://BUCKET/FOLDER"):
        files.to_path(name)


def test_a_missing_package_for_buckets_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"gcsfs is not installed; pip install 'mugrpo-jax\[gcs\]'"):
        files.to_path("gs://bucket/run")


def test_a_folder_is_made_though_another_process_removes_it(tmp_path, monkeypatch):
    folder, mkdir, others = tmp_path / "claims" / "stage-000", Path.mkdir, iter(range(3))

    def faster(path, *arguments, **options):
        if path == folder and next(others, None) is not None:
            mkdir(path.parent, exist_ok=True)  # another process made it, and removes it before we look
            raise FileExistsError(errno.EEXIST, "File exists")
        return mkdir(path, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", faster)
    files.make_folder(folder)
    assert folder.is_dir()
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(FileExistsError):
        files.make_folder(file)


def test_two_processes_may_remove_the_same_folder(tmp_path, monkeypatch):
    folder, rmtree, others = tmp_path / "claims", shutil.rmtree, iter(range(1))
    (folder / "inner").mkdir(parents=True)
    (folder / "file").touch()

    def slower(path, **options):
        if next(others, None) is not None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", "inner")
        rmtree(path, **options)

    monkeypatch.setattr(shutil, "rmtree", slower)
    files.remove_folder(folder)
    assert not folder.exists()
    files.remove_folder(folder)


@pytest.mark.parametrize("links", [True, False])
def test_a_file_gets_a_name_only_if_the_name_is_free(tmp_path, monkeypatch, links):
    def no_link(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    if not links:
        monkeypatch.setattr(os, "link", no_link)
    path, temporary = tmp_path / "shard", tmp_path / "shard.tmp"
    temporary.write_bytes(b"first")
    assert files.publish_new(temporary, path) and path.read_bytes() == b"first"
    temporary.write_bytes(b"second")
    assert not files.publish_new(temporary, path) and path.read_bytes() == b"first"


def test_an_object_gets_a_name_only_if_the_name_is_free(bucket):
    path = files.to_path("gs://bucket/run/shard")
    temporary = files.temporary_for(path)
    for content, new in ((b"first", True), (b"second", False)):
        temporary.write_bytes(content)
        assert files.publish_new(temporary, path) is new and path.read_bytes() == b"first"


def test_files_of_two_folders_in_a_bucket_do_not_share_a_temporary_file(bucket):
    paths = [files.to_path(f"gs://bucket/stage-00{stage}/shard-00000.arrayrecord") for stage in (0, 1)]
    assert len({files.temporary_for(path) for path in paths}) == 2
