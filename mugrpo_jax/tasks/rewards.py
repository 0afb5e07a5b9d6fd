"""Rewards: functions of a response and its problem, 1.0 for a right answer and 0.0 for a wrong one."""

from collections.abc import Mapping
from types import MappingProxyType

from mugrpo_jax.tasks.base import Problem, RewardFunction
from mugrpo_jax.tasks.countdown import countdown_reward


def exact_reward(response: str, problem: Problem) -> float:
    """1.0 if the response is the answer, up to white space at both ends."""
    return float(response.strip() == problem.answer.strip())


def arithmetic_reward(response: str, problem: Problem) -> float:
    """1.0 if what follows the last semicolon is the answer; without a semicolon there is no answer.

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
    }
)
