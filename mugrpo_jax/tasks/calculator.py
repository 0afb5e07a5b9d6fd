"""The environment `calculator`, and the task `tool_sums`, which a small model solves only with it."""

import random
import re
from collections.abc import Sequence

from mugrpo_jax.tasks.countdown import evaluate_expression
from mugrpo_jax.tasks.synthetic_task import check_integer, check_slips, generated_task
from mugrpo_jax.tasks.task import Message, Problem, Task

_CALL = re.compile(r"([0-9+\-*/() ]+)=\s*\Z")


def calculator(conversation: Sequence[Message], problem: Problem, *, error: str | None = None) -> str | None:
    """Answer a turn that ends with an expression and `=` with its value; any other turn ends the response.

    Args:
      error: the answer to an expression that has no value, such as `1/0`; None ends the response.

    >>> calculator([{"role": "assistant", "content": "I need 12*(3+4)="}], Problem("1", "", ""))
    '84'
    >>> calculator([{"role": "assistant", "content": ";84"}], Problem("1", "", "")) is None
    True
    """
    del problem
    found = _CALL.search(conversation[-1]["content"])
    if found is None:
        return None
    try:
        return str(evaluate_expression(found[1])[0])
    except (ValueError, ZeroDivisionError):
        return error


def tool_sums(
    *,
    seed: int = 0,
    difficulty: int = 3,
    guesses: float = 0.0,
    train: int = 100_000,
    test: int = 256,
) -> Task:
    """Make a task with sums and differences of `difficulty` (2 to 20) numbers of two digits.

    A worked solution calls the calculator for each step and writes the result behind a semicolon. `guesses`
    is the probability that it calls nothing and guesses a number near the answer. After a warm start on such
    solutions, a model guesses often, and reinforcement learning can teach it to use the tool. The answers of
    the problems are always right.

    >>> problem = tool_sums(difficulty=3).train[0]
    >>> problem.prompt, problem.turns, problem.answer
    ('15+44-19=', ('15+44=', '59', ',59-19=', '40', ';40'), '40')
    """
    check_integer("tool_sums", "difficulty", difficulty, 2, 20)
    check_slips("tool_sums", guesses, "guesses")

    def draw(rng: random.Random) -> tuple[str, Problem]:
        numbers = _numbers(rng, difficulty)
        text = f"{numbers[0]}" + "".join(f"{number:+d}" for number in numbers[1:])
        answer = sum(numbers)
        turns: tuple[str, ...] = (f";{abs(answer + rng.randint(-20, 20))}",)
        if rng.random() >= guesses:
            turns = (*_calls(numbers), f";{answer}")
        return text, Problem("", f"{text}=", str(answer), "".join(turns), turns=turns)

    return generated_task("tool_sums", draw, "arithmetic", seed=seed, train=train, test=test)


def _numbers(rng: random.Random, count: int) -> list[int]:
    """Draw numbers whose partial sums never fall below 0."""
    numbers = [rng.randint(10, 99)]
    for _ in range(count - 1):
        number = rng.randint(10, 99)
        subtract = sum(numbers) >= number and rng.random() < 0.5
        numbers.append(-number if subtract else number)
    return numbers


def _calls(numbers: Sequence[int]) -> list[str]:
    """Return the calls of the calculator and its answers, one after the other."""
    total, turns = numbers[0], []
    for place, number in enumerate(numbers[1:]):
        turns += [f"{',' if place else ''}{total}{number:+d}=", str(total + number)]
        total += number
    return turns
