"""Generate tasks from a seed. The generated problems have worked solutions.

A generator is a function `draw(rng) -> (key, problem)`. Equivalent problems, such as 3 + 5 and 5 + 3, have
the same key. The hash of the key decides whether a problem is for training or for tests. So the test problems
of one seed are never training problems of another seed.
"""

import hashlib
import itertools
import random
import sys
from collections.abc import Callable
from dataclasses import replace

from mugrpo_jax.tasks.task import LazyProblems, Problem, Task

Draw = Callable[[random.Random], tuple[str, Problem]]

_HELD_OUT = 8  # one key in eight is for tests
_MOST_DRAWS = 2000  # after 2000 draws without a new problem we assume that there are no more problems


def generated_task(name: str, draw: Draw, reward: str, *, seed: int, train: int, test: int) -> Task:
    """Make a task with `train` training problems and `test` test problems, drawn by `draw`.

    A problem depends only on the seed and its index. Training problems are drawn when they are read, and two
    of them may be equal. The test problems are drawn in this call, and all are different.
    """
    check_integer(name, "train", train, 0, sys.maxsize)
    check_integer(name, "test", test, 0, sys.maxsize)

    def make(split: str, i: int) -> tuple[str, Problem]:
        rng = random.Random(f"{name}/{seed}/{split}/{i}")
        for _ in range(_MOST_DRAWS):
            key, problem = draw(rng)
            if _held_out(key) == (split == "test"):
                return key, replace(problem, id=f"{name}-{split}-{seed}-{i}")
        raise ValueError(f"{name}: too few problems to split; make it more difficult")

    return Task(
        name=name,
        train=LazyProblems(lambda i: make("train", i)[1], range(train)),
        test=_distinct(name, lambda i: make("test", i), test),
        reward=reward,
    )


def check_integer(name: str, argument: str, value: int, low: int, high: int) -> None:
    """Raise a `ValueError` unless `value` is a whole number from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        bounds = f"not below {low}" if high == sys.maxsize else f"from {low} to {high}"
        raise ValueError(f"{name}: {argument} is {value!r}; possible: a whole number {bounds}")


def check_slips(name: str, slips: float, option: str = "slips") -> None:
    """Raise a `ValueError` unless `slips`, the value of an option, is a probability."""
    if isinstance(slips, bool) or not isinstance(slips, (int, float)) or not 0 <= slips <= 1:
        raise ValueError(f"{name}: {option} is {slips!r}; possible: a number from 0 to 1")


def _held_out(key: str) -> bool:
    return hashlib.blake2b(key.encode(), digest_size=8).digest()[0] % _HELD_OUT == 0


def _distinct(name: str, make: Callable[[int], tuple[str, Problem]], count: int) -> tuple[Problem, ...]:
    """Return the first `count` problems with different keys, because repeats distort the standard error."""
    found: dict[str, Problem] = {}
    last_new = 0
    for i in itertools.count():
        if len(found) == count:
            return tuple(found.values())
        if i - last_new > _MOST_DRAWS:
            raise ValueError(f"{name}: test is {count}; possible at this difficulty: at most {len(found)}")
        key, problem = make(i)
        if key not in found:
            found[key], last_new = problem, i
    raise AssertionError("unreachable")
