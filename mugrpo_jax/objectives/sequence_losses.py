"""Losses with one importance weight for a whole response.

The package docstring defines the symbols and the four arrays with which each loss is called.
"""

from __future__ import annotations  # so that help() shows short types

import math

import jax.numpy as jnp
from jax.lax import stop_gradient
from jax.typing import ArrayLike

from mugrpo_jax.objectives._checks import check_choice, check_clip, check_flag, check_number
from mugrpo_jax.objectives._objective import (
    Terms,
    Tokens,
    mean_log_ratio,
    min_form,
    objective,
    through_own_token,
)
from mugrpo_jax.objectives.kl import safe_exp

LEVELS = ("sequence", "token")
_GMPO_LOW, _GMPO_HIGH = math.exp(-0.4), math.exp(0.4)


@objective("seq_mean_token_mean")
def gspo(
    tokens: Tokens,
    *,
    clip_low: ArrayLike = 1 - 3e-4,
    clip_high: ArrayLike = 1 + 4e-4,
    level: str = "sequence",
    dual_clip: ArrayLike | None = None,
) -> Terms:
    """GSPO: use one length-normalised ratio s_i for all tokens of response i (arXiv 2507.18071).

        s_i = exp(mean_t l_t)        J_t = min(s_i A, clip(s_i, 1 − 3e-4, 1 + 4e-4) A)

    With `level="token"` (GSPO-token), J_t is the same, but only the log-prob of token t has a gradient.
    So the gradient of each token is multiplied by the advantage of this token.

    Args:
      clip_low, clip_high: bounds on s.
      level: `sequence` or `token`.
      dual_clip: c. For A < 0 the gradient is also 0 where s > c. None means no dual clip.

    Metrics: `clipped/tokens`, the share of clipped tokens.

    >>> logp = jnp.log(jnp.array([[2.0, 0.5], [1.1, 1.1]]))
    >>> loss, _ = gspo(logp, jnp.zeros((2, 2)), jnp.array([1.0, 1.0]), jnp.ones((2, 2)))
    >>> round(float(loss), 4)  # −(1 + 1.0004) / 2: the ratios of the first response cancel
    -1.0002
    """
    check_clip(clip_low, clip_high)
    check_choice("level", level, LEVELS)
    ratio = safe_exp(mean_log_ratio(tokens)) * jnp.ones_like(tokens.log_ratio)
    if level == "token":
        ratio = through_own_token(ratio, tokens)
    surrogate, clipped = min_form(ratio, tokens.advantages, clip_low, clip_high, dual_clip)
    return Terms(surrogate, {}, clipped=clipped)


@objective("seq_mean_token_mean")
def gmpo(tokens: Tokens, *, clip_low: ArrayLike = _GMPO_LOW, clip_high: ArrayLike = _GMPO_HIGH) -> Terms:
    """GMPO: use the geometric mean of the clipped token ratios in each response (arXiv 2507.20673).

        J_t = G_i A     G_i = exp(mean_t c_t)     c_t = min(l_t, 0.4) for A > 0, max(l_t, −0.4) for A < 0

    Each ratio is clipped before the mean. A clipped token has no gradient, but its bounded ratio is in G.

    Args:
      clip_low, clip_high: bounds on the ratio of a token, by default e^−0.4 and e^0.4.

    Metrics: `clipped/tokens`, the share of clipped tokens.

    >>> import jax
    >>> logp = jnp.log(jnp.array([[4.0, 1.0]]))
    >>> rest = (jnp.zeros((1, 2)), jnp.array([1.0]), jnp.ones((1, 2)))
    >>> (loss, _), gradient = jax.value_and_grad(gmpo, has_aux=True)(logp, *rest)
    >>> print(loss.round(4), gradient.round(4))  # G = exp((0.4 + 0) / 2)
    -1.2214 [[ 0. -0.6107]]
    """
    check_clip(clip_low, clip_high)
    low, high = jnp.log(jnp.float32(clip_low)), jnp.log(jnp.float32(clip_high))
    above = (tokens.advantages > 0) & (tokens.log_ratio > high)
    below = (tokens.advantages < 0) & (tokens.log_ratio < low)
    bounded = jnp.where(above, high, jnp.where(below, low, tokens.log_ratio))
    mean = safe_exp(mean_log_ratio(tokens._replace(log_ratio=bounded)))
    return Terms(mean * tokens.advantages, {}, clipped=above | below)


@objective("seq_mean_token_mean")
def topr(tokens: Tokens, *, length_normalized: bool = False) -> Terms:
    """TOPR: give good responses weight 1, and bad responses a truncated ratio as weight (arXiv 2503.14286).

        J_t = A · log π                             for A > 0
        J_t = stop_gradient(clip(ratio_i, 0, 1)) · A · log π   for A < 0

    ratio_i is the ratio of response i: `exp(Σ_t l_t)`, or `exp(mean_t l_t)` if `length_normalized` is True.

    Metrics: `response_weight/tokens`, the mean over tokens of the factor before A.

    >>> import jax
    >>> logp = jnp.log(jnp.array([[0.5, 0.5], [0.5, 0.5]]))
    >>> behavior_logp = jnp.log(jnp.array([[0.1, 0.1], [1.0, 1.0]]))
    >>> rest = (jnp.array([1.0, -1.0]), jnp.ones((2, 2)))
    >>> gradient, _ = jax.grad(topr, has_aux=True)(logp, behavior_logp, *rest)
    >>> gradient.tolist()  # the second response is a quarter as likely as it was
    [[-0.25, -0.25], [0.0625, 0.0625]]
    """
    check_flag("length_normalized", length_normalized)
    total = tokens.log_ratio.sum(axis=1, keepdims=True)
    log_weight = stop_gradient(mean_log_ratio(tokens) if length_normalized else total)
    # Take the minimum before exp, because the product of many ratios can exceed the range of float32.
    weight = jnp.where(tokens.advantages < 0, jnp.exp(jnp.minimum(log_weight, 0.0)), 1.0)
    return Terms(weight * tokens.advantages * tokens.logp, {"response_weight/tokens": tokens.mean(weight)})


@objective("token_mean")
def vespo(
    tokens: Tokens,
    *,
    k_positive: ArrayLike = 2.0,
    lambda_positive: ArrayLike = 3.0,
    k_negative: ArrayLike = 3.0,
    lambda_negative: ArrayLike = 2.0,
) -> Terms:
    """VESPO: weight each response by a smooth function φ of its ratio W_i (arXiv 2602.10693).

        J_t = stop_gradient(φ(W_i)) · A · log π     W_i = exp(Σ_t l_t)     φ(W) = W^k exp(λ (1 − W))

    φ(1) = 1. φ is small for responses that have become unlikely (because of W^k) or much more likely (because
    of e^−λW). The ratio is not divided by the length of the response and not clipped.

    Args:
      k_positive, lambda_positive: k and λ for A ≥ 0.
      k_negative, lambda_negative: k and λ for A < 0.

    Metrics: `response_weight/tokens`, the mean of φ over tokens.

    >>> import jax
    >>> logp = jnp.log(jnp.array([[0.5], [1.0], [2.0]]))
    >>> gradient, _ = jax.grad(vespo, has_aux=True)(logp, jnp.zeros((3, 1)), jnp.ones(3), jnp.ones((3, 1)))
    >>> [round(float(g), 4) for g in -3 * gradient.ravel()]  # 0.25 e^1.5, 1, 4 e^−3
    [1.1204, 1.0, 0.1991]
    """
    knobs = (k_positive, lambda_positive, k_negative, lambda_negative)
    for name, value in zip(("k_positive", "lambda_positive", "k_negative", "lambda_negative"), knobs):
        check_number(name, value)
    positive = tokens.advantages >= 0
    power = jnp.where(positive, k_positive, k_negative)
    decay = jnp.where(positive, lambda_positive, lambda_negative)
    log_weight = stop_gradient(tokens.log_ratio.sum(axis=1, keepdims=True))
    # Compute in log space, because the product of many ratios can exceed the range of float32 (φ cannot).
    weight = jnp.exp(decay + power * log_weight - decay * safe_exp(log_weight))
    return Terms(weight * tokens.advantages * tokens.logp, {"response_weight/tokens": tokens.mean(weight)})
