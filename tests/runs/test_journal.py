"""The journal after a kill, and the records that a run finds in it."""

import json

from mugrpo_jax.runs.journal import Journal, read_journal

RECORDS = [
    {"kind": "evaluation", "updates": 0, "accuracy": 0.25},
    {"kind": "stage", "updates": 0, "stage": 0},
    {"kind": "update", "updates": 1, "reward": 0.5},
    {"kind": "update", "updates": 2, "reward": 0.75},
    {"kind": "evaluation", "updates": 2, "accuracy": 0.5},
]


def without_times(records):
    return [{name: value for name, value in record.items() if name != "seconds"} for record in records]


def test_a_killed_run_finds_its_stages_and_evaluations_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = Journal(path)
    for record in RECORDS:
        first.write(record)
    with path.open("a") as file:
        file.write(json.dumps(RECORDS[0])[:10])  # a kill cuts a line off
    second = Journal(path)
    assert without_times(read_journal(path)) == RECORDS
    assert second.find("evaluation", 2)["accuracy"] == 0.5 and second.find("stage", 0)["stage"] == 0
    assert second.find("stage", 2) is None and second.find("update", 1) is None
    second.rewind(1)
    assert second.find("evaluation", 2) is None and second.find("evaluation", 0)["accuracy"] == 0.25
    second.write(RECORDS[3])
    assert without_times(map(json.loads, path.read_text().splitlines())) == RECORDS[:4]


def test_lost_and_changed_records_are_named_and_not_forgotten(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    first = Journal(path)
    for record in RECORDS[:4]:
        first.write(record)
    known = first.position()  # a checkpoint after two updates
    first.write(RECORDS[4])
    whole = path.read_text()
    lines = whole.splitlines(keepends=True)
    damaged = {
        "": "4 of the 4 records up to update 2 are missing, among them 2 updates from 1 to 2",
        "".join(lines[:2]): "2 of the 4 records up to update 2 are missing, among them 2 updates",
        "".join([*lines[:2], "?" + lines[2], *lines[3:]]): "among them update 1",
        whole.replace("0.75", "0.79"): "some of the 4 records up to update 2 are missing or changed",
        "5\n{}\n" + whole: None,
        whole: None,
    }
    for text, loss in damaged.items():
        path.write_text(text)
        second = Journal(path)
        second.rewind(2, known)
        said = capsys.readouterr().out
        assert (said == "") if loss is None else (f"{path}: " in said and loss in said)
        third = Journal(path)
        third.rewind(2, second.position())  # the next checkpoint remembers the loss and does not repeat it
        assert capsys.readouterr().out == "" and third.losses == second.losses
        assert bool(second.losses) == (loss is not None)


def test_elapsed_times_add_up_to_what_the_journal_saw(tmp_path):
    journal = Journal(tmp_path / "metrics.jsonl")
    for number in range(3):
        journal.write({"kind": "update", "updates": number, "seconds": {"update": 0.5}})
    found = [record["seconds"] for record in read_journal(journal.path)]
    assert all(0 <= seconds["elapsed"] < 5 and seconds["update"] == 0.5 for seconds in found)
