"""Compute the loss and make the batches for the warm start, supervised training on worked solutions."""

import itertools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mugrpo_jax.rollouts import Buckets, Update
from mugrpo_jax.rollouts.micro_batches import Row, arrange


def cross_entropy(
    logp: jax.Array,
    behavior_logp: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    denominator: jax.Array,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Compute the mean negative log-likelihood of solution tokens, with the signature of an objective."""
    del behavior_logp, advantages
    valid = mask != 0
    return -jnp.where(valid, logp, 0.0).sum() / denominator, {"tokens": valid.sum()}


def solution_updates(
    rows: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray | None]],
    buckets: Buckets,
    *,
    rows_per_update: int,
    seed: int,
    start: int = 0,
) -> Iterator[Update]:
    """Yield updates of prompts with their solutions without end, in a new random order in each epoch.

    A row has the tokens of the prompt and of the solution, and which tokens of the solution to train on, or
    None for all of them.
    Update `i` depends only on `seed` and `i`, so a run can resume at any `start`.
    """
    rows_per_update = min(rows_per_update, len(rows))
    per_epoch = len(rows) // rows_per_update
    for update in itertools.count(start):
        epoch, position = divmod(update, per_epoch)
        order = np.random.default_rng((seed, epoch)).permutation(len(rows))
        take = order[position * rows_per_update :][:rows_per_update]
        chosen = [_row(*rows[i]) for i in take]
        tokens = sum(row.written for row in chosen)
        yield Update(arrange(chosen, buckets), float(tokens), {"response_tokens": float(tokens)})


def _row(prompt: np.ndarray, solution: np.ndarray, wrote: np.ndarray | None) -> Row:
    zeros = np.zeros(len(solution), np.float32)
    return Row(prompt, solution, behavior_logp=zeros, advantage=0.0, wrote=wrote)
