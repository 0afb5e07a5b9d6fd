"""Measure how far the policy has moved from the behavior policy: effective sample size and second moment.

`log_ratio` is `[B, T]`, and `mask` `[B, T]` is non-zero on response tokens. The results have no gradient.
"""

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jax.typing import ArrayLike

from mugrpo_jax.objectives._checks import check_rank, check_shape
from mugrpo_jax.objectives._objective import on_tokens
from mugrpo_jax.objectives.metrics import mean_over


def effective_sample_size(log_ratio: ArrayLike, mask: ArrayLike) -> jax.Array:
    """Return the effective sample size of the token ratios as a share of the tokens (arXiv 2605.12380).

        e = (Σ ρ)² / ((Σ ρ² + 1e-8) · |B|)     over the valid tokens B

    e is 1 if all ratios are equal (but less if all are 1e-4 or smaller, because of the 1e-8), and near 1/|B|
    if one ratio is much larger than all others. e is also 1 if there is no response token or a sum is not
    finite, as Σ ρ² with a ratio above 1e19. If an update has several micro-batches, add up their `ratio_sums`
    and pass the total to `ess_from_sums`.

    >>> ratio = jnp.array([[4.0, 1.0, 1.0, 1.0]])
    >>> round(float(effective_sample_size(jnp.log(ratio), jnp.ones_like(ratio))), 6)
    0.644737
    """
    return ess_from_sums(ratio_sums(log_ratio, mask))


def ratio_sums(log_ratio: ArrayLike, mask: ArrayLike) -> jax.Array:
    """Return `[Σ ρ, Σ ρ², |B|]` over the response tokens B, an array for `ess_from_sums`.

    >>> parts = [ratio_sums(jnp.log(jnp.array([[r]])), jnp.ones((1, 1))) for r in (4.0, 1.0, 1.0, 1.0)]
    >>> round(float(ess_from_sums(sum(parts))), 6)
    0.644737
    """
    log_ratio, valid = _read(log_ratio, mask)
    ratio = jnp.where(valid, jnp.exp(log_ratio), 0.0)
    return jnp.stack([ratio.sum(), (ratio**2).sum(), valid.sum().astype(jnp.float32)])


def ess_from_sums(sums: ArrayLike) -> jax.Array:
    """Return the effective sample size from `ratio_sums`, added up over all parts of an update.

    >>> float(ess_from_sums(jnp.array([6.0, 12.0, 4.0])))
    0.75
    """
    total, squares, count = jnp.asarray(sums)
    # Two quotients instead of one: the square of a finite sum can exceed the range of float32.
    ess = total / (squares + 1e-8) * (total / jnp.maximum(count, 1.0))
    return jnp.where((count > 0) & jnp.isfinite(total) & jnp.isfinite(squares), ess, 1.0)


def sequence_ess(log_ratio: ArrayLike, mask: ArrayLike) -> jax.Array:
    """Return the effective sample size of the n responses as a share of n: `(Σ w)² / (n Σ w²)`.

    The weight of response i is `w_i = exp(Σ_t l_t)`. All weights are divided by the largest weight, because a
    product of many ratios can exceed the range of float32. Rows without a response token are ignored. If no
    row has a response token, the result is 1.

    >>> log_ratio = jnp.log(jnp.array([[2.0, 2.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]))
    >>> round(float(sequence_ess(log_ratio, jnp.ones((4, 2)))), 6)
    0.644737
    """
    log_ratio, valid = _read(log_ratio, mask)
    present = valid.any(axis=1)
    log_weights = jnp.where(present, log_ratio.sum(axis=1), -jnp.inf)
    largest = log_weights.max(initial=-jnp.inf)
    weights = jnp.exp(log_weights - jnp.where(jnp.isfinite(largest), largest, 0.0))
    ess = weights.sum() ** 2 / jnp.maximum((weights**2).sum() * present.sum().astype(weights.dtype), 1e-8)
    return jnp.where(present.any(), ess, 1.0)


def second_moment(log_ratio: ArrayLike, mask: ArrayLike) -> jax.Array:
    """Return the mean of `l²` over the response tokens, or 0 without tokens; see M2PO (arXiv 2510.01161).

    >>> round(float(second_moment(jnp.array([[0.3, -0.1, 9.0]]), jnp.array([[1, 1, 0]]))), 4)
    0.05
    """
    log_ratio, valid = _read(log_ratio, mask)
    return mean_over((log_ratio**2).sum(), valid.sum())


def _read(log_ratio: ArrayLike, mask: ArrayLike) -> tuple[jax.Array, jax.Array]:
    check_rank("log_ratio", log_ratio, 2, "[B, T]")
    check_shape("mask", mask, jnp.shape(log_ratio))
    valid = jnp.asarray(mask).astype(bool)
    return stop_gradient(on_tokens(log_ratio, valid)), valid
