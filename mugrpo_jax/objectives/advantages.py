"""Compute advantages by comparing the responses to the same prompt.

For NumPy arrays, the functions return NumPy arrays, so that a data loader needs no device. They then compute
in float64, so that the square of a large reward is finite. For all other inputs, they return JAX arrays.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from mugrpo_jax.objectives._checks import check_choice, check_number, check_rank

ADVANTAGE_KINDS = ("std", "mean", "rloo", "batch_std")


def group_advantages(rewards: ArrayLike, *, kind: str = "std", eps: float = 1e-6) -> Any:
    """Compute the advantages of responses from the rewards of their groups.

    r is the reward of a response, G the number of responses in its group, and mean the mean reward of the
    group. The standard deviation (std) of n rewards is computed with the divisor n − 1:

        std        (r − mean) / (std of the group + eps)    GRPO, µ-GRPO
        mean       r − mean                                 Dr. GRPO (arXiv 2503.20783)
        rloo       r − mean of the other G − 1              leave-one-out (arXiv 2402.14740)
        batch_std  (r − mean) / (std of all rewards + eps)  group mean, one scale for the batch

    If all rewards of a group are equal (see `equal_groups`), its advantages are exactly 0 for every kind.

    Args:
      rewards: `[prompts, G]` with G at least 2.
      kind: one of `ADVANTAGE_KINDS`.
      eps: a small number that is added to the standard deviation.

    Returns:
      The advantages `[prompts, G]` in float32. Reshape them to `[B]` for the objectives.

    >>> rewards = jnp.array([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    >>> [round(float(a), 4) for a in group_advantages(rewards)[0]]
    [0.866, -0.866, -0.866, 0.866]
    >>> group_advantages(rewards, kind="rloo").round(4).tolist()[1]
    [0.0, 0.0, 0.0, 0.0]
    """
    check_choice("kind", kind, ADVANTAGE_KINDS)
    check_number("eps", eps)
    library = _library(rewards)
    equal = equal_groups(rewards)[:, None]
    values = library.asarray(rewards).astype(np.float64 if library is np else jnp.float32)
    group = values.shape[1]
    centred = library.where(equal, 0.0, values - values.mean(axis=1, keepdims=True))
    if kind == "rloo":
        return (centred * group / (group - 1)).astype(jnp.float32)
    if kind == "mean":
        return centred.astype(jnp.float32)
    spread = values.std(axis=1, ddof=1, keepdims=True) if kind == "std" else values.std(ddof=1)
    # Equal groups stay 0 even without an eps.
    return (centred / library.where(equal, 1.0, spread + eps)).astype(jnp.float32)


def equal_groups(rewards: ArrayLike) -> Any:
    """Return a mask `[prompts]` that is True for each group whose rewards are all equal.

    `rewards` is `[prompts, G]` with G at least 2. DAPO trains only on the groups where the mask is False.

    >>> int(equal_groups(jnp.array([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]])).sum())
    2
    """
    check_rank("rewards", rewards, 2, "[prompts, group]")
    values = _library(rewards).asarray(rewards)
    if values.shape[1] < 2:
        raise ValueError(
            f"rewards has shape {values.shape}; possible: [prompts, group] with a group of 2 or more"
        )
    return values.max(axis=1) == values.min(axis=1)


def overlong_penalty(lengths: ArrayLike, *, max_length: int, buffer: int) -> Any:
    """Return DAPO's soft penalty for responses near the maximum length (arXiv 2503.14476, section 3.4).

        min(0, −(L − (L_max − L_buf)) / L_buf)

    Args:
      lengths: L, the lengths of the responses in tokens, an array of any shape.
      max_length: L_max, the maximum number of tokens in a response.
      buffer: L_buf. The penalty goes from 0 to −1 over the last L_buf tokens before L_max.

    Returns:
      The penalties, which are 0 or negative, in the shape of `lengths`. Add them to the rewards.

    >>> overlong_penalty(jnp.array([50, 80, 90, 100]), max_length=100, buffer=20).tolist()
    [-0.0, -0.0, -0.5, -1.0]
    """
    check_number("max_length", max_length, strict=True)
    check_number("buffer", buffer, strict=True)
    library = _library(lengths)
    over = library.asarray(lengths).astype(jnp.float32) - (max_length - buffer)
    return -library.maximum(0.0, over / buffer)


def _library(array: ArrayLike) -> Any:
    return np if isinstance(array, np.ndarray) else jnp
