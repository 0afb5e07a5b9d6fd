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
    rows: Sequence[tuple[np.ndarray, np.ndarray]],
    buckets: Buckets,
    *,
    rows_per_update: int,
    seed: int,
    start: int = 0,
) -> Iterator[Update]:
    """Yield updates of `(prompt, solution)` token pairs without end, in a new random order in each epoch.

    Update `i` depends only on `seed` and `i`, so a run can resume at any `start`.
    """
    rows_per_update = min(rows_per_update, len(rows))
    per_epoch = len(rows) // rows_per_update
    for update in itertools.count(start):
        epoch, position = divmod(update, per_epoch)
        order = np.random.default_rng((seed, epoch)).permutation(len(rows))
        take = order[position * rows_per_update :][:rows_per_update]
        chosen = [_row(*rows[i]) for i in take]
        tokens = sum(len(row.response) for row in chosen)
        yield Update(arrange(chosen, buckets), float(tokens), {"response_tokens": float(tokens)})


def _row(prompt: np.ndarray, solution: np.ndarray) -> Row:
    return Row(prompt, solution, behavior_logp=np.zeros(len(solution), np.float32), advantage=0.0)
