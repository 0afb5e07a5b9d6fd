"""Compute importance weights and masks, which any objective takes as `weights`. Multiply to combine them:

    objective(..., weights=tis_weights(l, m) * sequence_veto_mask(l, m))

The inputs are the log-ratio `[B, T]` and the response mask `[B, T]`, non-zero on response tokens. The results
`[B, T]` have no gradient. Weights are float32, and 0 on padding. Masks are True on tokens that are kept, and
False on dropped tokens and on padding. A dropped token has no term in the loss, but the denominator stays the
same. The masks of MIS and IcePop only keep or drop tokens; some other implementations also multiply by ρ.

`level` says which ratio is used: `token` is the ratio ρ of each token, `sequence` the product of the ratios
of the whole response, and `geometric` the geometric mean of these ratios.
"""

import math

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jax.typing import ArrayLike

from mugrpo_jax.objectives._checks import check_bounds, check_choice, check_number, check_rank, check_shape
from mugrpo_jax.objectives._objective import on_tokens, token_advantages
from mugrpo_jax.objectives.metrics import mean_over

LEVELS = ("token", "sequence", "geometric")


def tis_weights(
    log_ratio: ArrayLike, mask: ArrayLike, *, cap: ArrayLike = 2.0, level: str = "token"
) -> jax.Array:
    """Return the weights of truncated importance sampling, `min(ρ, cap)`.

    Args:
      cap: the largest weight.
      level: `token`, `sequence` or `geometric`, see the docstring of this module.

    >>> log_ratio = jnp.log(jnp.array([[0.5, 3.0, 0.5]]))
    >>> tis_weights(log_ratio, jnp.array([[1, 1, 0]])).round(4).tolist()
    [[0.5, 2.0, 0.0]]
    >>> tis_weights(log_ratio, jnp.array([[1, 1, 0]]), level="sequence").round(4).tolist()
    [[1.5, 1.5, 0.0]]
    >>> print(tis_weights(log_ratio, jnp.array([[1, 1, 0]]), level="geometric").round(4))
    [[1.2247 1.2247 0. ]]
    """
    check_number("cap", cap, strict=True)
    log_weight, valid = _log_weights(log_ratio, mask, level)
    # Take the minimum before exp, because the product of many ratios can exceed the range of float32.
    return jnp.where(valid, jnp.minimum(jnp.exp(jnp.minimum(log_weight, jnp.log(cap))), cap), 0.0)


def mis_mask(
    log_ratio: ArrayLike,
    mask: ArrayLike,
    *,
    low: ArrayLike = 0.5,
    high: ArrayLike = 2.0,
    level: str = "token",
) -> jax.Array:
    """Return the mask of masked importance sampling, which keeps tokens with a ratio in `[low, high]`.

    Args:
      low, high: bounds on the ratio. The defaults are our choice; verl uses 0.999 and 1.001 with
        `level="geometric"`.
      level: `token`, `sequence` or `geometric`, see the docstring of this module.

    >>> mis_mask(jnp.log(jnp.array([[0.4, 1.0, 2.5]])), jnp.ones((1, 3))).tolist()
    [[False, True, False]]
    """
    check_bounds(low, high, names=("low", "high"))
    log_weight, valid = _log_weights(log_ratio, mask, level)
    return valid & (log_weight >= jnp.log(low)) & (log_weight <= jnp.log(high))


def icepop_mask(
    log_ratio: ArrayLike, mask: ArrayLike, *, low: ArrayLike = 0.5, high: ArrayLike = 5.0
) -> jax.Array:
    """Return IcePop's mask: True on response tokens with a ratio in `[low, high]` (arXiv 2510.18855).

    >>> icepop_mask(jnp.log(jnp.array([[0.4, 1.0, 2.5, 5.5]])), jnp.ones((1, 4))).tolist()
    [[False, True, True, False]]
    """
    return mis_mask(log_ratio, mask, low=low, high=high)


def sequence_veto_mask(log_ratio: ArrayLike, mask: ArrayLike, *, ratio: ArrayLike = 1e-4) -> jax.Array:
    """Return a mask that drops every response in which any token has a ratio below `ratio`.

    >>> sequence_veto_mask(jnp.log(jnp.array([[1.0, 5e-5], [1.0, 0.5]])), jnp.ones((2, 2))).tolist()
    [[False, False], [True, True]]
    """
    check_number("ratio", ratio, strict=True)
    log_weight, valid = _log_weights(log_ratio, mask, "token")
    return valid & ~(log_weight < jnp.log(ratio)).any(axis=1, keepdims=True)


def opsm_mask(log_ratio: ArrayLike, advantages: ArrayLike, mask: ArrayLike, *, delta: ArrayLike) -> jax.Array:
    """Return a mask that drops responses with A < 0 and `mean_t(−l_t) > δ` (OPSM, arXiv 2512.02556).

    Args:
      advantages: `[B]` or `[B, T]`. With `[B, T]`, only the tokens with negative advantage are dropped.
      delta: δ, in nats per token.

    >>> log_ratio = jnp.array([[-0.2, -0.4], [-0.2, -0.4]])
    >>> opsm_mask(log_ratio, jnp.array([1.0, -1.0]), jnp.ones((2, 2)), delta=0.1).tolist()
    [[True, True], [False, False]]
    """
    check_number("delta", delta, low=-math.inf)
    log_weight, valid = _log_weights(log_ratio, mask, "token")
    far = -mean_over(log_weight.sum(axis=1, keepdims=True), valid.sum(axis=1, keepdims=True)) > delta
    return valid & ~(far & (token_advantages(advantages, valid) < 0))


def _log_weights(log_ratio: ArrayLike, mask: ArrayLike, level: str) -> tuple[jax.Array, jax.Array]:
    """Return the log of the ratio at this level, `[B, T]`, and a mask that is True on response tokens."""
    check_choice("level", level, LEVELS)
    check_rank("log_ratio", log_ratio, 2, "[B, T]")
    check_shape("mask", mask, jnp.shape(log_ratio))
    valid = jnp.asarray(mask).astype(bool)
    log_ratio = stop_gradient(on_tokens(log_ratio, valid))
    if level == "token":
        return log_ratio, valid
    of_response = log_ratio.sum(axis=1, keepdims=True)
    if level == "geometric":
        of_response = mean_over(of_response, valid.sum(axis=1, keepdims=True))
    return jnp.broadcast_to(of_response, log_ratio.shape), valid
