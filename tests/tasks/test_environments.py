"""Environments: loaded by name, called in time, and every failure has a status."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mugrpo_jax.tasks import (
    Answer,
    Problem,
    calculator,
    conversation_of,
    load_environment,
    load_reward,
    load_task,
    open_environment,
)
from mugrpo_jax.tasks.environments import InlineEnvironment

STRANGE = "strange_environments:environment"
PROBLEM = Problem("p1", "What?", "42")
ANSWERS = {
    "hello": Answer("2 What? 42"),
    "end": Answer(),
    "raise": Answer(None, "error", "RuntimeError: no idea (strange_environments.py:12)"),
    "number": Answer(None, "invalid", "returned 7; possible: text, or None at the end"),
    "nothing": Answer(None, "invalid", "returned ''; possible: text, or None at the end"),
    "long": Answer("x" * 300_000),
}


def conversation(turn):
    return ({"role": "user", "content": "What?"}, {"role": "assistant", "content": turn})


def test_an_environment_answers_in_this_process_and_in_a_worker_alike():
    turns = [*ANSWERS, "exit", "hello", "sleep", "hello"]
    wanted = list(ANSWERS.values())
    with open_environment(STRANGE, workers=1, deadline_s=1.0) as pool, InlineEnvironment(STRANGE) as inline:
        found = [future.result() for future in [pool.ask(conversation(turn), PROBLEM) for turn in turns]]
        assert [inline.ask(conversation(turn), PROBLEM).result() for turn in ANSWERS] == wanted
    assert found[: len(ANSWERS)] == wanted
    crash, after, timeout, last = found[len(ANSWERS) :]
    assert (crash.status, crash.detail) == ("crash", "the worker died with code 3")
    assert (timeout.status, timeout.detail) == ("timeout", "no reply within 1 s")
    assert after == last == ANSWERS["hello"]


def test_options_are_keyword_arguments():
    assert load_environment(STRANGE, {"polite": True})(
        [{"role": "user", "content": "Hi"}], PROBLEM
    ).startswith("please: ")


@pytest.mark.parametrize(
    "name, options, reason",
    [
        ("calculater", {}, "environment is 'calculater'; did you mean calculator"),
        ("strange_environments:envronment", {}, "has no 'envronment'; did you mean environment"),
        ("no_such_module:f", {}, "cannot import 'no_such_module'"),
        (
            "strange_environments:NOT_A_FUNCTION",
            {},
            r"is a int; possible: a function \(conversation, problem\)",
        ),
        ("strange_environments:one_argument", {}, "too many positional arguments; possible: a function"),
        (STRANGE, {"polit": True}, "unexpected keyword argument 'polit'; possible: a function"),
        ("calculator", {"digits": 3}, "unexpected keyword argument 'digits'"),
    ],
)
def test_a_wrong_name_or_option_is_one_clear_line(name, options, reason):
    with pytest.raises(ValueError, match=reason) as error:
        load_environment(name, options)
    assert "\n" not in str(error.value)


def test_the_calculator_answers_calls_and_ends_the_rest():
    def answer(turn, **options):
        return calculator([{"role": "assistant", "content": turn}], PROBLEM, **options)

    assert answer("so 12*(3+4) =") == "84" and answer(",89-117=") == "-28" and answer("1/3=") == "1/3"
    assert answer(";42") is answer("x=") is answer("=") is answer("1+=") is answer("1/0=") is None
    assert answer("1/0=", error="no") == "no" and answer("9" * 300 + "=", error="no") == "no"


def test_worked_solutions_of_tool_sums_are_what_the_calculator_says():
    task = load_task("tool_sums", difficulty=4, guesses=0.5, train=64, test=8)
    called = [problem for problem in task.train if len(problem.turns) > 1]
    assert 16 < len(called) < 48
    for problem in called:
        *parts, final = problem.turns
        assert final == f";{problem.answer}" and len(parts) == 6
        for turn, message in zip(parts[::2], parts[1::2]):
            assert calculator([{"role": "assistant", "content": turn}], problem) == message
    assert all(problem.solution == "".join(problem.turns) for problem in task.train)
    with pytest.raises(ValueError, match="tool_sums: guesses is 2; possible: a number from 0 to 1"):
        load_task("tool_sums", guesses=2)


def test_the_environment_of_the_guide_plays_its_game(tmp_path, monkeypatch):
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "environment.md").read_text()
    (tmp_path / "guess.py").write_text(re.search(r"^```python\n(.*?)^```", guide, re.M | re.S)[1])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    written = subprocess.run([sys.executable, "guess.py"], capture_output=True, text=True, check=True).stdout
    (tmp_path / "numbers.jsonl").write_text(written)
    task = load_task("dataset", train="numbers.jsonl")
    problem = task.train[41]
    assert len(task.train) == 100 and problem.answer == "42"
    ask, reward = load_environment("guess:guess_number", {"most": 100}), load_reward("guess:few_guesses")
    said = []
    for guess in ("I guess.", "50", "40", "It is 42"):
        said.append(guess)
        message = ask(conversation_of(problem.prompt, said), problem)
        said += [] if message is None else [message]
    assert said[1::2] == ["Guess a number from 1 to 100.", "It is lower.", "It is higher."]
    whole = dataclasses.replace(problem, conversation=conversation_of(problem.prompt, said))
    assert reward(said[-1], whole) == 0.25 and reward("41", whole) == 0.0
    assert json.loads(written.splitlines()[0])["answer"] == "1"
    del sys.modules["guess"]
