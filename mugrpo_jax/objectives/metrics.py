"""Combine the metrics of several micro-batches.

Metrics are a dict of float32 scalars. The key says how to combine the values of a metric:

    `tokens`, `negative_responses`, ...   a plain name is a count or a sum; these are added
    `vetoed/tokens`                       `x/n` is a mean over the count n; means are averaged with weights n
    `behind_abandoned/negative_pull`      n may also be a sum; then `x/n` is a share of this sum
    `ratio_min`, `ratio_max`              the smallest or the largest value

    `ess/tokens`                          an effective sample size; exact too, with the mean `ratio/tokens`

A key may end with `@` and the name of a behavior, such as `vetoed/tokens@current`: the metric of the
responses of this behavior alone, whose count is `tokens@current`.

So combining is exact, in any order. Quantiles and `sequence_ess/responses` are not means, but have keys `x/n`
too. Combining these gives a weighted average over the micro-batches, not the value of the whole update.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jax.typing import ArrayLike

Metrics = dict[str, jax.Array]


def combine_metrics(parts: Sequence[Mapping[str, ArrayLike]]) -> Metrics:
    """Combine the metrics that one objective (or `diagnostics`) returned for each micro-batch of an update.

    Arrays with one value per micro-batch, as from `jax.lax.scan`, are one part: `combine_metrics([stacked])`.

    >>> parts = [{"tokens": 30, "vetoed/tokens": 0.1, "ratio_min": 0.5},
    ...          {"tokens": 10, "vetoed/tokens": 0.5, "ratio_min": 0.2}]
    >>> {key: round(float(value), 3) for key, value in combine_metrics(parts).items()}
    {'tokens': 40.0, 'vetoed/tokens': 0.2, 'ratio_min': 0.2}
    """
    if not parts:
        raise ValueError("parts is empty; possible: the metrics of at least one micro-batch")
    values = [as_metrics(part) for part in parts]
    for part in values:
        if different := sorted(part.keys() ^ values[0].keys()):
            raise ValueError(f"{different[0]!r} is not in all parts; possible: metrics of one objective")
    stacked = {key: jnp.stack([part[key] for part in values]) for key in parts[0]}

    def combine(key: str, values: jax.Array) -> jax.Array:
        plain = key.partition("@")[0]
        if plain.endswith("_min"):
            return values.min()
        if plain.endswith("_max"):
            return values.max()
        if "/" not in key:
            return values.sum()
        name, _, count = key.rpartition("/")
        if count not in stacked:
            raise ValueError(f"{key!r} is a mean over {count!r}, which is not in parts")
        counts = stacked[count]
        if name == "ess":
            return _combine_ess(values, stacked[f"ratio/{count}"], counts)
        return mean_over((values * counts).sum(), counts.sum())

    return {key: combine(key, values) for key, values in stacked.items()}


def _combine_ess(ess: jax.Array, ratio: jax.Array, counts: jax.Array) -> jax.Array:
    """Combine effective sample sizes: from e, the mean ratio and n of each part follow Σ ρ and Σ ρ²."""
    total = (counts * ratio).sum()
    squares = (counts * ratio * (ratio / jnp.where(ess > 0, ess, 1.0))).sum()
    found = total / jnp.where(squares > 0, squares, 1.0) * (total / jnp.maximum(counts.sum(), 1))
    return jnp.where((counts.sum() > 0) & jnp.isfinite(total) & jnp.isfinite(squares), found, 1.0)


def as_metrics(values: Mapping[str, ArrayLike]) -> Metrics:
    """Convert all values to float32 without a gradient, so that a `jax.lax` loop can carry them."""
    return {key: stop_gradient(jnp.asarray(value, jnp.float32)) for key, value in values.items()}


def mean_over(total: jax.Array, count: jax.Array) -> jax.Array:
    """Return `total / count`, the mean of `count` values with the sum `total`; 0 if there are no values.

    The count may also be a sum of weights, so it can lie between 0 and 1.
    """
    if jnp.issubdtype(total.dtype, jnp.floating):
        count = count.astype(total.dtype)  # also if dtypes are promoted strictly
    return total / jnp.where(count > 0, count, 1)
