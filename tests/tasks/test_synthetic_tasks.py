import itertools
import re
import time
from fractions import Fraction

import pytest

from mugrpo_jax.tasks import (
    ARITHMETIC_ALPHABET,
    GENERATORS,
    REWARDS,
    Problem,
    countdown_reward,
    evaluate_expression,
    load_task,
)

DIFFICULTIES = {
    "arithmetic": (2, 3, 5),
    "word_problems": (1, 2, 3, 4),
    "countdown": (2, 3, 4, 6),
    "chains": (4, 24),
    "multiplication": (3, 5),
}
CASES = [(name, difficulty) for name, levels in DIFFICULTIES.items() for difficulty in levels]

OWN = [
    name for name in GENERATORS if name != "reasoning_gym"
]  # which needs a package, see `test_gym_problems`


def key_of(name: str, problem: Problem) -> str:
    """A key for what a problem asks, from its text and independent of the generator's key."""
    if name in ("arithmetic", "multiplication"):
        return " ".join(sorted(re.findall(r"\d+", problem.prompt)))
    if name == "countdown":
        return problem.answer
    return problem.prompt


def text_of(problem: Problem) -> str:
    return problem.prompt if isinstance(problem.prompt, str) else problem.prompt[0]["content"]


@pytest.mark.parametrize(("name", "difficulty"), CASES)
def test_worked_solutions_earn_the_reward_and_answers_of_others_do_not(name, difficulty):
    task = load_task(name, difficulty=difficulty, train=200, test=30)
    reward = REWARDS[task.reward]
    problems = [*task.train, *task.test]
    assert all(reward(p.solution, p) == 1.0 for p in problems)
    different = [(a, b) for a, b in itertools.pairwise(problems) if a.answer != b.answer]
    assert len(different) > 100
    assert all(reward(a.solution, b) == 0.0 for a, b in different)


@pytest.mark.parametrize(("name", "difficulty"), CASES)
def test_train_and_test_are_disjoint_for_all_seeds_and_test_problems_are_distinct(name, difficulty):
    options = {} if name == "arithmetic" else {"chat": False}
    tasks = [load_task(name, difficulty=difficulty, train=1500, test=60, seed=s, **options) for s in (0, 1)]
    test = {key_of(name, p) for task in tasks for p in task.test}
    train = {key_of(name, p) for task in tasks for p in task.train}
    assert not test & train
    assert all(len({key_of(name, p) for p in task.test}) == 60 for task in tasks)


@pytest.mark.parametrize("name", OWN)
def test_the_seed_decides_everything_and_position_decides_the_problem(name):
    first, again, other = (load_task(name, train=50, test=20, seed=seed) for seed in (3, 3, 4))
    assert list(first.train) == list(again.train) and list(first.test) == list(again.test)
    assert [p.prompt for p in first.train] != [p.prompt for p in other.train]
    longer = load_task(name, train=500, test=40, seed=3)
    assert list(longer.train[:50]) == list(first.train)
    assert longer.test[:20] == first.test
    ids = [p.id for p in [*longer.train, *longer.test]]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("name", OWN)
def test_a_large_task_costs_nothing_until_it_is_read(name):
    start = time.perf_counter()
    task = load_task(name, train=10**9, test=8)
    assert len(task.train) == 10**9 and task.train[10**9 - 1].id.endswith(str(10**9 - 1))
    assert task.train[-1] == task.train[10**9 - 1] and len(task.train[5:100:10]) == 10
    assert time.perf_counter() - start < 1.0
    with pytest.raises(IndexError):
        task.train[10**9]


def test_arithmetic_uses_its_alphabet_and_fixed_widths():
    task = load_task("arithmetic", difficulty=3, operands=3, train=300, test=10)
    for p in task.train:
        assert set(p.prompt + p.solution) <= set(ARITHMETIC_ALPHABET)
        numbers = [int(n) for n in p.prompt[:-1].split("+")]
        assert len(numbers) == 3 and all(100 <= n <= 999 for n in numbers) and sum(numbers) == int(p.answer)
        steps = p.solution.split(";")[0].split(",")
        assert len(steps) == 3 and {len(step) for step in steps} == {10}
        assert all(sum(map(int, step[:-3].split("+"))) == int(step[-2:]) for step in steps)


def test_every_line_of_a_chain_follows_from_the_line_before():
    for p in load_task("chains", difficulty=12, train=200, test=5).train:
        first, *rest = re.findall(r"\d+", p.prompt)
        *lines, final = p.solution.split("\n")
        assert len(lines) == len(rest) == 12 and final == f"#### {p.answer}"
        total = int(first)
        for line, number in zip(lines, rest):
            left, right = line.split(" = ")
            assert left.split()[0] == str(total) and left.split()[2] == number
            total = int(right)
            assert evaluate_expression(left)[0] == total and 0 <= total < 1000
        assert total == int(p.answer)


@pytest.mark.parametrize("slips", [0.0, 0.4])
def test_a_compact_chain_has_one_digit_totals_and_slips_only_at_a_3(slips):
    slipped = threes = 0
    for p in load_task("chains", compact=True, difficulty=9, slips=slips, train=300, test=5).train:
        assert set(p.prompt + p.solution) <= set(ARITHMETIC_ALPHABET)
        changes = [int(change) for change in re.findall(r"[+-]\d", p.prompt)]
        right = list(itertools.accumulate(changes, initial=int(p.prompt[0])))
        assert p.answer == ",".join(map(str, right[1:])) and len(right) == 10 and max(right) < 10
        assert REWARDS["exact"](p.solution, p) == (p.solution == p.answer)
        totals = [int(p.prompt[0]), *map(int, p.solution.split(","))]
        for before, change, after in zip(totals, changes, totals[1:]):
            error = (after - before - change) % 10
            assert error == 0 or (error == 1 and abs(change) == 3)
            slipped, threes = slipped + error, threes + (abs(change) == 3)
    assert abs(slipped / threes - slips) < 0.05


def test_every_step_of_a_long_multiplication_is_right_and_every_row_is_added():
    for p in load_task("multiplication", difficulty=4, train=100, test=5).train:
        a, b = map(int, re.findall(r"\d+", p.prompt))
        *lines, final = p.solution.split("\n")
        assert len(lines) == 4 + 3 and final == f"#### {a * b}"
        for line in lines:
            question, work = line.split(": ")
            steps, result = work.split(";")
            assert evaluate_expression(question)[0] == int(result)
            for left, right in (step.split("=") for step in steps.split(",")):
                assert evaluate_expression(left)[0] == int(right)
        assert 300 <= len(p.solution) <= 1000


@pytest.mark.parametrize(("name", "slips", "right"), [("chains", 0.03, 0.5), ("multiplication", 0.05, 0.2)])
def test_a_careless_teacher_is_wrong_as_often_as_asked_and_answers_stay_right(name, slips, right):
    problems = load_task(name, slips=slips, train=300, test=2).train
    scores = [REWARDS["math"](p.solution, p) for p in problems]
    assert abs(sum(scores) / 300 - right) < 0.1
    for p in problems:
        assert evaluate_expression(p.prompt.split(":")[1])[0] == int(p.answer)


@pytest.mark.parametrize("steps", (1, 2, 3, 4))
def test_word_problems_have_as_many_steps_as_asked_and_every_step_is_right(steps):
    problems = list(load_task("word_problems", difficulty=steps, train=300, test=5).train)
    for p in problems:
        *lines, final = p.solution.split("\n")
        assert len(lines) == steps and final == f"#### {p.answer}"
        for line in lines:
            left, right = line.split(" = ")
            assert evaluate_expression(left)[0] == int(right.split()[0])
        assert "{" not in text_of(p) + p.solution
    assert len({text_of(p) for p in problems}) > 290
    assert len({text_of(p).split()[0] for p in problems}) > 15


def test_countdown_uses_each_number_once_and_evaluates_nothing_else():
    p = Problem("1", "", "14 from 2 3 4")
    right = [
        "#### 2*(3+4)",
        "2*7=14\n####  (4+3) * 2 ",
        "#### 2*(3+4) = 14",
        "#### 2*3*4\n#### 2*(4+3)\nDone.",
    ]
    wrong = [
        "", "2*(3+4)", "#### 14", "#### 2*7", "#### 2*(3+4)+0", "#### 2+3*4/1", "#### 2*(3+4",
        "#### 2**3+4+2", "#### 2(3+4)",
        "#### 2*3+4", "#### (2*(3+4))/(3-3)", "#### __import__('os')", "#### 2*(3+4)*1", "#### 10+4", "####",
        "#### 2*3+4+4", "#### " + "(" * 5000, "#### 2*(3+4)" + "+0" * 5000, "#### 2//1*7", "#### -2*-(3+4)",
    ]  # fmt: skip
    assert [countdown_reward(text, p) for text in right] == [1.0] * len(right)
    assert [countdown_reward(text, p) for text in wrong] == [0.0] * len(wrong)
    assert evaluate_expression("(1+2)/6 - 1") == (Fraction(-1, 2), [1, 2, 6, 1])
    with pytest.raises(ValueError, match="answer is 'fourteen'"):
        countdown_reward("#### 2*7", Problem("1", "", "fourteen"))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "arithmetic",
            {"difficulty": 0},
            "arithmetic: difficulty is 0; possible: a whole number from 1 to 18",
        ),
        ("arithmetic", {"difficulty": 1}, "arithmetic: test is 256; possible at this difficulty: at most"),
        (
            "word_problems",
            {"difficulty": 5},
            "word_problems: difficulty is 5; possible: a whole number from 1",
        ),
        ("countdown", {"difficulty": True}, "countdown: difficulty is True"),
        ("arithmetic", {"slips": 5}, "arithmetic: slips is 5; possible: a probability from 0 to 1"),
        ("word_problems", {"chat": "no"}, "word_problems: chat is 'no'; possible: true or false"),
        ("gsm8k", {"name": "x"}, "task 'gsm8k' has no option 'name'; possible: folder, train, test"),
        ("countdown", {"train": -1}, "countdown: train is -1; possible: a whole number not below 0"),
        ("arithmetic", {"digits": 3}, "task 'arithmetic' has no option 'digits'; possible: seed, difficulty"),
        ("chains", {"slips": 5}, "chains: slips is 5; possible: a number from 0 to 1"),
        ("chains", {"compact": True, "chat": True}, "chains: compact problems are plain text; possible: "),
        ("chains", {"compact": "no"}, "chains: compact is 'no'; possible: true or false"),
        ("my.jsonl", {}, "task is 'my.jsonl'; write name: dataset and options: {train: my.jsonl}"),
        (
            "gsm",
            {},
            "task is 'gsm'; did you mean gsm8k? possible: arithmetic, word_problems, countdown, chains, ",
        ),
    ],
)
def test_bad_settings_are_one_clear_line(name, options, message):
    with pytest.raises(ValueError) as error:
        load_task(name, **options)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)
