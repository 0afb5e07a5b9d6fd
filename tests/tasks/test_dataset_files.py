import json
import math
import sys
import types
from pathlib import Path

import pytest

from mugrpo_jax.tasks import (
    PRESETS,
    Columns,
    Problem,
    load_problems,
    load_reward,
    load_task,
    make_scorer,
)

ROWS = [
    {"question": "1 + 1?", "answer": "so 1+1=<<1+1=2>>2\n#### 2", "key": "a", "score": 2.0},
    {"question": "Is {x} é?", "answer": "#### 1,000", "key": "b", "score": 7.5},
]
USER = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Q: {question} \\boxed{{}}"})


def write(path, *lines):
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.fixture
def jsonl(tmp_path):
    return write(tmp_path / "rows.jsonl", *ROWS, "\n")


def test_columns_become_problems(jsonl):
    columns = Columns(USER, answer_part="hashes", solution="answer", id="key")
    first, second = load_problems(jsonl, columns)
    prompt = (USER[0], {"role": "user", "content": "Q: 1 + 1? \\boxed{}"})
    assert first == Problem("a", prompt, "2", "so 1+1=2\n#### 2")
    assert second.prompt[1]["content"] == "Q: Is {x} é? \\boxed{}" and second.answer == "1,000"


def test_a_plain_template_numbers_and_whole_answers(jsonl):
    problems = load_problems(jsonl, Columns("{question} =", answer="score"))
    assert [(p.id, p.prompt, p.answer) for p in problems] == [
        ("0", "1 + 1? =", "2"),
        ("1", "Is {x} é? =", "7.5"),
    ]


def test_a_reward_gets_the_extra_columns_as_they_are(tmp_path):
    rows = [{"question": "a", "answer": {"x": ["é", 1]}, "n": 2.0, "tests": [["1"], None]}]
    path = write(tmp_path / "extra.jsonl", *rows)
    columns = {"extra": ["n", "tests"], "template": "{question} {answer}"}
    task = load_task("dataset", train=path, columns=columns)
    (problem,) = task.train
    assert problem.extra == {"n": 2.0, "tests": [["1"], None]}
    assert problem.answer == '{"x": ["é", 1]}' and problem.prompt == f"a {problem.answer}"
    (tmp_path / "own.py").write_text("def n(text, problem):\n    return problem.extra['n']\n")
    with make_scorer(f"{tmp_path / 'own.py'}:n", workers=1) as scorer:
        assert scorer.submit("", problem).result().value == 2.0
    without = load_task("dataset", train=path, columns={"template": "{question} {answer}"})
    write(tmp_path / "extra.jsonl", rows[0] | {"n": 3.0})
    changed = load_task("dataset", train=path, columns=columns)
    assert changed.sources != task.sources  # the reward may depend on it
    again = load_task("dataset", train=path, columns={"template": "{question} {answer}"})
    assert again.sources == without.sources


def test_parquet_and_the_hub_give_what_jsonl_gives(jsonl, tmp_path, monkeypatch):
    pyarrow, reader = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet = str(tmp_path / "rows.parquet")
    reader.write_table(pyarrow.Table.from_pylist(ROWS), parquet)
    columns = Columns(answer_part="hashes", solution="answer", id="key")
    expected = load_problems(jsonl, columns)
    assert load_problems(parquet, columns) == expected

    calls = []
    hub = types.SimpleNamespace(load_dataset=lambda *a, **k: (calls.append((a, k)), ROWS)[1])
    monkeypatch.setitem(sys.modules, "datasets", hub)
    assert load_problems("hub:owner/name/main:train", columns) == expected
    assert load_problems("hub:owner/name:test", columns) == expected
    assert calls == [(("owner/name", "main"), {"split": "train"}), (("owner/name", None), {"split": "test"})]


def test_a_task_of_files_with_settings_as_yaml_gives_them(jsonl):
    settings = {"template": [dict(message) for message in USER], "answer_part": "hashes"}
    task = load_task("dataset", train=jsonl, columns=settings, reward="exact")
    assert task.train == load_problems(jsonl, Columns(USER, answer_part="hashes"))
    assert task.test == [] and task.reward == "exact"


@pytest.mark.parametrize("name", PRESETS)
def test_presets_read_rows_of_their_own_columns(name, tmp_path):
    row = {
        "question": "What?",
        "problem": "What?",
        "solution": "Two, so \\boxed{2}.",
        "answer": "Two.\n#### 2",
    }
    if name != "gsm8k":
        row["answer"] = "2"
    write(tmp_path / "test.jsonl", row, row)
    task = load_task(name, folder=str(tmp_path))
    assert len(task.test) == 2 and len(task.train) == 0
    assert task.test[0].answer == "2" and task.test[0].prompt[0]["content"].startswith("What?\n")
    if task.test[0].solution:
        assert load_reward(task.reward)(task.test[0].solution, task.test[0]) == 1.0
    assert (PRESETS[name].train or PRESETS[name].test).startswith("hub:")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"answer": "gold"},
            "{path}:1: column 'gold', named by answer, is not there; possible: question, answer",
        ),
        (
            {"template": "{prompt}"},
            "{path}:1: column 'prompt', named by template, is not there; possible: quest",
        ),
        (
            {"template": "{question.upper}"},
            "{path}:1: column 'question.upper', named by template, is not there",
        ),
        ({"solution": "work"}, "{path}:1: column 'work', named by solution, is not there"),
        ({"answer_part": "boxed"}, "{path}:1: column 'answer' has no answer (answer_part is 'boxed')"),
        ({"id": "same"}, "{path}:2: id '1' is there twice; ids must be unique"),
        ({"answer": "empty"}, "{path}:2: column 'empty', named by answer, is empty"),
        ({"answer": "nan"}, "{path}:2: column 'nan', named by answer, is empty"),
        (
            {"template": "{question"},
            "columns: template '{{question': expected '}}' before end of string; a b",
        ),
        (
            {"template": [{"role": "user"}]},
            "columns: template has a message {{'role': 'user'}}; possible keys: role",
        ),
        ({"answer_part": "last"}, "columns: answer_part is 'last'; possible: whole, hashes, boxed"),
        ({"tempalte": "x"}, "columns: no key 'tempalte'; did you mean template? possible: template, answer"),
        (
            {"template": {"question": None}},
            "columns: template is {{'question': None}}; possible: in quotes, '{{question}}' (in a shell",
        ),
    ],
)
def test_bad_columns_are_one_clear_line(columns, message, tmp_path):
    rows = [row | {"same": 1, "empty": empty} for row, empty in zip(ROWS, ("x", None))]
    rows = [row | {"nan": number} for row, number in zip(rows, (1, math.nan))]
    path = write(tmp_path / "rows.jsonl", *rows)
    with pytest.raises(ValueError) as error:
        load_task("dataset", train=path, columns=columns)
    assert str(error.value).startswith(message.format(path=path)) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "{path}: no problems in it"),
        (b"\n\n", "{path}: no problems in it"),
        (b'{"question": "a", "answer": "1"}\n{"question": \n', "{path}:2: not JSON: Expecting value"),
        (b'["question", "answer"]\n', "{path}:1: a list; possible: one JSON object a line"),
        (b"\xff\xfe\n", "{path}:1: not UTF-8 text"),
        (b'{"question": "a", "answer": "1"}\r\n\n{"question": "caf\xe9"}', "{path}:3: not UTF-8 text"),
        (b'[\n{"question": "a", "answer": "1"}]', "{path}:1: not JSON: Expecting value, column 2"),
        (b'{"question": ' + b"[" * 100_000 + b"}", "{path}:1: not JSON: maximum recursion depth"),
        (b'{"question": "a", "answer": ' + b"1" * 5000 + b"}", "{path}:1: not JSON: Exceeds the limit"),
    ],
)
def test_bad_files_are_one_clear_line(content, message, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError) as error:
        load_problems(str(path), Columns())
    assert str(error.value).startswith(message.format(path=path)) and "\n" not in str(error.value)


def test_bad_sources_and_missing_packages_are_one_clear_line(tmp_path, monkeypatch):
    broken = tmp_path / "rows.parquet"
    broken.write_bytes(b"not parquet")
    monkeypatch.setitem(sys.modules, "datasets", None)

    def refuse(*args, **kwargs):
        raise ConnectionError("no\nroute")

    cases = {
        "rows.csv": "rows.csv: problems cannot be read from it; possible: a .jsonl or .parquet file or hub:",
        "rows.jsonl": f"rows.jsonl: no such file in this folder, {Path.cwd()}",
        "/no/rows.jsonl": "/no/rows.jsonl: no such file",
        "hub:name": "hub:name: not a dataset of the Hub; possible: hub:owner/name:split",
        "hub:owner/name:test": "hub:owner/name:test: the Hub needs datasets: pip install 'mugrpo-jax[hub]'",
    }
    for source, message in cases.items():
        with pytest.raises(ValueError) as error:
            load_problems(source, Columns())
        assert str(error.value).startswith(message)
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=refuse))
    with pytest.raises(ValueError, match=r"^hub:owner/name:test: cannot be loaded: no route$"):
        load_problems("hub:owner/name:test", Columns())
    with pytest.raises(ValueError, match=r"neither train nor test is given"):
        load_task("dataset")
    with pytest.raises(ValueError, match=r"no train or test in it"):
        load_task("gsm8k", folder=str(tmp_path / "nowhere"))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"needs pyarrow: pip install 'mugrpo-jax\[parquet\]'"):
        load_problems(str(broken), Columns())


def test_a_broken_parquet_file_is_one_clear_line(tmp_path):
    pytest.importorskip("pyarrow")
    broken = tmp_path / "rows.parquet"
    broken.write_bytes(b"not parquet")
    with pytest.raises(ValueError, match=r"not a Parquet file") as error:
        load_problems(str(broken), Columns())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train": 5}, "dataset: train is 5; possible: text, null"),
        ({"train": "FILE", "name": []}, "dataset: name is []; possible: text"),
        ({"train": "FILE", "columns": "x"}, "dataset: columns is 'x'; possible: keys and values, null"),
        ({"train": "FILE", "columns": {"template": 5}}, "columns: template is 5; possible: text, or a list"),
        ({"train": "FILE", "columns": {"template": [5]}}, "columns: template has a message 5; possible keys"),
        (
            {"train": "FILE", "columns": {"template": [{"role": "user", "content": 5}]}},
            "columns: template has a message {'role': 'user', 'content': 5}; role and content must be text",
        ),
        ({"train": "FILE", "columns": {"template": []}}, "columns: template () has no column in braces; all"),
        ({"train": "FILE", "columns": {"answer_part": []}}, "columns: answer_part is []; possible: whole"),
        ({"train": "FILE", "columns": {"answer": [1]}}, "columns: answer is [1]; possible: the name of"),
        (
            {"train": "FILE", "columns": {"extra": "n"}},
            "columns: extra is 'n'; possible: a list of column names",
        ),
        (
            {"train": "FILE", "columns": {"extra": ["n"]}},
            "FILE:1: column 'n', named by extra, is not there; pos",
        ),
        ({"train": "FILE", "test": "FILE"}, "FILE: has the same problems as FILE; held-out problems must"),
        ({"train": "HALF"}, "HALF:1: problem 0: not valid Unicode"),
    ],
)
def test_bad_options_of_a_dataset_are_one_clear_line(options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"FILE": "rows.jsonl", "HALF": "half.jsonl"}
    (tmp_path / "rows.jsonl").write_text('{"question": "a", "answer": "1"}\n')
    (tmp_path / "half.jsonl").write_text('{"question": "\\ud83d", "answer": "1"}\n')
    options = {key: names.get(str(value), value) for key, value in options.items()}
    for name, file in names.items():
        message = message.replace(name, file)
    with pytest.raises(ValueError) as error:
        load_task("dataset", **options)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_problems_are_held_out_by_their_prompts(tmp_path):
    def split(*numbers, holdout=5):
        rows = [{"question": f"{number}+1=", "answer": str(number + 1)} for number in numbers]
        path = write(tmp_path / "rows.jsonl", *rows)
        task = load_task("dataset", train=path, holdout=holdout)
        parts = [[problem.prompt for problem in part] for part in (task.train, task.test)]
        assert len(parts[0]) + len(parts[1]) == len(rows) and not set(parts[0]) & set(parts[1])
        return parts

    train, test = split(*range(40))
    assert len(test) == 5
    again = split(*reversed(range(40)))
    assert [sorted(again[0]), again[1]] == [sorted(train), test]  # also the first ones of them
    held = int(test[0].partition("+")[0])
    assert split(*range(40), held)[1].count(test[0]) == 2  # equal prompts stay together
    for holdout, reason in (
        (4, "has 4 problems, holdout is 4; none"),
        (3, "too many equal prompts for holdout=3"),
    ):
        with pytest.raises(ValueError, match=reason):
            split(1, 1, 1, 1, holdout=holdout)
    path = str(tmp_path / "rows.jsonl")
    with pytest.raises(
        ValueError, match=f"holdout takes test problems out of train, but test is {path}; set"
    ):
        load_task("dataset", train=path, test=path, holdout=1)
    with pytest.raises(ValueError, match="but there is no train; set holdout=0"):
        load_task("dataset", test=path, holdout=1)


def test_a_problem_knows_its_line_and_a_task_the_hash_of_its_files(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"question": "a", "answer": "1"}\n\n{"question": "b", "answer": "2"}\n')
    task = load_task("dataset", train=str(path), name="mine")
    assert (task.name, str(task.train[1])) == ("mine", f"{path}:3: problem 1")
    assert task.train[1] == Problem("1", "b", "2")
    path.write_text('{"question": "a", "answer": "1"}\n{"question": "b", "answer": "3"}\n')
    again = load_task("dataset", train=str(path))
    assert list(task.sources) == list(again.sources) == [str(path)] and task.sources != again.sources
