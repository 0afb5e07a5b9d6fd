"""Generate the task `reasoning_gym`: the problems and scorers of the package reasoning-gym."""

import dataclasses
import functools
import json
import random
import re
from collections.abc import Mapping
from typing import Any

from mugrpo_jax.tasks.near_names import possible_names
from mugrpo_jax.tasks.synthetic_task import check_integer, generated_task
from mugrpo_jax.tasks.task import Problem, Task, as_prompt

INSTRUCTION = "Write the answer between <answer> and </answer>."
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def reasoning_gym(
    *,
    generator: str = "",
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    size: int = 1 << 20,
    train: int = 100_000,
    test: int = 256,
    chat: bool = False,
    instruction: str = INSTRUCTION,
) -> Task:
    """Make a task from a generator of reasoning-gym, scored by the generator's own scorer.

    A question is for training or for tests by its hash, so no held-out question is a training question, with
    any seed. All held-out questions are different.

    Args:
      generator: the name of a generator, such as `chain_sum`.
      options: the settings of the generator, without `seed` and `size`.
      size: number of problems that the generator offers. A few generators prepare all of them at the start,
        such as `acre` and `word_ladder`, and need a smaller number.
      chat: whether a prompt is a chat message instead of plain text.
      instruction: how to give the answer; it stands behind the question.
    """
    check_integer("reasoning_gym", "size", size, 1, 1 << 31)
    facts = {"generator": generator, "seed": seed, "size": size, "options": dict(options or {})}
    _dataset(json.dumps(facts, sort_keys=True))

    def draw(rng: random.Random) -> tuple[str, Problem]:
        place = facts | {"index": rng.randrange(size)}
        entry = _entry(json.dumps(place, sort_keys=True))
        question = str(entry["question"])
        answer = json.dumps({"answer": str(entry["answer"])} | place)
        return question, Problem("", as_prompt(f"{question}\n{instruction}".strip(), chat), answer)

    name = f"reasoning_gym {generator}"
    return generated_task(name, draw, "reasoning_gym", seed=seed, train=train, test=test)


def gym_reward(response: str, problem: Problem) -> float:
    """Return the score that the problem's generator gives to the answer in the response, from 0 to 1."""
    place = json.loads(problem.answer)
    del place["answer"]
    entry = _entry(json.dumps(place, sort_keys=True))
    dataset = _dataset(json.dumps({k: v for k, v in place.items() if k != "index"}, sort_keys=True))
    return float(dataset.score_answer(gym_answer(response) or response.strip(), entry))


def gym_answer(response: str) -> str | None:
    """Return the text in the last `<answer>...</answer>`; None if there is none.

    >>> gym_answer("so <answer>4</answer>, no: <answer> 5 </answer>"), gym_answer("5")
    ('5', None)
    """
    found = _ANSWER.findall(response)
    return found[-1].strip() if found else None


@functools.lru_cache(maxsize=256)
def _entry(place: str) -> Mapping[str, Any]:
    """Return the problem at a place, which JSON describes; the responses to one prompt need it often."""
    facts = json.loads(place)
    index = facts.pop("index")
    return _dataset(json.dumps(facts, sort_keys=True))[index]


@functools.lru_cache(maxsize=16)
def _dataset(facts: str) -> Any:
    """Return a generator of reasoning-gym; one line says what is wrong with its name or options."""
    wanted = json.loads(facts)
    name, options = wanted["generator"], wanted["options"]
    try:
        import reasoning_gym as gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ValueError(
            f"task reasoning_gym needs the package reasoning-gym ({error}): "
            "pip install 'mugrpo-jax[reasoning-gym]'"
        ) from None
    if name not in DATASETS:
        raise ValueError(f"reasoning_gym: generator is {name!r}; {possible_names(name, sorted(DATASETS))}")
    fields = (field.name for field in dataclasses.fields(DATASETS[name][1]))
    known = [field for field in fields if field not in ("seed", "size")]
    for option in options:
        if option not in known:
            raise ValueError(
                f"reasoning_gym: {name} has no option {option!r}; {possible_names(option, known)}"
            )
    try:
        return gym.create_dataset(name, seed=wanted["seed"], size=wanted["size"], **options)
    except Exception as error:  # generators check their options with assertions
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"reasoning_gym: {name} refuses its options: {reason}") from None
