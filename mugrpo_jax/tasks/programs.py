"""Generate the task `programs`: short Python functions to write, in the style of MBPP, with tests."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mugrpo_jax.tasks.synthetic_task import check_integer, generated_task
from mugrpo_jax.tasks.task import Problem, Task, as_prompt

INSTRUCTION = "Put the function into one ```python block."

_TESTS = 4


@dataclass(frozen=True)
class _Step:
    """A change of a list of numbers: `told` in English, `code` as an expression of `xs`."""

    told: str
    code: str


_Maker = Callable[[random.Random], _Step]

_CHANGES: tuple[_Maker, ...] = (
    lambda rng: _numbered("adds {n} to every number", "[x + {n} for x in xs]", rng.randint(1, 20)),
    lambda rng: _numbered("multiplies every number by {n}", "[x * {n} for x in xs]", rng.randint(2, 9)),
    lambda rng: _numbered("keeps the numbers above {n}", "[x for x in xs if x > {n}]", rng.randint(-9, 20)),
    lambda rng: _numbered("keeps the numbers below {n}", "[x for x in xs if x < {n}]", rng.randint(-9, 20)),
    lambda rng: _numbered("drops the first {n} numbers", "xs[{n}:]", rng.randint(1, 3)),
    lambda rng: _numbered("keeps the multiples of {n}", "[x for x in xs if x % {n} == 0]", rng.randint(2, 5)),
    lambda rng: _Step("reverses the list", "xs[::-1]"),
    lambda rng: _Step("sorts the numbers", "sorted(xs)"),
    lambda rng: _Step("squares every number", "[x * x for x in xs]"),
)
_RESULTS: tuple[_Maker, ...] = (
    lambda rng: _Step("returns the list", "xs"),
    lambda rng: _Step("returns the sum of the numbers", "sum(xs)"),
    lambda rng: _Step("returns how many numbers are left", "len(xs)"),
    lambda rng: _Step("returns the largest number, or 0 if there is none", "max(xs, default=0)"),
    lambda rng: _Step("returns the smallest number, or 0 if there is none", "min(xs, default=0)"),
)


def programs(
    *, seed: int = 0, difficulty: int = 1, train: int = 100_000, test: int = 32, chat: bool = True
) -> Task:
    """Make a task whose problems ask for a function with `difficulty` (1 to 3) changes of a list.

    The prompt shows one of the tests. With `chat`, a prompt is a chat message, otherwise plain text. The
    worked solution is a fenced block with the function.

    >>> problem = programs(chat=False).train[0]
    >>> problem.solution.startswith("```python\\ndef f(xs):\\n")
    True
    """
    check_integer("programs", "difficulty", difficulty, 1, 3)

    def draw(rng: random.Random) -> tuple[str, Problem]:
        steps = [rng.choice(_CHANGES)(rng) for _ in range(difficulty)] + [rng.choice(_RESULTS)(rng)]
        lines = [f"    xs = {step.code}\n" for step in steps[:-1]] + [f"    return {steps[-1].code}\n"]
        function = "def f(xs):\n" + "".join(lines)
        tests = [_test(function, [rng.randint(-20, 30) for _ in range(size)]) for size in _sizes(rng)]
        told = ", then ".join(step.told for step in steps)
        text = f"Write a Python function f(xs) that takes a list of whole numbers, {told}.\n"
        prompt = as_prompt(f"{text}{tests[0]}\n{INSTRUCTION}", chat)
        return told, Problem("", prompt, json.dumps(tests), f"```python\n{function}```")

    return generated_task("programs", draw, "code", seed=seed, train=train, test=test)


def _numbered(told: str, code: str, n: int) -> _Step:
    return _Step(told.format(n=n), code.format(n=n))


def _sizes(rng: random.Random) -> list[int]:
    return [rng.randint(4, 6), rng.randint(7, 9), *(rng.randint(1, 6) for _ in range(_TESTS - 3)), 0]


def _test(function: str, xs: list[int]) -> str:
    """Return an assert line. Its right value comes from our own function, which needs no sandbox."""
    names: dict[str, Any] = {}
    exec(function, names)
    return f"assert f({xs}) == {names['f'](xs)}"
