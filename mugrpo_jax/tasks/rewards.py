"""Rewards: functions `reward(response, problem)`, 1.0 for a right answer and 0.0 for a wrong one."""

import importlib
from collections.abc import Callable, Mapping
from types import MappingProxyType

from mugrpo_jax.tasks.countdown import countdown_reward
from mugrpo_jax.tasks.math_answers import fast_math_reward, math_reward, vote_answer
from mugrpo_jax.tasks.task import Problem, RewardFunction


def exact_reward(response: str, problem: Problem) -> float:
    """1.0 if the response equals the answer, ignoring white space at both ends."""
    return float(response.strip() == problem.answer.strip())


def arithmetic_reward(response: str, problem: Problem) -> float:
    """1.0 if the text after the last semicolon is the answer; 0.0 for a response without a semicolon.

    >>> arithmetic_reward("7+8+0=15,3+5+1=09;95", Problem("1", "37+58=", "95"))
    1.0
    >>> arithmetic_reward("95", Problem("1", "37+58=", "95"))
    0.0
    """
    _, semicolon, answer = response.rpartition(";")
    return float(bool(semicolon) and answer.strip() == problem.answer)


REWARDS: Mapping[str, RewardFunction] = MappingProxyType(
    {
        "exact": exact_reward,
        "arithmetic": arithmetic_reward,
        "countdown": countdown_reward,
        "math": math_reward,
    }
)

FAST_REWARDS: Mapping[str, Callable[[str, Problem], float | None]] = MappingProxyType(
    {"math": fast_math_reward}
)
"""Fast exact versions of slow rewards. They return None to leave a response to the worker pool."""

ANSWER_READERS: Mapping[str, Callable[[str], str | None]] = MappingProxyType(
    {
        "exact": str.strip,
        "arithmetic": lambda response: response.rpartition(";")[2].strip() if ";" in response else None,
        "math": vote_answer,
    }
)
"""For each reward, a function that reads the answer from a response, for majority votes."""


def load_reward(name: str) -> RewardFunction:
    """A reward of `REWARDS` by its name, or a user's own by `module:function`.

    >>> load_reward("exact") is exact_reward
    True
    >>> load_reward("mugrpo_jax.tasks.rewards:exact_rewards")
    Traceback (most recent call last):
    ValueError: reward 'mugrpo_jax.tasks.rewards:exact_rewards': the module has no 'exact_rewards'
    """
    if name in REWARDS:
        return REWARDS[name]
    module_name, colon, attribute = name.partition(":")
    if not (colon and module_name and attribute):
        raise ValueError(f"reward is {name!r}; possible: {', '.join(REWARDS)} or module:function")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ValueError(f"reward {name!r}: cannot import {module_name!r}: {error!r}") from error
    function = getattr(module, attribute, None)
    if function is None:
        raise ValueError(f"reward {name!r}: the module has no {attribute!r}")
    if not callable(function):
        raise ValueError(
            f"reward {name!r} is a {type(function).__name__}; possible: a function (text, problem)"
        )
    return function
