"""The last lines that a run prints."""

import json

import pytest

from mugrpo_jax import config as configs
from mugrpo_jax.loop.ending import ending


@pytest.fixture
def run(tmp_path):
    """A function that writes a journal, with so many skipped updates, and returns the lines about it."""

    def lines(skipped, *overrides, name="mine", more=()):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True, exist_ok=True)
        updates = [{"kind": "update", "updates": i, "skipped": min(i, skipped)} for i in (1, 2, 3)]
        text = "".join(json.dumps(record) + "\n" for record in [*updates, *more])
        (folder / "metrics.jsonl").write_text(text)
        text = ending(configs.load(None, list(overrides)), folder)
        return dict(line.split(maxsplit=1) for line in text.splitlines())

    return lines


def test_skipped_updates_are_told(run):
    assert "skipped" not in run(0)
    assert run(2)["skipped"] == "2 of the updates changed nothing, because their gradient was not finite"


def test_a_better_checkpoint_than_the_last_is_told(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    evaluations = [(0, 0.2), (100, 0.5364), (200, 0.5364), (250, 0.6), (300, 0.461)]
    records = [
        {"kind": "evaluation", "updates": i, "accuracy": accuracy, "standard_error": 0.02}
        for i, accuracy in evaluations
    ]
    assert "best" not in run(0, more=records)  # no checkpoint is kept
    for name in ("000100", "000200", "000300"):
        (tmp_path / "runs" / "mine" / "checkpoints" / name).mkdir(parents=True)
    folder = tmp_path / "runs" / "mine"
    export = f"mugrpo export {folder} models/mine --step 200"
    assert run(0, more=records)["best"] == f"after 200 updates, accuracy 0.536: {export}"
    assert "best" not in run(0, more=records[:2])


def test_the_next_command_never_names_the_folder_of_the_model_that_was_trained(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(0)["next"].endswith("runs/mine models/mine")
    assert run(0, "model.source=models/mine")["next"].endswith("runs/mine models/mine-trained")
