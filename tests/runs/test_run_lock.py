"""Only one process writes to the folder of a run; the lock of a dead process is no obstacle."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest

from mugrpo_jax import distributed, files
from mugrpo_jax.config import ConfigError
from mugrpo_jax.runs import owned_files, run_lock
from mugrpo_jax.runs.run_lock import RunLock, watch_trainer


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(run_lock, "_BEAT_S", 0.02)
    monkeypatch.setattr(run_lock, "_DEAD_S", 0.4)
    monkeypatch.setattr(owned_files, "_GUARD_S", 0.2)


@pytest.fixture(params=["disk", "bucket"])
def folder(request, tmp_path, bucket, monkeypatch):
    """An empty folder of a run, on a local disk or in a bucket."""
    if request.param == "disk":
        return tmp_path
    monkeypatch.setattr(run_lock, "_DEAD_S", 2.0)  # a sign of life takes several requests
    return files.to_path("gs://bucket/run")


def owner(path, **changes):
    """The lock of somebody else, written as by its owner."""
    with RunLock(path.parent):
        content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"token": "other"} | changes))


def test_a_second_process_is_refused_and_the_lock_is_released(folder):
    folder = folder / "new" / "run"
    refused = pytest.raises(ConfigError, match=rf"process {os.getpid()} on .* is training here")
    with RunLock(folder), refused:
        RunLock(folder).__enter__()
    assert files.names_below(folder) == []
    with pytest.raises(KeyError), RunLock(folder):
        raise KeyError
    assert files.names_below(folder) == []


def test_a_dead_process_of_this_machine_is_recognised_at_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run_lock, "_DEAD_S", 60.0)
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    path = tmp_path / "lock.json"
    owner(path, pid=child.pid, started=owned_files.started(child.pid))
    with pytest.raises(ConfigError, match=rf"process {child.pid} on"):
        RunLock(tmp_path).__enter__()
    child.kill()
    while owned_files.started(child.pid) is not None:  # a zombie counts as dead
        time.sleep(0.01)
    with RunLock(tmp_path):
        assert f"process {child.pid} on" in capsys.readouterr().out
    child.communicate()
    owner(path, started="1")  # the number now belongs to another process
    with RunLock(tmp_path):
        pass


def test_an_owner_on_another_machine_is_dead_once_it_gives_no_sign_of_life(folder, capsys):
    path = folder / "lock.json"
    owner(path, machine="another", host="far")
    beats, stop = 0, threading.Event()

    def beat():
        nonlocal beats
        while not stop.wait(0.05):
            beats += 1
            path.write_text(json.dumps(json.loads(path.read_text()) | {"beats": beats}))

    thread = threading.Thread(target=beat)
    thread.start()
    with pytest.raises(ConfigError, match=r"process \d+ on far is training here"):
        RunLock(folder).__enter__()
    stop.set()
    thread.join()
    with RunLock(folder):
        waiting = f"waiting up to {run_lock._DEAD_S:g} s for a sign of life"
        assert f"on far holds the lock; {waiting}" in capsys.readouterr().out
    path.write_bytes(b"")  # killed between the creation of the file and its first byte
    with RunLock(folder):
        pass


def test_of_many_processes_that_find_a_dead_owner_one_takes_the_lock(folder):
    path = folder / "lock.json"
    attempts = 3 if files.is_remote(folder) else 10
    for attempt in range(attempts):
        owner(path, started="1")
        if attempt == 9:  # a process was killed while it took the lock
            (folder / "lock.json.takeover").write_text("?")
        held, refused = [], []

        def enter(held=held, refused=refused):
            lock = RunLock(folder)
            try:
                held.append(lock.__enter__())
            except ConfigError as error:
                refused.append(error)

        threads = [threading.Thread(target=enter) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(held), len(refused)) == (1, 7)
        held[0].release()
        assert files.names_below(folder) == []


def test_a_process_whose_lock_was_taken_ends(folder, monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(distributed, "end_process", lambda status, message: ended.set())
    lock = RunLock(folder)
    with lock:
        first = lock.path.read_bytes()
        while lock.path.read_bytes() == first:
            time.sleep(0.01)
        lock.path.unlink()
        while not lock.path.exists():  # lost files are written again
            time.sleep(0.01)
        lock.path.write_text(json.dumps(json.loads(first) | {"token": "other"}))
        assert ended.wait(30)
    assert lock.path.exists()  # it belongs to the other process


def test_a_sign_of_life_that_comes_late_does_not_change_the_lock_of_the_next_owner(folder, monkeypatch):
    """The process is stopped after it has found its own lock, and goes on when another one has the lock."""
    path, ours, theirs = folder / "lock.json", b"ours, beat 1", b"the lock of another"
    files.write_atomically(path, ours)
    monkeypatch.setattr(owned_files, "_GUARD_S", 5.0)
    assert owned_files.take(path, ours, theirs)
    owned_files.rewrite(path, ours, b"ours, beat 2")
    assert path.read_bytes() == theirs
    owned_files.rewrite(path, theirs, b"another, still!!!!!")
    assert path.read_bytes() == b"another, still!!!!!"


def test_a_sampler_notices_a_trainer_that_started_in_the_meantime_or_is_on_another_machine(folder):
    watch_trainer(folder, None)
    with RunLock(folder):  # a trainer that waits for samplers
        watch_trainer(folder, None)
    with RunLock(folder, samples=True), pytest.raises(ConfigError, match="trains here and samples itself"):
        watch_trainer(folder, None)
    lock = RunLock(folder, samples=True)
    lock._owner["machine"] = "far"
    with lock:
        first = lock.path.read_bytes()
        with pytest.raises(ConfigError, match="trains here and samples itself"):
            watch_trainer(folder, None)  # there was no lock before
        with pytest.raises(ConfigError, match="trains here and samples itself"):
            watch_trainer(folder, first)  # its sign changes
        content = lock.path.read_bytes()
    lock.path.write_bytes(content)
    watch_trainer(folder, content)  # dead
