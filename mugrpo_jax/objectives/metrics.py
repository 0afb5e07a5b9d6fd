"""Names of metrics, and how the metrics of several micro-batches are combined.

The key of a metric says how it combines:

    `tokens`, `negative_responses`, ...   a plain name is a count: add
    `vetoed/tokens`                       `x/n` is a mean over the count n in the same dict: weight by n
    `ratio_min`, `ratio_max`              by suffix: smallest, largest

So every mean carries its own weight, and combining is exact and associative. Quantiles and effective sample
sizes are not means. They are written `x/n` too, and combining them gives the average over the calls, weighted
by n. All metrics are float32 scalars.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jax.typing import ArrayLike

Metrics = dict[str, jax.Array]


def combine_metrics(parts: Sequence[Mapping[str, ArrayLike]]) -> Metrics:
    """Combine the metrics of an update's micro-batches.

    Args:
      parts: the dicts that one objective (or `diagnostics`) returned, one per micro-batch.

    >>> parts = [{"tokens": 30, "vetoed/tokens": 0.1, "ratio_min": 0.5},
    ...          {"tokens": 10, "vetoed/tokens": 0.5, "ratio_min": 0.2}]
    >>> {key: round(float(value), 3) for key, value in combine_metrics(parts).items()}
    {'tokens': 40.0, 'vetoed/tokens': 0.2, 'ratio_min': 0.2}
    """
    if not parts:
        raise ValueError("parts is empty; possible: the metrics of at least one micro-batch")
    values = [as_metrics(part) for part in parts]
    stacked = {key: jnp.stack([part[key] for part in values]) for key in parts[0]}

    def combine(key: str, values: jax.Array) -> jax.Array:
        if key.endswith("_min"):
            return values.min()
        if key.endswith("_max"):
            return values.max()
        if "/" not in key:
            return values.sum()
        counts = stacked[key.rpartition("/")[2]]
        return mean_over((values * counts).sum(), counts.sum())

    return {key: combine(key, values) for key, values in stacked.items()}


def as_metrics(values: Mapping[str, ArrayLike]) -> Metrics:
    """The values, counts included, as float32 without a gradient, so that a loop can carry them."""
    return {key: stop_gradient(jnp.asarray(value, jnp.float32)) for key, value in values.items()}


def mean_over(total: jax.Array, count: jax.Array) -> jax.Array:
    """A mean from its sum and its count; zero if the count is zero."""
    return total / jnp.maximum(count, 1)
