"""Prompts and how an answer is scored. Nothing here imports jax: scoring workers start from this package."""

from mugrpo_jax.tasks.arithmetic import ARITHMETIC_ALPHABET, arithmetic
from mugrpo_jax.tasks.base import Message, Problem, Prompt, RewardFunction, Task
from mugrpo_jax.tasks.countdown import countdown, countdown_reward, evaluate_expression
from mugrpo_jax.tasks.rewards import REWARDS, arithmetic_reward, exact_reward
from mugrpo_jax.tasks.word_problems import word_problems

__all__ = [
    "ARITHMETIC_ALPHABET",
    "REWARDS",
    "Message",
    "Problem",
    "Prompt",
    "RewardFunction",
    "Task",
    "arithmetic",
    "arithmetic_reward",
    "countdown",
    "countdown_reward",
    "evaluate_expression",
    "exact_reward",
    "word_problems",
]
