"""Checkpoints know when one of their files has changed, and which of them to keep."""

import functools

import jax
import optax
import pytest

from mugrpo_jax import config as configs
from mugrpo_jax.config import ConfigError
from mugrpo_jax.training import CheckpointStore, Cursor, TrainState, checkpoints, damage

LATER = {"_CHECKPOINT_METADATA", "commit_success.txt"}  # of Orbax; no reader needs them


@pytest.fixture(scope="module")
def state():
    params, zero = {"w": jax.numpy.arange(6.0)}, jax.numpy.zeros((), int)
    return TrainState(params, optax.sgd(1.0).init(params), zero, zero, anchor=None, previous=None)


def open_store(folder, **keep):
    return CheckpointStore(folder / "checkpoints", configs.CheckpointsSection(**keep))


def test_damage_to_any_file_is_noticed_and_names_the_file(tmp_path, state):
    store = open_store(tmp_path)
    store.save(state, Cursor(updates=3), accuracy=0.5)
    store.close()
    folder = store.path(3)
    files = [path for path in folder.rglob("*") if path.is_file()]
    checked = [
        path for path in files if path.name != "accuracy.txt" and str(path.relative_to(folder)) not in LATER
    ]
    assert damage(folder) is None and len(checked) > 8
    for path in checked:
        content = path.read_bytes()
        for bad in (b"", content[:-1], bytes([content[0] ^ 1]) + content[1:]) if content else (b"x",):
            path.write_bytes(bad)
            problem = damage(folder)
            assert problem is not None and str(folder) in problem
            assert "checksums.txt" in str(path) or problem.startswith(f"{path}: damaged")
            # With two hosts, one of them finds it.
            assert any(damage(folder, part, 2) for part in range(2))
        path.unlink()
        assert damage(folder).startswith(f"{path}: missing")
        path.write_bytes(content)
    (folder / "accuracy.txt").write_text("0.9 0123\n")  # believed only with its checksum
    store = CheckpointStore(tmp_path / "checkpoints")
    assert store.best() is None and store.steps() == [3]
    (folder / "cursor" / "metadata").write_bytes(b"?")
    with pytest.raises(ConfigError, match=r"damaged, its checksum differs .*; kept: none"):
        store.check(3)
    store.close()


def test_a_checkpoint_is_kept_by_an_accuracy_that_comes_later(tmp_path, state):
    store = open_store(tmp_path, keep_last=1, keep_best=1)
    store.save(state, Cursor(updates=1), accuracy=0.5)
    store.save(state, Cursor(updates=2))
    store.save(state, Cursor(updates=2), accuracy=0.9)  # evaluated after the run was stopped and resumed
    assert store.steps() == [2]
    store.save(state, Cursor(updates=3), extra=True)  # only because the run was stopped
    store.close()
    store = open_store(tmp_path, keep_last=1, keep_best=1)
    assert (store.steps(), store.best()) == ([2, 3], 2)
    store.save(state, Cursor(updates=4))
    store.save(state, Cursor(updates=5))
    store.close()
    assert sorted(path.name for path in store.folder.iterdir()) == ["000002", "000005"]


def test_a_failed_write_is_one_line_that_names_the_checkpoint(tmp_path, state, monkeypatch):
    store = open_store(tmp_path)
    monkeypatch.setattr(checkpoints, "write_checksums", lambda folder: (folder / "no" / "folder").touch())
    store.save(state, Cursor(updates=7))
    with pytest.raises(
        ConfigError, match=r"checkpoints/000007: cannot be written \(No such file or directory"
    ):
        store.wait()
    store.close()  # waits for nothing
    assert CheckpointStore(tmp_path / "checkpoints").steps() == []


@pytest.mark.parametrize("when", ["checked", "read"])
def test_a_checkpoint_that_its_run_removes_while_it_is_read_is_named_with_those_kept(
    tmp_path, state, monkeypatch, when
):
    store = open_store(tmp_path, keep_last=2)
    for updates in (3, 6):
        store.save(state, Cursor(updates=updates))
    store.wait()
    reader = CheckpointStore(tmp_path / "checkpoints")  # as of mugrpo eval
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state.params)

    def remove():
        store.save(state, Cursor(updates=9))  # removes the oldest one
        store.wait()

    def slow(folder):
        remove()
        return damage(folder)

    if when == "checked":
        monkeypatch.setattr(checkpoints, "damage", slow)
        steps = [functools.partial(reader.check, 3)]
    else:
        reader.check(3)
        remove()
        steps = [
            functools.partial(reader.restore_params, abstract, 3),
            functools.partial(reader.restore, state, 3),
        ]
    for step in steps:
        with pytest.raises(ConfigError, match=r"000003: removed by its run, which .*; kept: 6, 9$"):
            step()
    monkeypatch.undo()
    reader.check(6)
    (reader.path(6) / "cursor" / "metadata").write_bytes(b"?")
    monkeypatch.setattr(checkpoints, "_REMOVAL_S", 0.2)
    with pytest.raises(ConfigError, match=r"damaged, its checksum differs"):  # it stays: not the trainer
        reader.check(6)
    reader.close()
    store.close()
