"""What a new user calls first: `init`, `config`, and a shipped config by its name, in an empty folder."""

import argparse
import json
from pathlib import Path

import pytest
import yaml

from mugrpo_jax import config as configs
from mugrpo_jax import objectives
from mugrpo_jax.cli import arguments as shared
from mugrpo_jax.cli.main import main
from mugrpo_jax.loop import preflight


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Runs a command in an empty folder; returns its exit status, its output and its errors."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        status = main(arguments)
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return run


def test_config_prints_every_key_with_its_default_and_meaning(call):
    status, shown, _ = call("config")
    assert status == 0 and yaml.safe_load(shown) == configs.to_dict(configs.RunConfig())
    assert "\n  # integer: generations in the run; at least 1\n  stages: 4\n" in shown
    assert all(len(line) <= 100 for line in shown.splitlines())


def test_config_prints_one_section_or_one_key(call):
    status, shown, _ = call("config", "batch")
    assert status == 0 and yaml.safe_load(shown) == {"batch": configs.to_dict(configs.BatchSection())}
    assert yaml.safe_load(call("config", "model.tiny.num_heads")[1]) == {"model": {"tiny": {"num_heads": 4}}}
    shown = call("config", "objective")[1]
    assert yaml.safe_load(shown) == {"objective": {"name": "mu_grpo", "knobs": {}, "temperature": None}}
    assert all(f"#   {name}: " in shown for name in objectives.OBJECTIVES)
    assert "veto_ratio: 0.0001" in shown
    for wrong, message in (
        ("batches", "unknown key batches; did you mean batch?"),
        ("batch.stage", "unknown key batch.stage; did you mean batch.stages?"),
        ("seed.x", "unknown key seed.x; seed has no keys of its own"),
        ("zzz", "unknown key zzz; known: seed, model, "),
    ):
        status, _, error = call("config", wrong)
        assert status == 2 and error.startswith(f"mugrpo: {message}") and error.count("\n") == 1


@pytest.mark.parametrize("task", ["arithmetic", "chains"])
def test_what_init_writes_for_the_tiny_model_can_train(call, task):
    status, shown, _ = call("init", "mine.yaml", "--task", task)
    assert status == 0 and "mugrpo train mine.yaml --dry-run" in shown
    config = configs.load("mine.yaml")
    assert (config.model.source, config.task.name) == ("tiny", task)
    lines: list[str] = []
    preflight.dry_run(config, Path("runs/mine"), say=lines.append)
    assert "held out; the first: '" in lines[0]
    text = Path("mine.yaml").read_text()
    assert text.startswith(f"# A starting config for tiny on {task}, written by `mugrpo init`.\n")
    assert "  # integer: generations in the run; at least 1\n  stages: 4\n" in text


def test_init_takes_a_model_and_a_task_or_a_file(call):
    assert call("init", "a.yaml", "--model", "Qwen/Qwen2.5-1.5B", "--task", "gsm8k")[0] == 0
    config = configs.load("a.yaml")
    assert (config.model.source, config.task.name) == ("Qwen/Qwen2.5-1.5B", "gsm8k")
    Path("my data.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n')
    assert call("init", "b.yaml", "--model", "models/mine", "--task", "my data.jsonl")[0] == 0
    config = configs.load("b.yaml")
    assert config.task.name == "dataset" and config.task.options["train"] == "my data.jsonl"
    task, _ = preflight._local_task(config)
    assert [problem.prompt for problem in task.train] == ["1+1="]
    assert call("init", "c.yaml", "--task", "my data.jsonl")[0] == 0
    config = configs.load("c.yaml")
    assert (config.model.source, config.task.options["train"]) == ("tiny", "my data.jsonl")
    assert config.warm_start.updates == 0  # the file has no worked solutions
    Path("solved.jsonl").write_text('{"question": "1+1=", "answer": "2", "solution": "2"}\n')
    assert call("init", "d.yaml", "--task", "solved.jsonl")[0] == 0
    config = configs.load("d.yaml")
    assert config.warm_start.updates == 600 and config.task.options["columns"]["solution"] == "solution"
    Path("named.jsonl").write_text('{"prompt": "1+1=", "target": "2"}\n')
    assert call("init", "e.yaml", "--task", "named.jsonl")[0] == 0
    columns = configs.load("e.yaml").task.options["columns"]
    assert columns == {"template": "{prompt}", "answer": "target"}
    Path("many.jsonl").write_text(
        "".join(f'{{"question": "{i}+1=", "answer": "{i + 1}"}}\n' for i in range(30))
    )
    assert call("init", "f.yaml", "--task", "many.jsonl")[0] == 0
    lines: list[str] = []
    preflight.dry_run(configs.load("f.yaml"), Path("runs/new"), say=lines.append)
    assert (
        lines[0].startswith("data        27 problems to train on") and ", 3 held out; the first: " in lines[0]
    )
    for number, row in enumerate(
        (
            {"prompt": [{"role": "user"}], "query": "1+1=", "answer": 2},  # a list is not a text
            {"problem": "", "input": "1+1=", "output": "2"},
        )
    ):
        Path(f"odd{number}.jsonl").write_text(json.dumps(row) + "\n")
        assert call("init", f"odd{number}.yaml", "--task", f"odd{number}.jsonl")[0] == 0
    for name in ("c.yaml", "d.yaml", "e.yaml", "odd0.yaml", "odd1.yaml"):
        preflight.dry_run(configs.load(name), Path("runs/new"))
    alpaca = {"instruction": "Add.", "input": "1+1=", "output": "2"}
    Path("alpaca.jsonl").write_text(json.dumps(alpaca) + "\n")
    assert call("init", "alpaca.yaml", "--task", "alpaca.jsonl")[0] == 0
    with pytest.raises(ValueError, match=r"alpaca.jsonl:1: column 'question', named by template, is not"):
        preflight.dry_run(configs.load("alpaca.yaml"), Path("runs/new"))


def test_init_never_overwrites_and_writes_nothing_on_an_error(call):
    Path("mine.yaml").write_text("seed: 1\n")
    Path("bad.jsonl").write_text("1+1=2\n")
    for arguments, message in (
        (["mine.yaml"], "mine.yaml: exists already and is not overwritten; name another file"),
        (["a.yaml", "--task", "gsm8k"], "--task gsm8k: the tiny model reads only digits and + - = , ;"),
        (["a.yaml", "--model", "x/y", "--task", "gsm9k"], "--task gsm9k: unknown; possible: arithmetic,"),
        (["a.yaml", "--model", "x/y", "--task", "math500"], "--task math500: unknown; possible: arithmetic,"),
        (["a.yaml", "--model", "x/y", "--task", "no.jsonl"], "--task no.jsonl: no such file"),
        (["a.yaml", "--task", "bad.jsonl"], "bad.jsonl:1: not JSON: "),
        (["a.yaml", "--model", ""], "a.yaml: model.source must not be empty"),
        (["no/a.yaml"], "no/a.yaml: the folder no does not exist; make it first"),
    ):
        status, _, error = call("init", *arguments)
        assert status == 2 and error.startswith(f"mugrpo: {message}") and error.count("\n") == 1
    assert Path("mine.yaml").read_text() == "seed: 1\n"
    assert {path.name for path in Path().iterdir()} == {"bad.jsonl", "mine.yaml"}


def test_a_shipped_config_starts_a_run_in_a_folder_of_its_name(call):
    status, shown, _ = call("train", "quickstart", "--dry-run")
    assert status == 0 and "1 stage × 256 updates = 256 updates" in shown
    assert "32,768 problems to train on, 256 held out" in shown
    assert shown.endswith(
        "\nchecked     everything; nothing was written\nstart       mugrpo train quickstart\n"
    )
    assert list(Path().iterdir()) == []
    for name, folder in (
        ("quickstart", "quickstart"),
        ("paper/qwen3_1.7b_base_m2po", "qwen3_1.7b_base_m2po"),
        ("some/mine.yaml", "mine"),
    ):
        arguments = argparse.Namespace(out=None, config=name)
        assert shared.run_folder(arguments) == Path("runs") / folder
    status, _, error = call("train", "quickstrat")
    assert status == 2 and "did you mean quickstart? configs known by name: quickstart, " in error
