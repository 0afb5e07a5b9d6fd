"""Problems from a seed: endless, with worked solutions, and held out by what they ask.

A draw is a function `draw(rng) -> (key, problem)`. The key says what the problem asks, whatever the order of
its operands, and its hash alone decides between training and test: a test problem of any seed is in the
training set of no seed, without a list of one in memory while the other is made.
"""

import hashlib
import itertools
import random
import sys
from collections.abc import Callable
from dataclasses import replace

from mugrpo_jax.tasks.base import LazyProblems, Problem, Task

Draw = Callable[[random.Random], tuple[str, Problem]]

_HELD_OUT = 8  # one key in eight belongs to the test side
_PATIENCE = 2000  # draws without a new problem before a space counts as exhausted


def generated_task(name: str, draw: Draw, reward: str, *, seed: int, train: int, test: int) -> Task:
    """A task of `train` lazily drawn problems, which may repeat, and `test` distinct ones."""
    check_whole(name, "train", train, 0, sys.maxsize)
    check_whole(name, "test", test, 0, sys.maxsize)

    def make(split: str, i: int) -> tuple[str, Problem]:
        rng = random.Random(f"{name}/{seed}/{split}/{i}")
        for _ in range(_PATIENCE):
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


def check_whole(name: str, argument: str, value: int, low: int, high: int) -> None:
    """Refuse a setting that is not a whole number from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        bounds = f"not below {low}" if high == sys.maxsize else f"from {low} to {high}"
        raise ValueError(f"{name}: {argument} is {value!r}; possible: a whole number {bounds}")


def _held_out(key: str) -> bool:
    return hashlib.blake2b(key.encode(), digest_size=8).digest()[0] % _HELD_OUT == 0


def _distinct(name: str, make: Callable[[int], tuple[str, Problem]], count: int) -> tuple[Problem, ...]:
    """The first `count` problems with different keys; a test set with repeats would look more certain."""
    found: dict[str, Problem] = {}
    last_new = 0
    for i in itertools.count():
        if len(found) == count:
            return tuple(found.values())
        if i - last_new > _PATIENCE:
            raise ValueError(f"{name}: test is {count}; possible at this difficulty: at most {len(found)}")
        key, problem = make(i)
        if key not in found:
            found[key], last_new = problem, i
    raise AssertionError("unreachable")
