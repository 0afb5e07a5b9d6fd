"""Column addition in a small alphabet: what a tiny character-level model learns from few worked examples."""

import random

from mugrpo_jax.tasks.base import Problem, Task
from mugrpo_jax.tasks.generators import check_whole, generated_task

ARITHMETIC_ALPHABET = "0123456789+=,;"


def arithmetic(
    *,
    seed: int = 0,
    difficulty: int = 2,
    operands: int = 2,
    slips: float = 0.0,
    train: int = 8192,
    test: int = 256,
) -> Task:
    """Sums of `operands` numbers with `difficulty` digits each.

    With `slips`, the teacher is careless: each column of a worked solution is added wrongly with this
    probability, and what follows builds on the mistake. A model warmed up on such solutions knows how to add
    and makes mistakes, which leaves something to reinforcement learning; the gold answers stay right.

    The worked solution adds column by column from the right: the digits, the carry, a two-digit sum. The
    answer follows the semicolon. Every column has the same width, so that what to copy is found by position.

    >>> task = arithmetic(difficulty=2, train=100_000, test=4)
    >>> column_addition((37, 58))
    '7+8+0=15,3+5+1=09;95'
    >>> set(task.train[99_999].prompt) <= set(ARITHMETIC_ALPHABET)
    True
    """
    check_whole("arithmetic", "difficulty", difficulty, 1, 18)
    check_whole("arithmetic", "operands", operands, 2, 10)
    smallest = 10 ** (difficulty - 1) if difficulty > 1 else 0

    def draw(rng: random.Random) -> tuple[str, Problem]:
        numbers = tuple(rng.randrange(smallest, 10**difficulty) for _ in range(operands))
        prompt = "+".join(map(str, numbers)) + "="
        key = "+".join(map(str, sorted(numbers)))  # 37+58 and 58+37 ask the same
        solution = column_addition(numbers, slips=slips, rng=rng if slips else None)
        return key, Problem("", prompt, str(sum(numbers)), solution)

    return generated_task("arithmetic", draw, "arithmetic", seed=seed, train=train, test=test)


def column_addition(numbers: tuple[int, ...], *, slips: float = 0.0, rng: random.Random | None = None) -> str:
    """The sum of the numbers, worked column by column from the right, with careless mistakes if asked for."""
    columns = zip(*(reversed(digits) for digits in _padded(numbers)))
    steps, digits, carry = [], "", 0
    for column in columns:
        total = sum(map(int, column)) + carry
        if rng is not None and rng.random() < slips:
            total = rng.randrange(20)
        steps.append("+".join((*column, str(carry))) + f"={total:02d}")
        carry = total // 10
        digits = str(total % 10) + digits
    return ",".join(steps) + f";{int(str(carry) + digits)}"


def _padded(numbers: tuple[int, ...]) -> list[str]:
    width = max(len(str(number)) for number in numbers)
    return [str(number).zfill(width) for number in numbers]
