"""Find rewards by name. A reward is a function `reward(response, problem)`; 1.0 means a right answer."""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType

from mugrpo_jax.tasks.code_answers import program_of
from mugrpo_jax.tasks.code_reward import code_partial_reward, code_reward
from mugrpo_jax.tasks.code_tests import read_tests
from mugrpo_jax.tasks.countdown import countdown_answer, countdown_reward
from mugrpo_jax.tasks.gym_problems import gym_answer, gym_reward
from mugrpo_jax.tasks.math_answers import fast_math_reward, math_reward, vote_answer
from mugrpo_jax.tasks.own_functions import own_function
from mugrpo_jax.tasks.task import Problem, RewardFunction


def exact_reward(response: str, problem: Problem) -> float:
    """Return 1.0 if response and answer are equal, ignoring white space at both ends, otherwise 0.0."""
    return float(response.strip() == problem.answer.strip())


def arithmetic_reward(response: str, problem: Problem) -> float:
    """Return 1.0 if the text after the last semicolon is the answer, otherwise 0.0.

    >>> arithmetic_reward("7+8+0=15,3+5+1=09;95", Problem("1", "37+58=", "95"))
    1.0
    >>> arithmetic_reward("95", Problem("1", "37+58=", "95"))
    0.0
    """
    _, semicolon, answer = response.rpartition(";")
    return float(bool(semicolon) and answer.strip() == problem.answer)


_CODE = {"code": code_reward, "code_partial": code_partial_reward}

REWARDS: Mapping[str, RewardFunction] = MappingProxyType(
    {
        "exact": exact_reward,
        "arithmetic": arithmetic_reward,
        "countdown": countdown_reward,
        "math": math_reward,
        "reasoning_gym": gym_reward,
        **_CODE,
    }
)

CODE_REWARDS = tuple(_CODE)
"""Rewards that run the program in a response, in a sandbox."""

ANSWER_CHECKS: Mapping[str, Callable[[Problem], object]] = MappingProxyType(
    dict.fromkeys(CODE_REWARDS, read_tests)
)
"""For some rewards, a function that raises a ValueError if the reward cannot use the answer of a problem."""

FAST_REWARDS: Mapping[str, Callable[[str, Problem], float | None]] = MappingProxyType(
    {"math": fast_math_reward}
)
"""Fast functions for slow rewards. A function returns None if only the slow reward can score the response."""

ANSWER_READERS: Mapping[str, Callable[[str], str | None]] = MappingProxyType(
    {
        "exact": lambda response: response.strip() or None,
        "arithmetic": lambda response: (
            response.rpartition(";")[2].strip() or None if ";" in response else None
        ),
        "countdown": countdown_answer,
        "math": vote_answer,
        "reasoning_gym": gym_answer,
        "code": program_of,
        "code_partial": program_of,
    }
)
"""For each reward, a function that returns the answer in a response, or None if it has none.

Majority votes compare these answers. A response that ended without an answer is malformed."""


def load_reward(name: str, *, unsafe_sandbox: bool = False) -> RewardFunction:
    """Return a reward: `name` is a key of `REWARDS`, or `module:function` for a function of your own.

    With `unsafe_sandbox`, rewards in `CODE_REWARDS` run programs also where they cannot be isolated.

    >>> load_reward("exact") is exact_reward
    True
    >>> load_reward("mugrpo_jax.tasks.rewards:exact_rewards")
    Traceback (most recent call last):
    ValueError: reward '...:exact_rewards': the module has no 'exact_rewards'; did you mean exact_reward?
    """
    if name in CODE_REWARDS and unsafe_sandbox:
        unsafe: RewardFunction = functools.partial(_CODE[name], unsafe=True)
        return unsafe
    if name in REWARDS:
        return REWARDS[name]
    return own_function("reward", name, REWARDS, "(text, problem)")
