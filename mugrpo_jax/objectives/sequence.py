"""Objectives whose weight looks at more than one token: the whole response, or the prefix before a token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jax.typing import ArrayLike

from mugrpo_jax.objectives._checks import check_bounds, check_choice, check_flag
from mugrpo_jax.objectives._objective import (
    SharedKnobs,
    Tokens,
    finish,
    min_form,
    objective,
    read_tokens,
    token_fraction,
    token_mean,
)
from mugrpo_jax.objectives.kl import safe_exp
from mugrpo_jax.objectives.metrics import Metrics

LEVELS = ("sequence", "token")


@objective
def gspo(
    logp: ArrayLike,
    behavior_logp: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    denominator: ArrayLike | None = None,
    clip_low: ArrayLike = 1 - 3e-4,
    clip_high: ArrayLike = 1 + 4e-4,
    level: str = "sequence",
    aggregation: str = "seq_mean_token_mean",
    **shared: Unpack[SharedKnobs],
) -> tuple[jax.Array, Metrics]:
    """GSPO: one length-normalised ratio for the whole response (arXiv 2507.18071).

        s_i = exp(mean_t l_t)        J_t = min(s_i A, clip(s_i, 1 − 3e-4, 1 + 4e-4) A)

    The `token` form (GSPO-token) replaces s_i by `sg(s_i) · π / sg(π)`: the same values, but each token's
    gradient is weighted by its own advantage.

    Args:
      logp: `[B, T]` log-probs of the policy.
      behavior_logp: `[B, T]` log-probs stored when the responses were sampled.
      advantages: `[B]` or `[B, T]`, see `group_advantages`.
      mask: `[B, T]`, non-zero on response tokens.
      denominator: that of the whole update, when this call sees a part of it.
      clip_low, clip_high: bounds on s.
      level: `sequence` or `token`.
      aggregation: see `AGGREGATIONS`.
      **shared: the knobs all objectives share, see `help(mugrpo_jax.objectives)`.

    Returns:
      The loss, and metrics with `clipped/tokens`.

    >>> logp = jnp.log(jnp.array([[2.0, 0.5], [1.1, 1.1]]))
    >>> loss, _ = gspo(logp, jnp.zeros((2, 2)), jnp.array([1.0, 1.0]), jnp.ones((2, 2)))
    >>> round(float(loss), 4)  # −(1 + 1.0004) / 2: the ratios of the first response cancel
    -1.0002
    """
    check_bounds(clip_low, clip_high)
    check_choice("level", level, LEVELS)
    tokens = read_tokens(logp, behavior_logp, advantages, mask)
    ratio = safe_exp(_mean_log_ratio(tokens)) * jnp.ones_like(tokens.log_ratio)
    if level == "token":
        ratio = _through_own_token(ratio, tokens)
    surrogate, clipped = min_form(ratio, tokens.advantages, clip_low, clip_high)
    return finish(
        gspo,
        tokens,
        surrogate,
        {"clipped/tokens": token_fraction(tokens, clipped)},
        denominator=denominator,
        aggregation=aggregation,
        shared=shared,
    )


@objective
def topr(
    logp: ArrayLike,
    behavior_logp: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    denominator: ArrayLike | None = None,
    length_normalized: bool = False,
    aggregation: str = "seq_mean_token_mean",
    **shared: Unpack[SharedKnobs],
) -> tuple[jax.Array, Metrics]:
    """TOPR: learn from good responses as they are, from bad ones as far as still likely (arXiv 2503.14286).

        J_t = A · log π                           for A > 0
        J_t = sg(clip(ratio_i, 0, 1)) · A · log π   for A < 0

    The ratio is that of the response, `exp(Σ_t l_t)`, or `exp(mean_t l_t)` when length-normalised.

    Args:
      logp: `[B, T]` log-probs of the policy.
      behavior_logp: `[B, T]` log-probs stored when the responses were sampled.
      advantages: `[B]` or `[B, T]`, see `group_advantages`.
      mask: `[B, T]`, non-zero on response tokens.
      denominator: that of the whole update, when this call sees a part of it.
      length_normalized: take the geometric mean of the token ratios instead of their product.
      aggregation: see `AGGREGATIONS`.
      **shared: the knobs all objectives share, see `help(mugrpo_jax.objectives)`.

    Returns:
      The loss, and metrics with the mean weight `response_weight/tokens`.

    >>> logp = jnp.log(jnp.array([[0.5, 0.5], [0.5, 0.5]]))
    >>> behavior_logp = jnp.log(jnp.array([[0.1, 0.1], [1.0, 1.0]]))
    >>> rest = (jnp.array([1.0, -1.0]), jnp.ones((2, 2)))
    >>> gradient, _ = jax.grad(topr, has_aux=True)(logp, behavior_logp, *rest)
    >>> gradient.tolist()  # the second response is a quarter as likely as it was
    [[-0.25, -0.25], [0.0625, 0.0625]]
    """
    check_flag("length_normalized", length_normalized)
    tokens = read_tokens(logp, behavior_logp, advantages, mask)
    total = tokens.log_ratio.sum(axis=1, keepdims=True)
    log_weight = stop_gradient(_mean_log_ratio(tokens) if length_normalized else total)
    # Clipped before exp: the product of many ratios may leave the range of float32.
    weight = jnp.where(tokens.advantages < 0, jnp.exp(jnp.minimum(log_weight, 0.0)), 1.0)
    return finish(
        topr,
        tokens,
        weight * tokens.advantages * tokens.logp,
        {"response_weight/tokens": token_mean(tokens, weight)},
        denominator=denominator,
        aggregation=aggregation,
        shared=shared,
    )


@objective
def pnpo(
    logp: ArrayLike,
    behavior_logp: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    denominator: ArrayLike | None = None,
    clip_low: ArrayLike = 0.8,
    clip_high: ArrayLike = 1.2,
    aggregation: str = "token_mean",
    **shared: Unpack[SharedKnobs],
) -> tuple[jax.Array, Metrics]:
    """PNPO: the geometric mean of the ratios up to each token, in the min-form.

        w_t = exp(mean_{k ≤ t} l_k)        J_t = min(w_t A, clip(w_t, low, high) A)

    The gradient goes through l_t alone: `d J_t / d log π_t = w_t A`. No range is published for this form; the
    default is GRPO's.

    Args:
      logp: `[B, T]` log-probs of the policy.
      behavior_logp: `[B, T]` log-probs stored when the responses were sampled.
      advantages: `[B]` or `[B, T]`, see `group_advantages`.
      mask: `[B, T]`, non-zero on response tokens.
      denominator: that of the whole update, when this call sees a part of it.
      clip_low, clip_high: bounds on w.
      aggregation: see `AGGREGATIONS`.
      **shared: the knobs all objectives share, see `help(mugrpo_jax.objectives)`.

    Returns:
      The loss, and metrics with `clipped/tokens`.

    >>> logp = jnp.log(jnp.array([[1.0, 1.0, 0.01, 1.0, 1.0]]))
    >>> rest = (jnp.zeros((1, 5)), jnp.array([1.0]), jnp.ones((1, 5)))
    >>> gradient, _ = jax.grad(pnpo, has_aux=True)(logp, *rest, denominator=1)
    >>> print(-gradient.round(4))
    [[1. 1. 0.2154 0.3162 0.3981]]
    """
    check_bounds(clip_low, clip_high)
    tokens = read_tokens(logp, behavior_logp, advantages, mask)
    seen = _running(jnp.add, tokens.mask.astype(jnp.float32), 0.0)
    prefix_mean = _running(jnp.add, stop_gradient(tokens.log_ratio), 0.0) / jnp.maximum(seen, 1.0)
    weight = _through_own_token(safe_exp(prefix_mean), tokens)
    surrogate, clipped = min_form(weight, tokens.advantages, clip_low, clip_high)
    return finish(
        pnpo,
        tokens,
        surrogate,
        {"clipped/tokens": token_fraction(tokens, clipped)},
        denominator=denominator,
        aggregation=aggregation,
        shared=shared,
    )


@objective
def minpro(
    logp: ArrayLike,
    behavior_logp: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    denominator: ArrayLike | None = None,
    aggregation: str = "token_mean",
    **shared: Unpack[SharedKnobs],
) -> tuple[jax.Array, Metrics]:
    """MinPRO: each ratio times the smallest one before it (arXiv 2601.22718).

        J_t = sg(min_{s < t} ρ_s) · ρ_t · A     with 1 for the first token

    A prefix that the policy has left stands for itself by its least likely token, instead of by the product
    of all its ratios. Nothing else bounds the ratio: compose with `weights` for that.

    Args:
      logp: `[B, T]` log-probs of the policy.
      behavior_logp: `[B, T]` log-probs stored when the responses were sampled.
      advantages: `[B]` or `[B, T]`, see `group_advantages`.
      mask: `[B, T]`, non-zero on response tokens.
      denominator: that of the whole update, when this call sees a part of it.
      aggregation: see `AGGREGATIONS`.
      **shared: the knobs all objectives share, see `help(mugrpo_jax.objectives)`.

    Returns:
      The loss, and metrics with the mean logarithm of the prefix factor, `prefix_log_ratio/tokens`.

    >>> logp = jnp.log(jnp.array([[1.0, 1.0, 0.01, 1.0, 1.0]]))
    >>> rest = (jnp.zeros((1, 5)), jnp.array([1.0]), jnp.ones((1, 5)))
    >>> gradient, _ = jax.grad(minpro, has_aux=True)(logp, *rest, denominator=1)
    >>> print(-gradient.round(4))
    [[1. 1. 0.01 0.01 0.01]]
    """
    tokens = read_tokens(logp, behavior_logp, advantages, mask)
    log_ratio = jnp.where(tokens.mask, stop_gradient(tokens.log_ratio), jnp.inf)
    before = jnp.pad(log_ratio[:, :-1], ((0, 0), (1, 0)), constant_values=jnp.inf)
    smallest = _running(jnp.minimum, before, jnp.inf)
    log_prefix = jnp.where(jnp.isfinite(smallest), smallest, 0.0)  # no token before: a factor of 1
    # One exp of the sum: the factors may leave the range of float32 where the product does not.
    return finish(
        minpro,
        tokens,
        safe_exp(log_prefix + tokens.log_ratio) * tokens.advantages,
        {"prefix_log_ratio/tokens": token_mean(tokens, log_prefix)},
        denominator=denominator,
        aggregation=aggregation,
        shared=shared,
    )


def _mean_log_ratio(tokens: Tokens) -> jax.Array:
    """mean_t l_t of each response, `[B, 1]`."""
    lengths = tokens.mask.sum(axis=1, keepdims=True)
    return tokens.log_ratio.sum(axis=1, keepdims=True) / jnp.maximum(lengths, 1)


def _running(combine: Callable[..., jax.Array], values: jax.Array, neutral: float) -> jax.Array:
    """Combine the values `[B, T]` of each row from its beginning up to each column.

    By windows of doubled width over the padded row: fewer and simpler passes than `lax.cummin` compiles to.
    """
    doublings = (values.shape[1] - 1).bit_length()
    windows = jnp.pad(values, ((0, 0), (2**doublings - 1, 0)), constant_values=neutral)
    for width in (2**i for i in range(doublings)):
        windows = combine(windows[:, width:], windows[:, :-width])
    return windows


def _through_own_token(weight: jax.Array, tokens: Tokens) -> jax.Array:
    """`sg(w_t) · π_t / sg(π_t)`: the value of the weight, with the gradient of the token's own log-prob."""
    return stop_gradient(weight) * jnp.exp(tokens.logp - stop_gradient(tokens.logp))
