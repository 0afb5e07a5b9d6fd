"""What the numbers an objective reports mean, and how those of several micro-batches combine.

The key of a metric says how it combines:

    `tokens`, `negative_responses`, ...   a plain name is a count: add
    `vetoed/tokens`                       `x/n` is the mean of x over the n of the same dict: weight by n
    `ratio_min`, `ratio_max`              by suffix: smallest, largest

So every mean carries its own weight, and combining is exact, associative and needs no table. The exceptions
are statistics that are no means to begin with (quantiles, effective sample sizes): they too are written
`x/n`, and combining them gives the average over the calls, weighted by n. All metrics are float32 scalars.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jax.typing import ArrayLike

Metrics = dict[str, jax.Array]


def combine_metrics(parts: Sequence[Mapping[str, ArrayLike]]) -> Metrics:
    """The metrics of a whole update from those of its micro-batches.

    Args:
      parts: the dicts that one objective (or `diagnostics`) returned for each micro-batch.

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
    """The values in float32 and without gradient, counts too, so that metrics can be carried in a loop."""
    return {key: stop_gradient(jnp.asarray(value, jnp.float32)) for key, value in values.items()}


def mean_over(total: jax.Array, count: jax.Array) -> jax.Array:
    """A mean from its sum and its count; zero where there is nothing to average."""
    return total / jnp.maximum(count, 1)
