import collections
import json
import os
import platform
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from mugrpo_jax.tasks import Limits, Problem, Verdict, load_task, make_scorer, program_of, read_tests
from mugrpo_jax.tasks.code_answers import same_output, same_value
from mugrpo_jax.tasks.code_reward import code_partial_reward, code_reward
from mugrpo_jax.tasks.sandbox import Outcome, SandboxError, isolation_mode, launch, run_program, seccomp
from mugrpo_jax.tasks.sandbox.child import literal
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
    assert program_of("```python\na\n```\nIt prints:\n```\n1\n```") == "a\n"  # a named block comes first
    inner = "s = '''\n```\n'''\n"
    assert program_of(f"````python\n{inner}````") == inner  # only a fence as long as the first one ends it
    assert program_of("```python\na\n```text\nb\n```") == "a\n```text\nb\n"  # one with a word ends nothing
    assert [program_of(text) for text in ("", "print(1)", "```python\n```", "```c\nx\n```")] == [None] * 4


def test_outputs_and_values_are_compared_as_judges_do():
    assert same_output("a  b \n\n", "a b") and same_output("0.50000001", "0.5")
    assert not same_output("a\nb", "a b") and not same_output("1000001", "1000000")
    for more, right in (("1 2", "1"), ("1\n2", "1"), ("1", "1 2"), ("1", "1\n2"), ("1\n2\n3", "1\n3")):
        assert not same_output(more, right)  # several guesses are no answer
    assert not same_output("0.5x", "0.5") and not same_output("0.51", "0.5") and not same_output("0.0", "0")
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
        (["assert f(1)"], {"expression": "bool(f(1))"}, True),
        (["assert f(1) is None"], {"expression": "f(1)"}, None),
        ({"inputs": [["a", "b"]], "outputs": [["c", 1]]}, {"stdin": "a\nb"}, "c\n1"),
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
        ('{"tests": ["assert f(1)"], "memory_mb": true}', "memory_mb is True"),
        ('{"inputs": ["1", "2"], "outputs": ["1"]}', "2 inputs and 1 outputs"),
        ('{"inputs": null, "outputs": ["1"]}', "inputs is None; possible: a list"),
        ('[{"input": 5, "output": "3", "testtype": "functional"}]', "the input of a functional test is 5"),
        ('{"tests": ["assert f(1)"], "memory_mb": 100.5}', "memory_mb is 100.5; possible: a whole number"),
        ('{"inputs": [1], "outputs": [1], "fn_name": "f"}', "the input of function f is 1; possible: a list"),
        ('[{"input": "1", "output": "2", "testtype": "file"}]', "testtype is 'file'; possible: stdin"),
        ('["x = 1\\nassert f(x) == 1"]', "not an assert line"),
        ('["assert f(1) != 2"]', "possible: assert CALL == VALUE"),
        ('["assert math.isclose(f(1), [2])"]', "isclose compares numbers"),
    ],
)
def test_tests_that_cannot_be_read_are_an_error_that_names_the_problem(answer, why):
    with pytest.raises(ValueError, match=f"^data.jsonl:7: problem p: .*{why}"):
        read_tests(Problem("p", "", answer, place="data.jsonl:7"))


def test_limits_and_the_name_of_the_function_come_with_the_tests():
    listed = [{"input": "[1]", "output": "2", "testtype": "functional"}]
    (test,), limits = read_tests(problem_of(listed, fn_name="g", time_s=4, processes=2))
    assert test.given == {"function": "g", "arguments": [[1]]}
    assert limits == Limits(time_s=4, processes=2)


def test_a_value_of_apps_may_stand_in_a_list_and_keys_of_json_are_numbers_again():
    answer = {"fn_name": "f", "inputs": [[{"1": 2}], [1]], "outputs": [[{"3": 4}], [[5]]]}
    first, second = read_tests(Problem("p", "", json.dumps(answer)))[0]
    assert first.given["arguments"] == [{1: 2}] and first.passed(Outcome("ok", "{3:4}", ""))
    assert all(second.passed(Outcome("ok", text, "")) for text in ("[5]", "[[5]]"))
    assert not second.passed(Outcome("ok", "5", "")) and not second.passed(Outcome("ok", "[[[5]]]", ""))
    kept = read_tests(problem_of([{"input": "1", "output": "[5]", "testtype": "functional"}]))[0][0]
    assert not kept.passed(Outcome("ok", "5", ""))  # LiveCodeBench has no such lists


def test_a_test_with_isclose_has_its_own_tolerance():
    """MBPP rounds the right values of such tests: 1570.75 is not within a millionth of 500 π."""
    lines = ["import math\nassert math.isclose(f(1), 1570.75, rel_tol=0.001)", "assert f(1) == 1570.75"]
    loose, strict = read_tests(Problem("p", "", json.dumps(lines)))[0]
    outcome = Outcome("ok", "1570.7963267948967", "")
    assert loose.given["expression"] == "f(1)" and loose.passed(outcome) and not strict.passed(outcome)
    assert not loose.passed(Outcome("ok", "1573.0", "")) and not loose.passed(Outcome("ok", "'1570.75'", ""))
    assert not loose.passed(Outcome("memory_limit", "1570.75", ""))  # the value came before the end


def test_a_value_is_written_so_that_it_can_be_compared():
    text = {"é": ["\n", b"x"], 1: (None, True, -0.5, 2j), "s": {1, 2}}
    assert same_value(literal(text), text) and not same_value(literal(text), {"é": text["é"]})
    for value, expected in (
        *((float("inf"), float("inf")), (-float("inf"), -float("inf")), ((1,), [1]), ((), [])),
        *((set(), set()), (frozenset((1,)), {1}), (collections.deque((1, 2)), [1, 2]), ({}.keys(), [])),
        *(
            (np.float32(0.5), 0.5),
            (np.int64(3), 3),
            (np.arange(3), [0, 1, 2]),
            (collections.Counter("a"), {"a": 1}),
        ),
    ):
        assert same_value(literal(value), expected), value
    assert not same_value(literal(float("nan")), 0.0) and not same_value(literal({1: 2}), {1: 3})
    assert not same_value(literal(object()), 1) and not same_value(literal({1}), {1, 2})


def test_a_wrong_response_keeps_its_value_and_status_and_is_no_failed_reward():
    score = call_reward(
        lambda text, problem: Verdict(0.25, "wrong_answer", "test 2"), "", Problem("p", "", "")
    )
    assert (score.value, score.status, score.detail, score.failed) == (0.25, "wrong_answer", "test 2", False)


def test_programs_are_isolated_where_the_system_allows_it():
    """Otherwise a mistake in the sandbox would only skip the tests below."""
    probe = "import ctypes, os; unshare, user = ctypes.CDLL(None).unshare, 10**9; "
    probe += (
        "raise SystemExit(unshare(0x6C020000) and (os.setresuid(user, user, user) or unshare(0x7C020000)))"
    )
    if os.geteuid() or subprocess.run([sys.executable, "-I", "-S", "-c", probe]).returncode:
        pytest.skip("not root of a system with namespaces")
    assert isolation_mode() == "namespaces"


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
        "raise SystemExit(101)": "program_error",  # not the code for too much memory
        f"x = {'-' * 100_000}1": "syntax_error",  # the compiler runs out of memory
    }
    found = {code: code_reward(fenced(code), problem) for code in statuses}
    assert {code: verdict.status for code, verdict in found.items()} == statuses
    assert [verdict.value for verdict in found.values()] == [1.0] + [0.0] * 10
    assert code_reward("def f(x): return x * x", problem).status == "no_code"
    partial = code_partial_reward(fenced("def f(x): return 4"), problem)
    assert (partial.value, partial.status) == (0.5, "wrong_answer")
    assert partial.detail == "test 2 of 2: another output"
    quick = problem_of(["assert f(1) == 1", "assert f(2) == 2", "assert f(3) == 3"], time_s=0.4)
    slow = code_partial_reward(fenced("def f(x):\n    while x == 2: pass\n    return x"), quick)
    assert (slow.value, slow.status) == (1 / 3, "time_limit")  # the third test is not run, and not passed


@needs_isolation
def test_programs_see_no_network_no_home_no_other_process_and_write_only_in_their_folder(
    tmp_path, monkeypatch
):
    (tmp_path / "secret").write_text("secret")
    monkeypatch.setenv("SECRET", "secret")
    address = f"\0mugrpo-{os.getpid()}"
    code = f"""
import ctypes, os, socket, sys
def tried(call, *arguments):
    try: return call(*arguments)
    except OSError as error: return type(error).__name__
local = socket.socket(socket.AF_UNIX)
print(tried(socket.create_connection, ("127.0.0.1", 9)), tried(local.connect, {address!r}))
print(tried(open, {str(tmp_path / "secret")!r}), tried(open, "/etc/passwd"))
print([tried(open, p + "/x", "w") for p in ("", "/usr", "/dev", sys.prefix)])
print(tried(os.kill, {os.getpid()}, 9), tried(os.kill, 1, 9), os.getpid() < 10, os.listdir("."))
print(ctypes.CDLL(None).ptrace(16, 1, 0, 0), ctypes.CDLL(None).unshare(0x10000000))
print(open("mine", "w").write("x"))
capabilities = (ctypes.c_uint32 * 6)(*[1] * 6)
ctypes.CDLL(None).capget((ctypes.c_uint32 * 2)(0x20080522, 0), capabilities)
print(sorted(os.environ), os.getuid() > 0, {{*os.getgroups()}} <= {{os.getgid(), 65534}}, list(capabilities))
print("supervisor" in sys.modules)
"""
    with socket.socket(socket.AF_UNIX) as server:  # of no file: only a network namespace hides it
        server.bind(address)
        server.listen()
        first, second = run_program(code, [{"stdin": ""}] * 2, limits=Limits(time_s=20.0))
    lines = first.output.splitlines()
    refused = ["PermissionError ConnectionRefusedError", "FileNotFoundError FileNotFoundError"]
    assert lines[:2] == refused, first
    assert eval(lines[2], {"__builtins__": {}}) and "<" not in lines[2]
    assert lines[3:6] == ["ProcessLookupError None True []", "-1 -1", "1"]
    names = sorted({*launch._ENVIRONMENT, "HOME", "TMPDIR"})
    assert lines[6:] == [f"{names} True True {[0] * 6}", "False"]
    assert second == first  # the folder is empty again


@pytest.mark.parametrize(
    ("runner", "message"),
    [
        ('print(\'{"failed": "mount: no"}\')', "the sandbox did not start: mount: no"),
        ("raise SystemExit('boom')", "the sandbox died: boom"),
        ("import time; time.sleep(60)", "the sandbox gave no answer within 0.3 s"),
    ],
)
def test_a_sandbox_that_fails_is_no_wrong_program(tmp_path, monkeypatch, runner, message):
    (tmp_path / "runner.py").write_text(runner)
    monkeypatch.setattr(launch, "_FOLDER", tmp_path)
    monkeypatch.setattr(launch, "_START_S", 0.2 if "sleep" in runner else 20.0)
    with pytest.raises(SandboxError, match=message):
        next(launch._outcomes("", [{"stdin": ""}], Limits(time_s=0.1), "unsafe"))


@needs_isolation
def test_a_program_reads_its_input_and_ends_as_it_likes():
    code = """
import sys, threading, time
case = input()
if case == "main":
    print(__name__, sys.argv, sys.stdin.read())
elif case == "full":
    for number in range(3): open(str(number), "wb").write(bytes(2**20))
elif case == "many":
    for number in range(9999): open(str(number), "x").close()
elif case == "thread":
    threading.Thread(target=lambda: time.sleep(0.1) or print("late")).start()
else:
    sys.exit(eval(case))
"""
    many = ["many"] * (isolation_mode() == "namespaces")  # bubblewrap has no limit of the number of files
    inputs = ["main\nmore", "thread", "None", "0", "full", *many, "3", "'no'", "1 / 0"]
    *found, last = run_program(code, [{"stdin": text} for text in inputs], limits=LIMITS)
    assert [outcome.output for outcome in found[:2]] == ["__main__ ['program.py'] more\n", "late\n"]
    statuses = ["ok"] * 4 + ["file_limit"] * (1 + len(many)) + ["program_error"] * 2
    assert [outcome.status for outcome in found] == statuses
    assert last.detail == "ZeroDivisionError: division by zero"


@needs_isolation
def test_a_function_is_called_by_name_as_a_method_or_in_an_expression():
    code = """
import os
def f(x): return [x, __name__]
def leave(x): os._exit(0)
class Solution:
    def _hidden(self): pass
    def solve(self, a, b): return a - b
"""
    tests = [
        {"function": "f", "arguments": [1]},
        {"function": None, "arguments": [5, 3]},
        {"function": "solve", "arguments": [5, 3]},
        {"expression": "math.floor(f(1.5)[0])", "setup": "import math"},
        {"function": "g", "arguments": []},
        {"function": "leave", "arguments": [1]},
    ]
    found = list(run_program(code, tests, limits=LIMITS))
    assert [outcome.output for outcome in found[:4]] == ["[1,'program']", "2", "2", "1"]
    assert [outcome.status for outcome in found] == ["ok"] * 4 + ["program_error"] * 2
    assert found[5].detail == "the program ended before the function returned"


@needs_isolation
@pytest.mark.skipif(platform.machine() not in seccomp._ARCHITECTURES, reason="no filter for this machine")
def test_forbidden_system_calls_fail_although_the_namespace_would_allow_them():
    column = seccomp._ARCHITECTURES[platform.machine()][0]
    numbers = {name: both[column] for name, both in seccomp._CALLS.items()}
    numbers |= {"clone3": seccomp._CLONE3[column], "clone": seccomp._CLONE[column]}
    code = f"""
import ctypes, os, socket
libc = ctypes.CDLL(None, use_errno=True)
for name, number in {numbers}.items():
    first = 0x10000011 if name == "clone" else -1
    print(name, libc.syscall(number, first, 0, 0, 0, 0), ctypes.get_errno())
def is_open(number):
    try: return bool(os.fstat(number))
    except OSError: return False
print([number for number in range(4, 64) if is_open(number)], len(socket.socketpair()))
"""
    lines = run_one(code, stdin="").output.splitlines()
    assert lines[:-1] == [f"{name} -1 {38 if name == 'clone3' else 1}" for name in numbers]
    assert (
        lines[-1] == "[] 2"
    )  # no file of the supervisor is open; sockets inside of the sandbox are possible


@needs_isolation
def test_links_do_not_lead_out_and_nothing_stays_for_the_next_test(tmp_path):
    code = f"""
import os
if input() == "write":
    os.symlink({str(tmp_path)!r}, "out")
    os.makedirs("closed/inner")
    open("closed/inner/note", "w").write("x")
    os.chmod("closed", 0)
    os.chmod(".", 0o500)
    print(os.path.exists("out"))
else:
    print(os.listdir("."))
"""
    (tmp_path / "file").write_text("kept")
    first, second = run_program(code, [{"stdin": "write"}, {"stdin": "look"}], limits=LIMITS)
    assert (first.status, first.output, second.output) == ("ok", "False\n", "[]\n")
    assert (tmp_path / "file").read_text() == "kept"
    deep = "import os\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')"
    outcome = run_one(deep, stdin="")
    assert outcome.status == "file_limit" and "cannot be deleted" in outcome.detail


@needs_isolation
def test_a_function_gets_its_arguments_as_they_are():
    answer = {"fn_name": "f", "inputs": [[{"1": 2}, None, True, 1e999]], "outputs": [[{"2": 1}]]}
    problem = Problem("p", "", json.dumps(answer))
    code = "def f(d, nothing, yes, big): return {d[1]: int(nothing is None and yes is True and big > 1e308)}"
    assert code_reward(fenced(code), problem).value == 1.0


@needs_isolation
def test_a_function_finds_the_names_of_typing():
    code = "class Solution:\n    def solve(self, x: List[int]) -> Optional[int]: return x[0]"
    (found,) = run_program(code, [{"function": None, "arguments": [[7]]}], limits=LIMITS)
    assert found.output == "7"


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
    assert launch.check_sandbox(unsafe=True).startswith("warning: programs run without isolation")
    with make_scorer("code", workers=0, unsafe_sandbox=True) as scorer:
        score = scorer.submit(fenced("def f(x): return x"), problem_of(["assert f(2) == 2"])).result()
    assert (score.value, score.status) == (1.0, "ok")
