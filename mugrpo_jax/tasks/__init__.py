"""Define the problems that a run trains and tests on, and the rewards that score responses.

A `Problem` is a prompt with its answer. A `Task` has training problems, test problems, and the name of a
reward. A reward is a function `reward(response, problem)` that returns a number, usually 1.0 for a right
answer and 0.0 for a wrong answer. A `Scorer` calls the reward, in worker processes if the reward may be slow.
A `WeightedScorer` adds up several rewards.

`load_task(name, **options)` makes a task: from a generator (a key of `GENERATORS`), from a known dataset
(`PRESETS`), or from your own files (`dataset`). No module in this package imports jax,
because the worker processes must start fast.
"""

import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from mugrpo_jax.tasks.arithmetic import ARITHMETIC_ALPHABET as ARITHMETIC_ALPHABET
from mugrpo_jax.tasks.arithmetic import arithmetic as arithmetic
from mugrpo_jax.tasks.benchmark_presets import PRESETS as PRESETS
from mugrpo_jax.tasks.benchmark_presets import Preset as Preset
from mugrpo_jax.tasks.benchmark_presets import preset_task as preset_task
from mugrpo_jax.tasks.calculator import calculator as calculator
from mugrpo_jax.tasks.calculator import tool_sums as tool_sums
from mugrpo_jax.tasks.chains import chains as chains
from mugrpo_jax.tasks.code_answers import program_of as program_of
from mugrpo_jax.tasks.code_reward import code_partial_reward as code_partial_reward
from mugrpo_jax.tasks.code_reward import code_reward as code_reward
from mugrpo_jax.tasks.code_tests import CodeTest as CodeTest
from mugrpo_jax.tasks.code_tests import read_tests as read_tests
from mugrpo_jax.tasks.countdown import countdown as countdown
from mugrpo_jax.tasks.countdown import countdown_reward as countdown_reward
from mugrpo_jax.tasks.countdown import evaluate_expression as evaluate_expression
from mugrpo_jax.tasks.dataset_files import ANSWER_PARTS as ANSWER_PARTS
from mugrpo_jax.tasks.dataset_files import Columns as Columns
from mugrpo_jax.tasks.dataset_files import count_problems as count_problems
from mugrpo_jax.tasks.dataset_files import dataset_task as dataset_task
from mugrpo_jax.tasks.dataset_files import first_columns as first_columns
from mugrpo_jax.tasks.dataset_files import load_problems as load_problems
from mugrpo_jax.tasks.environments import ENVIRONMENTS as ENVIRONMENTS
from mugrpo_jax.tasks.environments import Answer as Answer
from mugrpo_jax.tasks.environments import Environment as Environment
from mugrpo_jax.tasks.environments import load_environment as load_environment
from mugrpo_jax.tasks.environments import open_environment as open_environment
from mugrpo_jax.tasks.gym_problems import reasoning_gym as reasoning_gym
from mugrpo_jax.tasks.math_answers import final_answer as final_answer
from mugrpo_jax.tasks.math_answers import math_reward as math_reward
from mugrpo_jax.tasks.math_answers import same_answer as same_answer
from mugrpo_jax.tasks.multiplication import multiplication as multiplication
from mugrpo_jax.tasks.near_names import possible_names
from mugrpo_jax.tasks.programs import programs as programs
from mugrpo_jax.tasks.rewards import ANSWER_CHECKS as ANSWER_CHECKS
from mugrpo_jax.tasks.rewards import ANSWER_READERS as ANSWER_READERS
from mugrpo_jax.tasks.rewards import CODE_REWARDS as CODE_REWARDS
from mugrpo_jax.tasks.rewards import REWARDS as REWARDS
from mugrpo_jax.tasks.rewards import arithmetic_reward as arithmetic_reward
from mugrpo_jax.tasks.rewards import exact_reward as exact_reward
from mugrpo_jax.tasks.rewards import load_reward as load_reward
from mugrpo_jax.tasks.sandbox import Limits as Limits
from mugrpo_jax.tasks.sandbox import check_sandbox as check_sandbox
from mugrpo_jax.tasks.sandbox import run_program as run_program
from mugrpo_jax.tasks.scoring import FAILURES as FAILURES
from mugrpo_jax.tasks.scoring import STATUSES as STATUSES
from mugrpo_jax.tasks.scoring import InlineScorer as InlineScorer
from mugrpo_jax.tasks.scoring import Score as Score
from mugrpo_jax.tasks.scoring import Scorer as Scorer
from mugrpo_jax.tasks.scoring_pool import ScoringPool as ScoringPool
from mugrpo_jax.tasks.scoring_pool import make_scorer as make_scorer
from mugrpo_jax.tasks.task import Message as Message
from mugrpo_jax.tasks.task import Problem as Problem
from mugrpo_jax.tasks.task import Prompt as Prompt
from mugrpo_jax.tasks.task import RewardFunction as RewardFunction
from mugrpo_jax.tasks.task import Task as Task
from mugrpo_jax.tasks.task import Verdict as Verdict
from mugrpo_jax.tasks.task import conversation_of as conversation_of
from mugrpo_jax.tasks.weighted_scorer import WeightedScorer as WeightedScorer
from mugrpo_jax.tasks.word_problems import word_problems as word_problems

GENERATORS: Mapping[str, Callable[..., Task]] = MappingProxyType(
    {
        "arithmetic": arithmetic,
        "word_problems": word_problems,
        "countdown": countdown,
        "chains": chains,
        "multiplication": multiplication,
        "programs": programs,
        "tool_sums": tool_sums,
        "reasoning_gym": reasoning_gym,
    }
)


def load_task(name: str, /, **options: Any) -> Task:
    """Make the task `name`: a key of `GENERATORS`, a key of `PRESETS`, or `dataset` for your own files.

    `options` are the arguments of the generator, of `preset_task` or of `dataset_task`.

    >>> load_task("arithmetic", difficulty=3, train=10, test=2).name
    'arithmetic'
    >>> load_task("arithmetics")
    Traceback (most recent call last):
    ValueError: task is 'arithmetics'; did you mean arithmetic? possible: arithmetic, ...
    """
    return task_maker(name, options)(**options)


def task_maker(name: str, options: Mapping[str, Any]) -> Callable[..., Task]:
    """Return the function that makes the task. Check the name and the options, but read no data."""
    make: Callable[..., Task]
    if name in GENERATORS:
        make = GENERATORS[name]
    elif name == "dataset":
        make = dataset_task
    elif name in PRESETS:
        make = functools.partial(preset_task, name)
    else:
        if name.endswith((".jsonl", ".parquet")) or name.startswith("hub:"):
            raise ValueError(
                f"task is {name!r}; write name: dataset and options: {{train: {name}}}, or for `mugrpo eval` "
                f"--task dataset --option test={name}"
            )
        raise ValueError(f"task is {name!r}; {possible_names(name, [*GENERATORS, 'dataset', *PRESETS])}")
    known = inspect.signature(make).parameters
    for option, value in options.items():
        if option not in known:
            raise ValueError(f"task {name!r} has no option {option!r}; {possible_names(option, known)}")
        kinds = _kinds(known[option].annotation)
        if not any(_is(value, kind) for kind in kinds):
            possible = ", ".join(dict.fromkeys(_KINDS[kind] for kind in kinds))
            raise ValueError(f"{name}: {option} is {value!r}; possible: {possible}")
    return make


_KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Columns: "keys and values",
    Mapping: "keys and values",
    types.NoneType: "null",
}


def _kinds(annotation: Any) -> list[type]:
    """Return the types in the annotation of an argument, which is a type or a union of types."""
    union = isinstance(annotation, types.UnionType)
    return [
        typing.get_origin(kind) or kind for kind in (typing.get_args(annotation) if union else [annotation])
    ]


def _is(value: Any, kind: type) -> bool:
    if isinstance(value, bool):  # in Python, True is also an int
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)
