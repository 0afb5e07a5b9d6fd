"""Generate the task `chains`: long sums and differences, worked out step by step by a careless teacher."""

import random

from mugrpo_jax.tasks.synthetic_task import check_integer, check_slips, generated_task
from mugrpo_jax.tasks.task import Problem, Task, as_prompt

_LARGEST = 900  # above this total the next number is subtracted, so that totals keep about three digits
_SLIPS = (-10, -1, 1, 10)  # by how much a wrong step is wrong
_COMPACT_CHANGES = (-3, -2, -1, 1, 2, 3)  # what a step of a compact chain adds
_HARD = 3  # the number at which the teacher of compact chains slips


def chains(
    *,
    seed: int = 0,
    difficulty: int = 24,
    slips: float = 0.0,
    train: int = 100_000,
    test: int = 512,
    chat: bool = False,
    compact: bool = False,
) -> Task:
    """Make a task whose problems add and subtract `difficulty` (1 to 200) numbers of two digits.

    The worked solution has one line per step and ends with `####` and the answer. A solution of 24 steps has
    about 300 tokens, so one wrong step near the start has a long text behind it. `slips` is the probability
    that a step of a worked solution is wrong by 1 or 10; the later steps continue from the wrong number. The
    answers of the problems are always right. With `chat`, a prompt is a chat message, otherwise plain text.

    With `compact`, the numbers are 1 to 3, all totals have one digit, and the answer is the list of all
    totals. This form is short enough for the tiny model, which reads one character at a time. Its slips are
    at steps with a 3, where the teacher counts one too many.

    >>> problem = chains(difficulty=2).train[0]
    >>> print(problem.prompt + problem.solution)
    Work out step by step: 35 + 79 + 77
    35 + 79 = 114
    114 + 77 = 191
    #### 191
    >>> problem = chains(difficulty=6, compact=True).train[0]
    >>> problem.prompt, problem.solution
    ('3+2+2-1+3-1-1=', '5,7,6,9,8,7')
    """
    check_integer("chains", "difficulty", difficulty, 1, 200)
    check_slips("chains", slips)
    if compact and chat:
        raise ValueError("chains: compact problems are plain text; possible: compact or chat, not both")

    def draw_compact(rng: random.Random) -> tuple[str, Problem]:
        first, changes = _compact_chain(rng, difficulty)
        text = f"{first}" + "".join(f"{change:+d}" for change in changes)
        return text, Problem("", f"{text}=", _totals(first, changes), _totals(first, changes, slips, rng))

    if compact:
        return generated_task("chains", draw_compact, "exact", seed=seed, train=train, test=test)

    def draw(rng: random.Random) -> tuple[str, Problem]:
        first, changes = _chain(rng, difficulty)
        text = f"{first} " + " ".join(f"{'-' if change < 0 else '+'} {abs(change)}" for change in changes)
        solution = chain_solution(first, changes, slips=slips, rng=rng if slips else None)
        prompt = as_prompt(f"Work out step by step: {text}", chat)
        return text, Problem("", prompt, str(first + sum(changes)), solution)

    return generated_task("chains", draw, "math", seed=seed, train=train, test=test)


def _chain(rng: random.Random, steps: int) -> tuple[int, list[int]]:
    """Draw a first number and the changes; the total never falls below 0."""
    total = first = rng.randint(10, 99)
    changes = []
    for _ in range(steps):
        number = rng.randint(10, 99)
        add = total < number or (total < _LARGEST and rng.random() < 0.5)
        changes.append(number if add else -number)
        total += changes[-1]
    return first, changes


def chain_solution(
    first: int, changes: list[int], *, slips: float = 0.0, rng: random.Random | None = None
) -> str:
    """Write one line per step, then the answer. With an `rng`, each step is wrong with probability `slips`.

    >>> print(chain_solution(20, [15, -12]))
    20 + 15 = 35
    35 - 12 = 23
    #### 23
    """
    lines, total = [], first
    for change in changes:
        after = total + change
        if rng is not None and rng.random() < slips:
            after += rng.choice(_SLIPS)
        lines.append(f"{total} {'-' if change < 0 else '+'} {abs(change)} = {after}")
        total = after
    return "\n".join([*lines, f"#### {total}"])


def _compact_chain(rng: random.Random, steps: int) -> tuple[int, list[int]]:
    """Draw a first number and the changes; all totals are between 0 and 9."""
    total = first = rng.randint(0, 9)
    changes = []
    for _ in range(steps):
        changes.append(rng.choice([change for change in _COMPACT_CHANGES if 0 <= total + change <= 9]))
        total += changes[-1]
    return first, changes


def _totals(first: int, changes: list[int], slips: float = 0.0, rng: random.Random | None = None) -> str:
    """Write the total after each step. With an `rng`, steps with a 3 are wrong with probability `slips`."""
    totals = [first]
    for change in changes:
        slip = rng is not None and abs(change) == _HARD and rng.random() < slips
        totals.append((totals[-1] + change + slip) % 10)
    return ",".join(map(str, totals[1:]))
