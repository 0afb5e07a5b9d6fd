"""Prompts and how an answer is scored. Nothing here imports jax: scoring workers start from this package."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from mugrpo_jax.tasks.arithmetic import ARITHMETIC_ALPHABET, arithmetic
from mugrpo_jax.tasks.base import Message, Problem, Prompt, RewardFunction, Task
from mugrpo_jax.tasks.countdown import countdown, countdown_reward, evaluate_expression
from mugrpo_jax.tasks.math_answers import final_answer, math_reward, same_answer
from mugrpo_jax.tasks.presets import PRESETS, Preset, preset_task
from mugrpo_jax.tasks.rewards import ANSWERS, REWARDS, arithmetic_reward, exact_reward, load_reward
from mugrpo_jax.tasks.scoring import STATUSES, InlineScorer, Score, Scorer, ScoringPool, make_scorer
from mugrpo_jax.tasks.sources import ANSWER_PARTS, Columns, dataset_task, load_problems
from mugrpo_jax.tasks.word_problems import word_problems

GENERATORS: Mapping[str, Callable[..., Task]] = MappingProxyType(
    {"arithmetic": arithmetic, "word_problems": word_problems, "countdown": countdown}
)


def load_task(name: str, **options: Any) -> Task:
    """A task by name: a generator, a preset, or `dataset` for a user's own files.

    Options are those of the generator, of `preset_task` or of `dataset_task`.

    >>> load_task("arithmetic", difficulty=3, train=10, test=2).name
    'arithmetic'
    >>> load_task("arithmetics")
    Traceback (most recent call last):
    ValueError: task is 'arithmetics'; possible: arithmetic, word_problems, countdown, dataset, gsm8k, ...
    """
    return task_maker(name, options)(**options)


def task_maker(name: str, options: Iterable[str]) -> Callable[..., Task]:
    """What makes a task by name, if it has these options: `load_task` without reading anything."""
    make: Callable[..., Task]
    if name in GENERATORS:
        make = GENERATORS[name]
    elif name == "dataset":
        make = dataset_task
    elif name in PRESETS:
        make = functools.partial(preset_task, name)
    else:
        raise ValueError(f"task is {name!r}; possible: {', '.join([*GENERATORS, 'dataset', *PRESETS])}")
    known = inspect.signature(make).parameters
    for option in options:
        if option not in known:
            raise ValueError(f"task {name!r} has no option {option!r}; possible: {', '.join(known)}")
    return make


__all__ = [
    "ANSWERS",
    "ANSWER_PARTS",
    "ARITHMETIC_ALPHABET",
    "GENERATORS",
    "PRESETS",
    "REWARDS",
    "STATUSES",
    "Columns",
    "InlineScorer",
    "Message",
    "Preset",
    "Problem",
    "Prompt",
    "RewardFunction",
    "Score",
    "Scorer",
    "ScoringPool",
    "Task",
    "arithmetic",
    "arithmetic_reward",
    "countdown",
    "countdown_reward",
    "dataset_task",
    "evaluate_expression",
    "exact_reward",
    "final_answer",
    "load_problems",
    "load_reward",
    "load_task",
    "make_scorer",
    "math_reward",
    "preset_task",
    "same_answer",
    "task_maker",
    "word_problems",
]
