"""Advantages of the responses to one prompt, relative to each other."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from mugrpo_jax.objectives._checks import check_choice, check_number, check_rank

ADVANTAGE_KINDS = ("std", "mean", "rloo", "batch_std")


def group_advantages(rewards: ArrayLike, *, kind: str = "std", eps: float = 1e-6) -> jax.Array:
    """Advantages from the rewards of groups of responses.

    With the mean over the group of G responses, and standard deviations as of a sample (n − 1):

        std        (r − mean) / (std of the group + eps)    GRPO, µ-GRPO
        mean       r − mean                                 Dr. GRPO (arXiv 2503.20783)
        rloo       r − mean of the other G − 1              leave-one-out (arXiv 2402.14740)
        batch_std  (r − mean) / (std of all rewards + eps)  group mean, one scale for the batch

    A group whose rewards are all equal says nothing: its advantages are exactly 0, for every kind.
    `equal_groups` counts them.

    Args:
      rewards: `[prompts, G]` with G at least 2.
      kind: one of `ADVANTAGE_KINDS`.
      eps: added to the standard deviation.

    Returns:
      `[prompts, G]` in float32. Reshape to `[B]` for the objectives.

    >>> rewards = jnp.array([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    >>> [round(float(a), 4) for a in group_advantages(rewards)[0]]
    [0.866, -0.866, -0.866, 0.866]
    >>> group_advantages(rewards, kind="rloo").round(4).tolist()[1]
    [0.0, 0.0, 0.0, 0.0]
    """
    check_choice("kind", kind, ADVANTAGE_KINDS)
    check_number("eps", eps)
    equal = equal_groups(rewards)[:, None]
    rewards = jnp.asarray(rewards).astype(jnp.float32)
    group = rewards.shape[1]
    centred = jnp.where(equal, 0.0, rewards - rewards.mean(axis=1, keepdims=True))
    if kind == "rloo":
        return centred * group / (group - 1)
    if kind == "mean":
        return centred
    spread = rewards.std(axis=1, ddof=1, keepdims=True) if kind == "std" else rewards.std(ddof=1)
    return centred / jnp.where(equal, 1.0, spread + eps)  # equal groups stay 0 even without an eps


def equal_groups(rewards: ArrayLike) -> jax.Array:
    """Which prompts gave all their responses the same reward, and so no signal.

    Args:
      rewards: `[prompts, G]` with G at least 2.

    Returns:
      `[prompts]` bool. Its sum is the count; its complement the groups that DAPO keeps.

    >>> int(equal_groups(jnp.array([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]])).sum())
    2
    """
    check_rank("rewards", rewards, 2, "[prompts, group]")
    rewards = jnp.asarray(rewards)
    if rewards.shape[1] < 2:
        raise ValueError(
            f"rewards has shape {rewards.shape}; possible: [prompts, group] with a group of 2 or more"
        )
    return rewards.max(axis=1) == rewards.min(axis=1)


def overlong_penalty(lengths: ArrayLike, *, max_length: int, buffer: int) -> jax.Array:
    """DAPO's soft penalty for responses that run into the generation budget (arXiv 2503.14476, section 3.4).

        min(0, −(L − (L_max − L_buf)) / L_buf)

    Args:
      lengths: lengths of the responses in tokens, any shape.
      max_length: L_max, the generation budget in tokens.
      buffer: L_buf, the number of tokens before the budget over which the penalty grows from 0 to −1.

    Returns:
      What to add to the rewards, in the shape of `lengths`.

    >>> overlong_penalty(jnp.array([50, 80, 90, 100]), max_length=100, buffer=20).tolist()
    [-0.0, -0.0, -0.5, -1.0]
    """
    check_number("max_length", max_length, strict=True)
    check_number("buffer", buffer, strict=True)
    over = jnp.asarray(lengths).astype(jnp.float32) - (max_length - buffer)
    return -jnp.maximum(0.0, over / buffer)
