"""Make the scorer of a run, and stop a run whose reward fails for most responses."""

from collections.abc import Callable, Mapping

from mugrpo_jax.config import ConfigError, RunConfig
from mugrpo_jax.tasks import ANSWER_READERS, FAILURES, Scorer, Task, make_scorer

_FEW = 16  # a share of fewer responses says little


def run_scorer(config: RunConfig, task: Task, *, workers: int | None = None) -> Scorer:
    """Return the scorer that the config describes; `workers` replaces `task.scorers`."""
    weights = reward_weights(config, task)
    return reward_scorer(config, weights if config.task.several_rewards else next(iter(weights)), workers)


def reward_scorer(config: RunConfig, reward: str | Mapping[str, float], workers: int | None) -> Scorer:
    """Return the scorer of a reward, or of several with their weights, with the limits of the config."""
    return make_scorer(
        reward,
        workers=config.task.scorers if workers is None else workers,
        deadline_s=config.task.deadline,
        memory_mb=config.task.scorer_memory_mb,
        max_failed=config.task.max_failed,
        unsafe_sandbox=config.task.unsafe_sandbox,
    )


def answer_reader(config: RunConfig, task: Task) -> Callable[[str], str | None] | None:
    """Return the function that reads the answer in a response; None for a reward of the user's own.

    Of several rewards, the first one says whether an answer is right, so its answers are read.
    """
    return ANSWER_READERS.get(next(iter(reward_weights(config, task))))


def reward_weights(config: RunConfig, task: Task) -> dict[str, float]:
    """Return the names and weights of the rewards: those of the config, or else that of the task."""
    chosen = config.task.reward or task.reward
    return {chosen: 1.0} if isinstance(chosen, str) else {part.name: part.weight for part in chosen}


def check_failed(
    config: RunConfig, what: str, statuses: Mapping[str, int], examples: Mapping[str, str], remedy: str
) -> None:
    """Raise an error if the share of failed rewards is above `task.max_failed`.

    Args:
      what: names the responses in the error, such as `stage 0`.
      statuses: number of responses of each status; those in `FAILURES` mean that the reward failed.
      examples: a text about one response, for some of the other statuses.
      remedy: what to do after the reward is mended, at the end of the error.
    """
    limit, total = config.task.max_failed, sum(statuses.values())
    failures = {name: count for name, count in statuses.items() if name in FAILURES}
    failed = sum(failures.values())
    if total < _FEW or failed <= limit * total:
        return
    often = max(failures, key=lambda name: failures[name])
    who = "the reward" if config.environment.name is None else "the environment or the reward"
    raise ConfigError(
        f"{what}: {who} failed for {failed} of {total} responses, more than the share task.max_failed="
        f"{limit:g}; most often: {often} ({examples.get(often, 'see mugrpo rollouts')}); {remedy}"
    )
