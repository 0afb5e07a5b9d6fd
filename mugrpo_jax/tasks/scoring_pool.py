"""Score responses in worker processes with a deadline."""

import math
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

from mugrpo_jax.tasks.processors import usable_processors
from mugrpo_jax.tasks.rewards import CODE_REWARDS, FAST_REWARDS, load_reward
from mugrpo_jax.tasks.sandbox import check_sandbox
from mugrpo_jax.tasks.scoring import InlineScorer, Score, Scorer, finished_future
from mugrpo_jax.tasks.task import Problem
from mugrpo_jax.tasks.weighted_scorer import WeightedScorer
from mugrpo_jax.tasks.worker_pool import WorkerPool

INLINE_REWARDS = ("exact", "arithmetic", "countdown")


def make_scorer(
    reward: str | Mapping[str, float],
    *,
    workers: int | None = None,
    deadline_s: float = 5.0,
    memory_mb: int = 2048,
    failed: float = 0.0,
    max_failed: float = 1.0,
    unsafe_sandbox: bool = False,
) -> Scorer:
    """Make a scorer for a reward, or for the weighted sum of several.

    Args:
      reward: a name for `load_reward`, or several names with their weights.
      workers: number of worker processes. 0 means to score in this process, without a deadline. None means 0
        for the rewards in `INLINE_REWARDS`, which are fast, and one worker per processor that this process
        may use for all other rewards. Each of several rewards has so many workers of its own.
      deadline_s: most seconds that a worker may take for one response.
      memory_mb: most megabytes of address space of a worker (only enforced on Linux).
      failed: score of a response whose reward failed.
      max_failed: share of responses whose reward may fail, see `Scorer`; 1 means no limit.
      unsafe_sandbox: whether the rewards in `CODE_REWARDS` may run programs without isolation.
    """
    if not isinstance(reward, str):
        limits: dict[str, Any] = {"workers": workers, "deadline_s": deadline_s, "memory_mb": memory_mb}
        limits["unsafe_sandbox"] = unsafe_sandbox
        with ExitStack() as opened:  # closes the others if one cannot be made
            scorers = {
                name: opened.enter_context(make_scorer(name, failed=failed, **limits)) for name in reward
            }
            opened.pop_all()
        return WeightedScorer(scorers, reward, failed=failed, max_failed=max_failed)
    if reward in CODE_REWARDS:
        check_sandbox(unsafe=unsafe_sandbox)
    if workers is None:
        workers = 0 if reward in INLINE_REWARDS else usable_processors()
    if workers == 0:
        return InlineScorer(reward, failed=failed, max_failed=max_failed, unsafe_sandbox=unsafe_sandbox)
    return ScoringPool(
        reward,
        workers=workers,
        deadline_s=deadline_s,
        memory_mb=memory_mb,
        failed=failed,
        max_failed=max_failed,
        unsafe_sandbox=unsafe_sandbox,
    )


class ScoringPool(Scorer):
    """Scores responses in worker processes, see `worker_pool`."""

    def __init__(
        self,
        reward: str,
        *,
        workers: int,
        deadline_s: float = 5.0,
        memory_mb: int = 2048,
        failed: float = 0.0,
        max_failed: float = 1.0,
        unsafe_sandbox: bool = False,
    ):
        super().__init__(failed, max_failed)
        self._fast_reward = FAST_REWARDS.get(reward)
        load_reward(reward)  # raises an error for a wrong name here and not in a worker
        hello = {"kind": "reward", "name": reward, "unsafe_sandbox": unsafe_sandbox}
        self._pool = WorkerPool(hello, workers=workers, deadline_s=deadline_s, memory_mb=memory_mb)

    def submit(self, text: str, problem: Problem) -> "Future[Score]":
        """Score the response at once if a function in `FAST_REWARDS` can, otherwise queue the response."""
        value = None if self._fast_reward is None else self._fast_reward(text, problem)
        if value is None:
            return self._pool.submit({"text": text, "problem": problem.as_dict()}, self._read)
        return finished_future(self._count(Score(value)))

    def close(self) -> None:
        """Remove all responses from the queue and end the workers."""
        self._pool.close()

    def _read(self, reply: dict[str, Any]) -> Score:
        return self._count(Score(**{"value": math.nan} | reply))
