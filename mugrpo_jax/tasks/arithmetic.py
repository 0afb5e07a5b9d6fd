"""Generate the task `arithmetic`: column addition, easy enough for a tiny character-level model."""

import random

from mugrpo_jax.tasks.synthetic_task import check_integer, generated_task
from mugrpo_jax.tasks.task import Problem, Task

ARITHMETIC_ALPHABET = "0123456789+-=,;"


def arithmetic(
    *,
    seed: int = 0,
    difficulty: int = 2,
    operands: int = 2,
    slips: float = 0.0,
    train: int = 8192,
    test: int = 256,
) -> Task:
    """Make a task with sums of `operands` numbers of `difficulty` digits each.

    The worked solution adds column by column from the right. Each column is written as its digits, the carry
    and a two-digit sum, and the answer follows after a semicolon. All columns have the same width, so that a
    model can find the digits by position.

    `slips` is the probability that a column of a worked solution has a random sum. The next columns use the
    carry of that wrong sum. After a warm start on such solutions, a model can add but makes mistakes, which
    reinforcement learning can then remove. The answers of the problems are always right.

    >>> task = arithmetic(difficulty=2, train=100_000, test=4)
    >>> column_addition((37, 58))
    '7+8+0=15,3+5+1=09;95'
    >>> set(task.train[99_999].prompt) <= set(ARITHMETIC_ALPHABET)
    True
    """
    check_integer("arithmetic", "difficulty", difficulty, 1, 18)
    check_integer("arithmetic", "operands", operands, 2, 10)
    if not 0 <= slips <= 1:
        raise ValueError(f"arithmetic: slips is {slips}; possible: a probability from 0 to 1")
    smallest = 10 ** (difficulty - 1) if difficulty > 1 else 0

    def draw(rng: random.Random) -> tuple[str, Problem]:
        numbers = tuple(rng.randrange(smallest, 10**difficulty) for _ in range(operands))
        prompt = "+".join(map(str, numbers)) + "="
        key = "+".join(map(str, sorted(numbers)))  # 37+58 and 58+37 have the same key
        solution = column_addition(numbers, slips=slips, rng=rng if slips else None)
        return key, Problem("", prompt, str(sum(numbers)), solution)

    return generated_task("arithmetic", draw, "arithmetic", seed=seed, train=train, test=test)


def column_addition(numbers: tuple[int, ...], *, slips: float = 0.0, rng: random.Random | None = None) -> str:
    """Write the addition of the numbers column by column, from the right, with the answer at the end.

    With an `rng`, each column gets a random sum with probability `slips`.
    """
    width = max(len(str(number)) for number in numbers)
    steps, digits, carry = [], "", 0
    for column in zip(*(reversed(str(number).zfill(width)) for number in numbers)):
        total = sum(map(int, column)) + carry
        if rng is not None and rng.random() < slips:
            total = rng.randrange(20)
        steps.append("+".join((*column, str(carry))) + f"={total:02d}")
        carry = total // 10
        digits = str(total % 10) + digits
    return ",".join(steps) + f";{int(str(carry) + digits)}"
