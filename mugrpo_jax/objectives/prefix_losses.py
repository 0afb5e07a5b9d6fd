"""Losses whose importance weight depends on the ratios of all tokens up to the current one.

The package docstring defines the symbols and the four arrays with which each loss is called.
"""

from __future__ import annotations  # so that help() shows short types

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jax.typing import ArrayLike

from mugrpo_jax.objectives._checks import check_clip, check_number
from mugrpo_jax.objectives._objective import Terms, Tokens, min_form, objective, through_own_token
from mugrpo_jax.objectives.kl import safe_exp


@objective("token_mean")
def pnpo(
    tokens: Tokens,
    *,
    clip_low: ArrayLike = 0.8,
    clip_high: ArrayLike = 1.2,
    dual_clip: ArrayLike | None = None,
) -> Terms:
    """PNPO: weight each token by the geometric mean of the ratios up to this token (arXiv 2608.01418).

        w_t = exp(mean_{k ≤ t} l_k)        J_t = min(w_t A, clip(w_t, low, high) A)

    Only l_t has a gradient: `d J_t / d log π_t = w_t A`. The paper gives the weight w; the minimum with the
    clipped term and the bounds, which are those of GRPO, are our choice.

    Args:
      clip_low, clip_high: bounds on w.
      dual_clip: c. For A < 0 the gradient is also 0 where w > c. None means no dual clip.

    Metrics: `clipped/tokens`, the share of clipped tokens.

    >>> logp = jnp.log(jnp.array([[1.0, 1.0, 0.01, 1.0, 1.0]]))
    >>> rest = (jnp.zeros((1, 5)), jnp.array([1.0]), jnp.ones((1, 5)))
    >>> gradient, _ = jax.grad(pnpo, has_aux=True)(logp, *rest, denominator=1)
    >>> print(-gradient.round(4))
    [[1. 1. 0.2154 0.3162 0.3981]]
    """
    check_clip(clip_low, clip_high)
    prefix_mean = _prefix_sum(tokens) / jnp.maximum(_places(tokens), 1.0)
    weight = through_own_token(safe_exp(prefix_mean), tokens)
    surrogate, clipped = min_form(weight, tokens.advantages, clip_low, clip_high, dual_clip)
    return Terms(surrogate, {}, clipped=clipped)


@objective("seq_mean_token_mean")
def ctpo(
    tokens: Tokens,
    *,
    log_low: ArrayLike = 0.025,
    log_high: ArrayLike = 0.05,
    growth: ArrayLike = 0.5,
    dual_clip: ArrayLike | None = None,
) -> Terms:
    """CTPO: clip the product of the ratios up to each token, with bounds that grow with t (arXiv 2605.07331).

        R_t = Π_{k ≤ t} ρ_k     J_t = min(R_t A, clip(R_t, exp(−0.025 √t), exp(0.05 √t)) A)

    t is the position of a token in its response, from 1. Only l_t has a gradient, as in the authors' code:
    `d J_t / d log π_t = R_t A`. Their code also clips tokens with A < 0 at the upper bound. The objective in
    the paper and this function do not.

    Args:
      log_low, log_high: at t = 1, log R is clipped to −log_low and log_high.
      growth: the bounds on log R are multiplied by t to this power; 0.5 gives √t.
      dual_clip: c. For A < 0 the gradient is also 0 where R > c. None means no dual clip.

    Metrics: `clipped/tokens`, the share of clipped tokens.

    >>> logp = jnp.log(jnp.array([[1.04, 1.04, 0.9]]))
    >>> rest = (jnp.zeros((1, 3)), jnp.array([1.0]), jnp.ones((1, 3)))
    >>> gradient, _ = jax.grad(ctpo, has_aux=True)(logp, *rest, denominator=1)
    >>> [abs(round(float(g), 3)) for g in 3 * gradient[0]]  # 1.04, 1.0816 > exp(0.0707), 0.9734
    [1.04, 0.0, 0.973]
    """
    check_number("log_low", log_low)
    check_number("log_high", log_high)
    check_number("growth", growth)
    weight = through_own_token(safe_exp(_prefix_sum(tokens)), tokens)
    width = jnp.maximum(_places(tokens), 1.0) ** growth
    low, high = jnp.exp(jnp.negative(log_low) * width), jnp.exp(log_high * width)
    surrogate, clipped = min_form(weight, tokens.advantages, low, high, dual_clip)
    return Terms(surrogate, {}, clipped=clipped)


@objective("token_mean")
def minpro(tokens: Tokens) -> Terms:
    """MinPRO: multiply the ratio of each token by the smallest ratio before this token (arXiv 2601.22718).

        J_t = stop_gradient(min_{s < t} ρ_s) · ρ_t · A     with 1 for the first token

    The smallest ratio replaces the product of all ratios in the prefix. The ratio is not clipped. To limit
    the ratio, pass `weights`.

    Metrics: `prefix_log_ratio/tokens`, the mean logarithm of the smallest ratio before each token.

    >>> logp = jnp.log(jnp.array([[1.0, 1.0, 0.01, 1.0, 1.0]]))
    >>> rest = (jnp.zeros((1, 5)), jnp.array([1.0]), jnp.ones((1, 5)))
    >>> gradient, _ = jax.grad(minpro, has_aux=True)(logp, *rest, denominator=1)
    >>> print(-gradient.round(4))
    [[1. 1. 0.01 0.01 0.01]]
    """
    log_ratio = jnp.where(tokens.mask, stop_gradient(tokens.log_ratio), jnp.inf)
    before = jnp.pad(log_ratio[:, :-1], ((0, 0), (1, 0)), constant_values=jnp.inf)
    smallest = _running(jnp.minimum, before, jnp.inf)
    log_prefix = jnp.where(smallest == jnp.inf, 0.0, smallest)  # the first token has the factor 1
    # Take exp of the sum, because a factor can exceed the range of float32 even if the product does not.
    policy = safe_exp(log_prefix + tokens.log_ratio) * tokens.advantages
    return Terms(policy, {"prefix_log_ratio/tokens": tokens.mean(log_prefix)})


def _prefix_sum(tokens: Tokens) -> jax.Array:
    """Return Σ_{k ≤ t} l_k for each token t, without a gradient."""
    return _running(jnp.add, stop_gradient(tokens.log_ratio), 0.0)


def _places(tokens: Tokens) -> jax.Array:
    """Return the position of each token in its response, from 1."""
    return _running(jnp.add, tokens.mask.astype(jnp.float32), 0.0)


def _running(combine: Callable[..., jax.Array], values: jax.Array, neutral: float) -> jax.Array:
    """Return cumulative results along the rows of `values` `[B, T]`, for example sums if `combine` is `add`.

    `neutral` is the value that does not change a result. Each pass doubles the number of columns that are
    combined. `lax.cummin` compiles to more and slower passes.
    """
    doublings = (values.shape[1] - 1).bit_length()
    windows = jnp.pad(values, ((0, 0), (2**doublings - 1, 0)), constant_values=neutral)
    for width in (2**i for i in range(doublings)):
        windows = combine(windows[:, width:], windows[:, :-width])
    return windows
