"""The rewards `code` and `code_partial`: run the program in a response on the tests of the problem."""

from contextlib import closing

from mugrpo_jax.tasks.code_answers import program_of
from mugrpo_jax.tasks.code_tests import read_tests
from mugrpo_jax.tasks.sandbox import run_program
from mugrpo_jax.tasks.task import Problem, Verdict


def code_reward(response: str, problem: Problem, *, unsafe: bool = False) -> Verdict:
    """Return 1.0 if the program passes all tests, otherwise 0.0, with a status that says how it failed.

    The tests end at the first that fails.
    """
    verdict = _judge(response, problem, all_tests=False, unsafe=unsafe)
    return Verdict(float(verdict.status == "ok"), verdict.status, verdict.detail)


def code_partial_reward(response: str, problem: Problem, *, unsafe: bool = False) -> Verdict:
    """Return the share of tests that the program passes, with the status of the first that fails.

    A test that reaches the time limit ends the tests, and those after it count as failed.
    """
    return _judge(response, problem, all_tests=True, unsafe=unsafe)


def _judge(response: str, problem: Problem, *, all_tests: bool, unsafe: bool) -> Verdict:
    tests, limits = read_tests(problem)
    code = program_of(response)
    if code is None:
        return Verdict(0.0, "no_code", "no fenced block of Python")
    passed, status, detail = 0, "ok", ""
    given = [test.given for test in tests]
    with closing(run_program(code, given, limits=limits, unsafe=unsafe)) as outcomes:
        for number, (test, outcome) in enumerate(zip(tests, outcomes), 1):
            if test.passed(outcome):
                passed += 1
                continue
            if status == "ok":
                status = "wrong_answer" if outcome.status == "ok" else outcome.status
                reason = "another output" if outcome.status == "ok" else outcome.detail
                detail = f"test {number} of {len(tests)}: {reason}"
            if not all_tests:
                break
    return Verdict(passed / len(tests), status, detail)
