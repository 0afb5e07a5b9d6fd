import json
import os
import time

import pytest

from mugrpo_jax.tasks import Limits, Problem, Verdict, load_task, make_scorer, program_of, read_tests
from mugrpo_jax.tasks.code_answers import same_output, same_value
from mugrpo_jax.tasks.code_reward import code_partial_reward, code_reward
from mugrpo_jax.tasks.sandbox import isolation_mode, launch, run_program
from mugrpo_jax.tasks.scoring import call_reward

needs_isolation = pytest.mark.skipif(isolation_mode() is None, reason="no namespaces on this machine")
LIMITS = Limits(time_s=1.0, memory_mb=128, processes=4, output_kb=64, folder_mb=2)


def fenced(code: str) -> str:
    return f"Here it is:\n```python\n{code}\n```\n"


def problem_of(tests, **limits) -> Problem:
    return Problem("p", "", json.dumps({"tests": tests} | limits))


def run_one(code: str, **test):
    return next(run_program(code, [test or {"stdin": ""}], limits=LIMITS))


def test_the_last_block_of_python_is_the_program():
    assert program_of("```python\na\n```\nbetter:\n```py\nb\n```\n```text\nc\n```") == "b\n"
    assert program_of("```\na\n```") == "a\n" and program_of("```python\ncut off") == "cut off"
    assert program_of("````md\n```python\na\n```\n````") is None
    assert [program_of(text) for text in ("", "print(1)", "```python\n```", "```c\nx\n```")] == [None] * 4


def test_outputs_and_values_are_compared_as_judges_do():
    assert same_output("a  b \n\n", "a b") and same_output("0.50000001", "0.5")
    assert not same_output("a\nb", "a b") and not same_output("1000001", "1000000")
    assert same_value("(1,2)", [1, 2]) and same_value("{1:2.0}", {1: 2}) and same_value("1e999", float("inf"))
    assert not same_value("[1]", [1, 2]) and not same_value("'1'", 1) and not same_value("1 +", 1)
    assert not same_value("[" * 5000, []) and not same_value("1" + "0" * 400, 1.5)


@pytest.mark.parametrize(
    ("answer", "given", "expected"),
    [
        ({"inputs": ["1\n"], "outputs": ["2\n"]}, {"stdin": "1\n"}, "2\n"),
        (
            {"inputs": [[1, 2]], "outputs": [3], "fn_name": "f"},
            {"function": "f", "arguments": [1, 2]},
            3,
        ),
        ([{"input": "1", "output": "2", "testtype": "stdin"}], {"stdin": "1"}, "2"),
        (
            [{"input": "[1]\n2", "output": "true", "testtype": "functional"}],
            {"function": None, "arguments": [[1], 2]},
            True,
        ),
        (["assert set(f(1)) == set((1, 2))"], {"expression": "set(f(1))"}, {1, 2}),
        (
            ["import math\nassert math.isclose(f(1), 0.5)"],
            {"expression": "f(1)", "setup": "import math"},
            0.5,
        ),
        (["assert not f(1)"], {"expression": "bool(f(1))"}, False),
    ],
)
def test_the_forms_of_tests_of_known_datasets(answer, given, expected):
    for text in (json.dumps(answer), str(answer)):  # a list column becomes the text of a Python list
        (test,), limits = read_tests(Problem("p", "", text))
        assert (test.given, test.expected, limits) == (given, expected, Limits())


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("eJx7v3", "neither JSON nor a Python literal"),
        ('["f(1) == 2"]', "not an assert line"),
        ('["assert f(1) == g(2)"]', "the right side is not a plain value"),
        ('[{"input": "1"}]', "needed: input and output"),
        ('{"tests": ["assert f(1)"], "time_s": 0}', "time_s is 0"),
        ("[]", "has no tests"),
    ],
)
def test_tests_that_cannot_be_read_are_an_error_that_names_the_problem(answer, why):
    with pytest.raises(ValueError, match=f"^data.jsonl:7: problem p: .*{why}"):
        read_tests(Problem("p", "", answer, place="data.jsonl:7"))


def test_a_wrong_response_keeps_its_value_and_status_and_is_no_failed_reward():
    score = call_reward(
        lambda text, problem: Verdict(0.25, "wrong_answer", "test 2"), "", Problem("p", "", "")
    )
    assert (score.value, score.status, score.detail, score.failed) == (0.25, "wrong_answer", "test 2", False)


@needs_isolation
def test_every_way_to_fail_has_its_own_status():
    problem = problem_of(["assert f(2) == 4", "assert f(3) == 9"], time_s=1.0, memory_mb=128)
    statuses = {
        "def f(x): return x * x": "ok",
        "def f(x): return 4": "wrong_answer",
        "def f(x": "syntax_error",
        "def f(x): return 1 / 0": "program_error",
        "import os; os.abort()": "program_killed",
        "x = bytearray(2**30)": "memory_limit",
        "while True: print('x' * 999)": "output_limit",
        "open('x', 'wb').write(bytes(2**26))": "file_limit",
        "while True: pass": "time_limit",
    }
    found = {code: code_reward(fenced(code), problem) for code in statuses}
    assert {code: verdict.status for code, verdict in found.items()} == statuses
    assert [verdict.value for verdict in found.values()] == [1.0] + [0.0] * 8
    assert code_reward("def f(x): return x * x", problem).status == "no_code"
    partial = code_partial_reward(fenced("def f(x): return 4"), problem)
    assert (partial.value, partial.status) == (0.5, "wrong_answer")
    assert partial.detail == "test 2 of 2: another output"


@needs_isolation
def test_programs_see_no_network_no_home_no_other_process_and_write_only_in_their_folder(tmp_path):
    (tmp_path / "secret").write_text("secret")
    code = f"""
import ctypes, os, socket, sys
def tried(call, *arguments):
    try: return call(*arguments)
    except OSError as error: return type(error).__name__
print(tried(socket.create_connection, ("127.0.0.1", 9)))
print(tried(open, {str(tmp_path / "secret")!r}), tried(open, "/etc/passwd"))
print([tried(open, p + "/x", "w") for p in ("", "/usr", "/dev", sys.prefix)])
print(tried(os.kill, {os.getpid()}, 9), tried(os.kill, 1, 9), os.getpid() < 10, os.listdir("."))
print(ctypes.CDLL(None).ptrace(16, 1, 0, 0), ctypes.CDLL(None).unshare(0x10000000))
print(open("mine", "w").write("x"))
"""
    first, second = run_program(code, [{"stdin": ""}] * 2, limits=Limits(time_s=20.0))
    lines = first.output.splitlines()
    assert lines[:2] == ["PermissionError", "FileNotFoundError FileNotFoundError"], first
    assert eval(lines[2], {"__builtins__": {}}) and "<" not in lines[2]
    assert lines[3:] == ["ProcessLookupError None True []", "-1 -1", "1"]
    assert second == first  # the folder is empty again


@needs_isolation
def test_processes_that_a_program_leaves_end_with_it():
    forks = "import os, time\nfor _ in range(50):\n    try:\n        if os.fork() == 0: time.sleep(99)\n"
    outcome = run_one(forks + "    except OSError: print('full'); break")
    assert outcome.output == "full\n"
    started = time.monotonic()
    assert run_one("import os, time\nif os.fork() == 0: os.setsid(); time.sleep(99)\nprint(1)").status == "ok"
    assert time.monotonic() - started < 20


@needs_isolation
def test_solutions_of_generated_problems_pass_in_scoring_processes():
    problems = load_task("programs", difficulty=3, train=3, test=0, chat=False).train
    with make_scorer("code", workers=1, deadline_s=30.0, max_failed=0.5) as scorer:
        scores = scorer.score_all([(p.solution, p) for p in problems] + [(fenced("f = 1"), problems[0])])
    assert [score.value for score in scores] == [1.0, 1.0, 1.0, 0.0]
    assert scorer.counts["program_error"] == 1 and scores[-1].detail.startswith("test 1 of 4: TypeError")


def test_without_isolation_programs_are_refused_unless_the_user_allows_it(monkeypatch):
    monkeypatch.setattr(launch, "isolation_mode", lambda: None)
    monkeypatch.setattr(launch, "_problem", lambda mode: "unshare: Operation not permitted")
    with pytest.raises(ValueError, match=r"cannot be isolated.*Operation not permitted.*unsafe_sandbox=true"):
        make_scorer("code", workers=0)
    with make_scorer("code", workers=0, unsafe_sandbox=True) as scorer:
        score = scorer.submit(fenced("def f(x): return x"), problem_of(["assert f(2) == 2"])).result()
    assert (score.value, score.status) == (1.0, "ok")
