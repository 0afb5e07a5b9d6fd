"""Importance weights and masks for any objective, passed as its `weights`.

All are computed from the log-ratio without a gradient, and are zero (false) on padding. To combine them,
multiply:

    objective(..., weights=tis_weights(l, m) * sequence_veto_mask(l, m))

They take the log-ratio `[B, T]` and the response mask `[B, T]`. Weights are float32; a mask is true where a
token is kept. A dropped token leaves the sum, not the denominator. The masks of MIS and IcePop here are 0 or
1; some other implementations also multiply by ρ.

`level` says which ratio is meant: that of the `token`, of the `sequence` (the product over the response), or
the `geometric` mean over the response.
"""

import math

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jax.typing import ArrayLike

from mugrpo_jax.objectives._checks import check_bounds, check_choice, check_number, check_rank, check_shape
from mugrpo_jax.objectives._objective import on_tokens, token_advantages

LEVELS = ("token", "sequence", "geometric")


def tis_weights(
    log_ratio: ArrayLike, mask: ArrayLike, *, cap: ArrayLike = 2.0, level: str = "token"
) -> jax.Array:
    """Truncated importance sampling: `min(ρ, C)`.

    Args:
      cap: C.
      level: one of `LEVELS`.

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
    # Capped before exp: the product of many ratios can exceed the range of float32.
    return jnp.where(valid, jnp.minimum(jnp.exp(jnp.minimum(log_weight, jnp.log(cap))), cap), 0.0)


def mis_mask(
    log_ratio: ArrayLike,
    mask: ArrayLike,
    *,
    low: ArrayLike = 0.5,
    high: ArrayLike = 2.0,
    level: str = "token",
) -> jax.Array:
    """Masked importance sampling: True where the ratio is inside `[low, high]`, False for dropped tokens.

    Args:
      low, high: bounds on the ratio. The defaults are this project's; verl uses 0.999 and 1.001 with
        `level="geometric"`.
      level: one of `LEVELS`.

    >>> mis_mask(jnp.log(jnp.array([[0.4, 1.0, 2.5]])), jnp.ones((1, 3))).tolist()
    [[False, True, False]]
    """
    check_bounds(low, high, names=("low", "high"))
    log_weight, valid = _log_weights(log_ratio, mask, level)
    return valid & (log_weight >= jnp.log(low)) & (log_weight <= jnp.log(high))


def icepop_mask(
    log_ratio: ArrayLike, mask: ArrayLike, *, low: ArrayLike = 0.5, high: ArrayLike = 5.0
) -> jax.Array:
    """IcePop: keep the tokens whose ratio lies in `[0.5, 5]` (arXiv 2510.18855).

    Args:
      low, high: bounds on the ratio of a token.

    >>> icepop_mask(jnp.log(jnp.array([[0.4, 1.0, 2.5, 5.5]])), jnp.ones((1, 4))).tolist()
    [[False, True, True, False]]
    """
    return mis_mask(log_ratio, mask, low=low, high=high)


def sequence_veto_mask(log_ratio: ArrayLike, mask: ArrayLike, *, ratio: ArrayLike = 1e-4) -> jax.Array:
    """Drop a response of any advantage if the ratio of one of its tokens is below a threshold.

    Args:
      ratio: the ratio below which a token vetoes its response.

    >>> sequence_veto_mask(jnp.log(jnp.array([[1.0, 5e-5], [1.0, 0.5]])), jnp.ones((2, 2))).tolist()
    [[False, False], [True, True]]
    """
    check_number("ratio", ratio, strict=True)
    log_weight, valid = _log_weights(log_ratio, mask, "token")
    return valid & ~(log_weight < jnp.log(ratio)).any(axis=1, keepdims=True)


def opsm_mask(log_ratio: ArrayLike, advantages: ArrayLike, mask: ArrayLike, *, delta: ArrayLike) -> jax.Array:
    """Off-policy sequence masking: drop a response if A < 0 and `mean_t(−l_t) > δ` (arXiv 2512.02556).

    Args:
      advantages: `[B]` or `[B, T]`; with advantages per token, tokens of negative advantage are dropped.
      delta: δ, in nats per token.

    >>> log_ratio = jnp.array([[-0.2, -0.4], [-0.2, -0.4]])
    >>> opsm_mask(log_ratio, jnp.array([1.0, -1.0]), jnp.ones((2, 2)), delta=0.1).tolist()
    [[True, True], [False, False]]
    """
    check_number("delta", delta, low=-math.inf)
    log_weight, valid = _log_weights(log_ratio, mask, "token")
    lengths = jnp.maximum(valid.sum(axis=1, keepdims=True), 1)
    far = -log_weight.sum(axis=1, keepdims=True) / lengths > delta
    return valid & ~(far & (token_advantages(advantages, valid) < 0))


def _log_weights(log_ratio: ArrayLike, mask: ArrayLike, level: str) -> tuple[jax.Array, jax.Array]:
    """The log-ratios `[B, T]` at a level, without a gradient, and the valid tokens."""
    check_choice("level", level, LEVELS)
    check_rank("log_ratio", log_ratio, 2, "[B, T]")
    check_shape("mask", mask, jnp.shape(log_ratio))
    valid = jnp.asarray(mask) != 0
    log_ratio = stop_gradient(on_tokens(log_ratio, valid))
    if level == "token":
        return log_ratio, valid
    of_response = log_ratio.sum(axis=1, keepdims=True)
    if level == "geometric":
        of_response = of_response / jnp.maximum(valid.sum(axis=1, keepdims=True), 1)
    return jnp.broadcast_to(of_response, log_ratio.shape), valid
