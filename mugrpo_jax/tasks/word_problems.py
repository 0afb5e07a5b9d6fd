"""Generate the task `word_problems`: English word problems with one to four steps of calculation."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from mugrpo_jax.tasks.synthetic_task import check_integer, generated_task
from mugrpo_jax.tasks.task import Problem, Task, as_prompt

NAMES = (
    *("Ada", "Amir", "Ben", "Chloe", "Dora", "Elena", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Kira"),
    *("Liam", "Mia", "Nadia", "Omar", "Priya", "Quinn", "Rosa", "Samir", "Tara", "Uma", "Viktor", "Yuki"),
)
ITEMS = (
    *("apples", "books", "buttons", "candles", "cards", "coins", "cookies", "eggs", "flowers", "marbles"),
    *("oranges", "pencils", "photos", "ribbons", "shells", "stamps", "stickers", "tickets", "toys", "tulips"),
)
BOXES = ("bags", "baskets", "boxes", "crates", "drawers", "jars", "packs", "trays")
PLACES = ("at the market", "in the attic", "at school", "in the park", "at the fair", "near the lake")

INSTRUCTION = "Work step by step. End with #### and the answer."


@dataclass(frozen=True)
class _Scene:
    """The words that fill the sentences of one problem, and the number of items that `name` has so far."""

    name: str
    friend: str
    items: str
    boxes: str
    place: str
    has: int = 0


@dataclass(frozen=True)
class _Step:
    """One step of a problem: `told` is its sentence, `worked` its calculation, `result` the new number."""

    kind: str
    numbers: tuple[int, ...]
    told: str
    worked: str
    result: int


_Maker = Callable[[random.Random, _Scene], _Step | None]
_LARGEST = 1000


def word_problems(
    *, seed: int = 0, difficulty: int = 2, train: int = 100_000, test: int = 512, chat: bool = True
) -> Task:
    """Make a task whose problems have `difficulty` (1 to 4) steps. Worked solutions end with `#### N`.

    Problems with the same steps and numbers are the same problem, even if their names and items differ. With
    `chat`, a prompt is a chat message, otherwise plain text.

    >>> problem = word_problems(difficulty=2, chat=False).train[0]
    >>> problem.solution.endswith("#### " + problem.answer)
    True
    """
    check_integer("word_problems", "difficulty", difficulty, 1, 4)

    def draw(rng: random.Random) -> tuple[str, Problem]:
        steps, question = _story(rng, difficulty)
        told = " ".join([*(step.told for step in steps), question])
        worked = "\n".join([*(step.worked for step in steps), f"#### {steps[-1].result}"])
        key = "|".join(f"{step.kind} {step.numbers}" for step in steps)
        return key, Problem("", as_prompt(f"{told}\n{INSTRUCTION}", chat), str(steps[-1].result), worked)

    return generated_task("word_problems", draw, "math", seed=seed, train=train, test=test)


def _story(rng: random.Random, count: int) -> tuple[list[_Step], str]:
    """Draw `count` steps and a question; discard a story in which a step is impossible, and draw again."""
    while True:
        name, friend = rng.sample(NAMES, 2)
        scene = _Scene(name, friend, rng.choice(ITEMS), rng.choice(BOXES), rng.choice(PLACES))
        steps = _chain(rng, scene, count)
        if steps is not None:
            question = _QUESTIONS.get(steps[-1].kind, "How many {items} does {name} have now?")
            return steps, question.format(**vars(scene))


def _chain(rng: random.Random, scene: _Scene, count: int) -> list[_Step] | None:
    steps: list[_Step] = []
    for i in range(count):
        makers = (_OPENINGS if i == 0 else _MIDDLES) + (_ENDINGS if i == count - 1 and i > 0 else ())
        step = rng.choice(makers)(rng, scene)
        if step is None or not 0 < step.result <= _LARGEST:
            return None
        steps.append(step)
        scene = _Scene(**{**vars(scene), "has": step.result})
    return steps


def _step(rng: random.Random, scene: _Scene, kind: str, told: tuple[str, ...], sum_: str, **n: int) -> _Step:
    """Make a step from a random sentence in `told`. `sum_` is the calculation, such as `{has} + {a}`."""
    words = {**vars(scene), **n}
    calculation = sum_.format(**words)
    result = _calculate(calculation)
    noun = _NOUNS.get(kind, "{items}").format(**words)
    worked = f"{calculation} = {result} {noun}."
    return _Step(kind, (*n.values(),), rng.choice(told).format(**words), worked, result)


def _calculate(calculation: str) -> int:
    left, operator, right = calculation.split()
    a, b = int(left), int(right)
    return {"+": a + b, "-": a - b, "*": a * b, "/": a // b}[operator]


def _bought(rng: random.Random, scene: _Scene) -> _Step:
    told = (
        "{name} has {a} {items} and buys {b} more {place}.",
        "{name} finds {a} {items} {place}, and {friend} gives {name} {b} more.",
        "There are {a} {items} on {name}'s table. {name} puts {b} more {items} next to them.",
    )
    return _step(rng, scene, "sum", told, "{a} + {b}", a=rng.randint(2, 60), b=rng.randint(2, 60))


def _lost(rng: random.Random, scene: _Scene) -> _Step:
    told = (
        "{name} had {a} {items} but lost {b} of them {place}.",
        "{name} starts the day with {a} {items} and gives {b} to {friend}.",
        "Out of {a} {items}, {name} uses {b} {place}.",
    )
    a = rng.randint(6, 90)
    return _step(rng, scene, "difference", told, "{a} - {b}", a=a, b=rng.randint(2, a - 2))


def _packed(rng: random.Random, scene: _Scene) -> _Step:
    told = (
        "{name} has {a} {boxes} with {b} {items} in each.",
        "{name} fills {a} {boxes} {place} and puts {b} {items} into every one.",
        "For {a} days {name} collects {b} {items} a day.",
    )
    return _step(rng, scene, "product", told, "{a} * {b}", a=rng.randint(2, 12), b=rng.randint(2, 12))


def _divided(rng: random.Random, scene: _Scene) -> _Step:
    told = (
        "{a} {items} are shared equally among {b} children, and {name} is one of them.",
        "{name} spreads {a} {items} evenly over {b} {boxes} and keeps one of the {boxes}.",
    )
    b = rng.randint(2, 12)
    return _step(rng, scene, "quotient", told, "{a} / {b}", a=b * rng.randint(2, 12), b=b)


def _gets(rng: random.Random, scene: _Scene) -> _Step:
    told = (
        "Then {friend} brings {a} more {items}.",
        "Later {name} buys another {a} {items}.",
        "{name} finds {a} more {items} {place}.",
    )
    return _step(rng, scene, "gets", told, "{has} + {a}", a=rng.randint(2, 60))


def _gives(rng: random.Random, scene: _Scene) -> _Step | None:
    if scene.has < 4:
        return None
    told = (
        "Then {name} gives {a} {items} to {friend}.",
        "After that {a} of the {items} get lost.",
        "{name} sells {a} of the {items} {place}.",
    )
    return _step(rng, scene, "gives", told, "{has} - {a}", a=rng.randint(2, scene.has - 2))


def _multiplies(rng: random.Random, scene: _Scene) -> _Step:
    told = (
        "By the end of the month {name} has {a} times as many {items}.",
        "A year later the number of {items} is {a} times as large.",
    )
    return _step(rng, scene, "times", told, "{has} * {a}", a=rng.randint(2, 6))


def _shares(rng: random.Random, scene: _Scene) -> _Step | None:
    divisors = [d for d in range(2, 13) if scene.has % d == 0 and scene.has > d]
    if not divisors:
        return None
    told = (
        "{name} divides the {items} equally into {a} {boxes} and keeps only one of the {boxes}.",
        "The {items} are shared equally by {a} people, {name} being one of them.",
    )
    return _step(rng, scene, "shares", told, "{has} / {a}", a=rng.choice(divisors))


def _sells_all(rng: random.Random, scene: _Scene) -> _Step:
    told = (
        "{name} then sells all of them for {a} dollars each.",
        "A shop pays {name} {a} dollars for each of the {items}.",
    )
    return _step(rng, scene, "price", told, "{has} * {a}", a=rng.randint(2, 9))


def _together(rng: random.Random, scene: _Scene) -> _Step:
    told = ("{friend} has {a} {items}.", "{friend} owns {a} {items} of the same kind.")
    return _step(rng, scene, "together", told, "{has} + {a}", a=rng.randint(2, 60))


def _missing(rng: random.Random, scene: _Scene) -> _Step:
    told = ("{name} wants to have {a} {items}.", "An album of {name} holds exactly {a} {items}.")
    return _step(rng, scene, "missing", told, "{a} - {has}", a=scene.has + rng.randint(2, 60))


_OPENINGS: tuple[_Maker, ...] = (_bought, _lost, _packed, _divided)
_MIDDLES: tuple[_Maker, ...] = (_gets, _gives, _multiplies, _shares)
_ENDINGS: tuple[_Maker, ...] = (_sells_all, _together, _missing)

_QUESTIONS = {
    "price": "How many dollars does {name} get?",
    "together": "How many {items} do {name} and {friend} have together?",
    "missing": "How many {items} are still missing?",
}
_NOUNS = {"price": "dollars"}
