"""Generate the task `multiplication`: long multiplication with every digit written down."""

import random

from mugrpo_jax.tasks.arithmetic import column_addition
from mugrpo_jax.tasks.synthetic_task import check_integer, check_slips, generated_task
from mugrpo_jax.tasks.task import Problem, Task, as_prompt


def multiplication(
    *,
    seed: int = 0,
    difficulty: int = 4,
    slips: float = 0.0,
    train: int = 100_000,
    test: int = 512,
    chat: bool = False,
) -> Task:
    """Make a task whose problems multiply two numbers of `difficulty` (2 to 8) digits.

    The worked solution first multiplies by each digit of the second number. Then it adds the rows, column by
    column, to a running sum. `slips` is the probability that a product of two digits, or a column of a sum,
    is wrong. The answers of the problems are always right. With `chat`, a prompt is a chat message.

    >>> multiplication(difficulty=4).train[0].prompt
    'Multiply digit by digit: 9336 * 5564\\n'
    """
    check_integer("multiplication", "difficulty", difficulty, 2, 8)
    check_slips("multiplication", slips)
    low, high = 10 ** (difficulty - 1), 10**difficulty

    def draw(rng: random.Random) -> tuple[str, Problem]:
        a, b = rng.randrange(low, high), rng.randrange(low, high)
        solution = long_multiplication(a, b, slips=slips, rng=rng if slips else None)
        prompt = as_prompt(f"Multiply digit by digit: {a} * {b}", chat)
        key = f"{min(a, b)}*{max(a, b)}"  # 12*34 and 34*12 have the same key
        return key, Problem("", prompt, str(a * b), solution)

    return generated_task("multiplication", draw, "math", seed=seed, train=train, test=test)


def long_multiplication(a: int, b: int, *, slips: float = 0.0, rng: random.Random | None = None) -> str:
    """Write the multiplication of two numbers digit by digit, with the answer after `####`.

    With an `rng`, each product of two digits and each column of a sum is wrong with probability `slips`.

    >>> print(long_multiplication(37, 58))
    37*8: 7*8+0=56,3*8+5=29;296
    37*50: 7*5+0=35,3*5+3=18;1850
    296+1850: 6+0+0=06,9+5+0=14,2+8+1=11,0+1+1=02;2146
    #### 2146
    """
    lines, rows = [], []
    for place, digit in enumerate(reversed(str(b))):
        steps, written, carry = [], "", 0
        for other in reversed(str(a)):
            product = int(other) * int(digit) + carry
            if rng is not None and rng.random() < slips:
                product = rng.randrange(90)
            steps.append(f"{other}*{digit}+{carry}={product:02d}")
            carry, written = product // 10, str(product % 10) + written
        row = int(str(carry) + written) * 10**place
        lines.append(f"{a}*{digit}{'0' * place}: {','.join(steps)};{row}")
        rows.append(row)
    total = rows[0]
    for row in rows[1:]:
        columns = column_addition((total, row), slips=slips, rng=rng)
        lines.append(f"{total}+{row}: {columns}")
        total = int(columns.rpartition(";")[2])
    return "\n".join([*lines, f"#### {total}"])
