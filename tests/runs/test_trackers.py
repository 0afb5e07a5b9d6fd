"""TensorBoard and Weights & Biases show every record of the journal once."""

import importlib.util
import struct
import sys
import types
from collections import Counter

import pytest

from mugrpo_jax import config as configs
from mugrpo_jax.config import ConfigError
from mugrpo_jax.runs.journal import Journal, read_journal
from mugrpo_jax.runs.trackers import FailSafeTracker, TensorBoard, WandB, check_trackers, open_trackers


def update(number):
    return {"kind": "update", "updates": number, "reward": number / 10, "seconds": {"update": 0.5}}


def events(folder):
    """`(tag, step, value)` of all scalars in a folder of event files, read by their public format."""
    from tensorboardX.proto import event_pb2

    found = []
    for path in sorted(folder.glob("events*")):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = event_pb2.Event.FromString(data[12 : 12 + length])
            found += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
            data = data[16 + length :]
    return found


def continued(folder, make):
    """A run killed after update 6 whose newest checkpoint is at update 4, continued to update 7."""
    first = Journal(folder / "metrics.jsonl")
    first.follow(make())
    for number in range(1, 7):
        first.write(update(number))
    for tracker in first._trackers:
        tracker.close()
    for file in folder.glob("tensorboard/events*"):  # as if it had been written long ago
        file.rename(file.with_name("events.out.tfevents.1.host"))
    second = Journal(folder / "metrics.jsonl")
    second.follow(make())
    second.rewind(4)
    for number in range(5, 8):
        second.write(update(number))
    for tracker in second._trackers:
        tracker.close()


def test_tensorboard_has_every_step_once_after_a_rewind(tmp_path):
    continued(tmp_path, lambda: TensorBoard(tmp_path / "tensorboard"))
    found = events(tmp_path / "tensorboard")
    rewards = [(step, value) for tag, step, value in found if tag == "update/reward"]
    assert rewards == [(number, pytest.approx(number / 10)) for number in range(1, 8)]
    assert set(Counter((tag, step) for tag, step, _ in found).values()) == {1}
    assert {tag for tag, *_ in found} == {
        "update/reward",
        "update/seconds/update",
        "update/seconds/elapsed",
    }


class FakeWandB:
    """Keeps what is logged; like the real one it takes steps only in order."""

    def __init__(self):
        self.started, self.rows, self.finished = [], [], 0
        self.module = types.SimpleNamespace(init=self.init)
        self.id = "abc123"

    def init(self, **settings):
        self.started.append(settings)
        return self

    def define_metric(self, name, step_metric=None):
        pass

    def log(self, values, step):
        assert not self.rows or step > self.rows[-1][0]
        self.rows.append((step, values))

    def finish(self):
        self.finished += 1


def test_wandb_continues_its_run_and_sends_no_line_twice(tmp_path, monkeypatch):
    fake = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", fake.module)
    continued(tmp_path, lambda: WandB("project", tmp_path, {"seed": 0}))
    assert [values["updates"] for _, values in fake.rows] == [1, 2, 3, 4, 5, 6, 7]
    assert fake.rows[-1][0] == 6 and fake.rows[-1][1]["update/reward"] == pytest.approx(0.7)
    assert [settings["id"] for settings in fake.started] == [None, "abc123"]
    assert fake.started[0]["project"] == "project" and fake.started[0]["config"] == {"seed": 0}
    assert fake.finished == 2


def test_the_real_wandb_takes_what_we_send(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed: only a stand-in was tested")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    continued(tmp_path, lambda: WandB("project", tmp_path, {"seed": 0}))
    files = list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2 and all(b"update/reward" in file.read_bytes() for file in files)


def test_a_tracker_that_fails_is_dropped_and_said(tmp_path, capsys):
    class Broken:
        def restart(self, records):
            pass

        def write(self, record):
            raise ConnectionError("no network")

        def close(self):
            raise AssertionError("it was dropped")

    journal = Journal(tmp_path / "metrics.jsonl")
    tracker = FailSafeTracker(Broken())
    journal.follow(tracker)
    journal.write(update(1))
    journal.write(update(2))
    tracker.close()
    assert capsys.readouterr().err == "Broken: no network; the run goes on with metrics.jsonl alone\n"
    assert [record["updates"] for record in read_journal(tmp_path / "metrics.jsonl")] == [1, 2]


@pytest.mark.parametrize(
    ("override", "package"), [("tracking.tensorboard=true", "tensorboardX"), ("tracking.wandb=mine", "wandb")]
)
def test_a_missing_package_is_refused_in_one_line(monkeypatch, override, package, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    extra = override.split("=")[0].split(".")[1]
    with pytest.raises(ConfigError) as error:
        check_trackers(configs.load(None, [override]), tmp_path)
    assert str(error.value) == (
        f"tracking.{extra}: the package {package} is not installed; "
        f"pip install 'mugrpo-jax[{extra}]', or leave the key out"
    )
    check_trackers(configs.load(None), tmp_path)


def test_trackers_are_opened_as_the_config_asks(tmp_path):
    assert open_trackers(configs.load(None), tmp_path) == []
    (tracker,) = open_trackers(configs.load(None, ["tracking.tensorboard=true"]), tmp_path)
    tracker.restart([update(1)])
    tracker.close()
    assert ("update/reward", 1, pytest.approx(0.1)) in events(tmp_path / "tensorboard")
