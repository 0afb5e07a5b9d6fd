"""Losses in which a token beyond the clip bounds has a limited gradient, not a gradient of 0.

The package docstring defines the symbols and the four arrays with which each loss is called.
"""

from __future__ import annotations  # so that help() shows short types

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jax.typing import ArrayLike

from mugrpo_jax.objectives._checks import check_bounds, check_clip, check_number
from mugrpo_jax.objectives._objective import Terms, Tokens, beyond_dual_clip, min_form, objective


@objective("token_mean")
def cispo(tokens: Tokens, *, clip_low: ArrayLike = 0.0, clip_high: ArrayLike = 5.0) -> Terms:
    """CISPO: clip the importance weight, so that clipped tokens keep a gradient (arXiv 2506.13585).

        J_t = stop_gradient(clip(ρ_t, 0, 5)) · A · log π

    Args:
      clip_low, clip_high: bounds on the weight of a token. A lower bound of 0 means no lower bound.

    Metrics: `clipped/tokens`, the share of tokens whose weight was clipped.

    >>> logp, behavior_logp = jnp.array([[-1.0, -2.0]]), jnp.array([[-1.0, -4.0]])
    >>> loss, _ = cispo(logp, behavior_logp, jnp.array([1.0]), jnp.ones((1, 2)))
    >>> round(float(loss), 4)  # −(1 · −1 + 5 · −2) / 2: the second ratio is e² = 7.39
    5.5
    """
    check_bounds(clip_low, clip_high)
    ratio = stop_gradient(tokens.ratio)
    weight = jnp.clip(ratio, clip_low, clip_high)
    return Terms(weight * tokens.advantages * tokens.logp, {}, clipped=weight != ratio)


@objective("token_mean")
def gppo(
    tokens: Tokens,
    *,
    clip_low: ArrayLike = 0.8,
    clip_high: ArrayLike = 1.28,
    dual_clip: ArrayLike | None = None,
) -> Terms:
    """GPPO: compute the same loss value as PPO, but keep a gradient for clipped tokens (arXiv 2508.07629).

        J_t = min(ρ_t A, stop_gradient(clip(ρ_t, 0.8, 1.28) / ρ_t) ρ_t A)

    A clipped token has the gradient of a token at the bound: `d J / d log π = clip(ρ) A`. The authors' code
    also has a dual clip at ρ = 3. Here there is no dual clip by default.

    Args:
      clip_low, clip_high: bounds on the ratio.
      dual_clip: c. For A < 0 the gradient is 0 where ρ > c. None means no dual clip.

    Metrics: `clipped/tokens`, the share of clipped tokens.

    >>> logp = jnp.log(jnp.array([[2.0, 1.0]]))
    >>> rest = (jnp.zeros((1, 2)), jnp.array([1.0]), jnp.ones((1, 2)))
    >>> (loss, _), gradient = jax.value_and_grad(gppo, has_aux=True)(logp, *rest)
    >>> print(loss, gradient)
    -1.14 [[-0.64 -0.5 ]]
    """
    check_clip(clip_low, clip_high)
    surrogate, clipped = min_form(tokens.ratio, tokens.advantages, clip_low, clip_high)
    # A factor with value 1 and gradient 1. This code does not divide by a ratio, which may be tiny.
    one = jnp.exp(tokens.log_ratio - stop_gradient(tokens.log_ratio))
    policy = jnp.where(clipped, stop_gradient(surrogate) * one, surrogate)
    if dual_clip is not None:
        far = beyond_dual_clip(tokens.ratio, tokens.advantages, dual_clip)
        policy, clipped = jnp.where(far, dual_clip * tokens.advantages, policy), clipped | far
    return Terms(policy, {}, clipped=clipped)


@objective("seq_mean_token_mean")
def sapo(
    tokens: Tokens, *, temperature_positive: ArrayLike = 1.0, temperature_negative: ArrayLike = 1.05
) -> Terms:
    """SAPO: replace the clip by a sigmoid function of the ratio (arXiv 2511.20347).

        J_t = (4 / τ) · sigmoid(τ (ρ_t − 1)) · A     τ = 1.0 for A > 0, 1.05 for A < 0

    `d J_t / d log π_t` is `4 σ (1 − σ) ρ A`, where σ is the sigmoid. The factor of A is 1 at ρ = 1 and goes
    smoothly to 0 for very small and very large ρ.

    Args:
      temperature_positive, temperature_negative: τ for A > 0 and A < 0. With a larger τ, the factor of A goes
        to 0 faster.

    >>> logp = jnp.log(jnp.array([[1.0], [2.0]]))
    >>> gradient, _ = jax.grad(sapo, has_aux=True)(logp, jnp.zeros((2, 1)), jnp.ones(2), jnp.ones((2, 1)))
    >>> [round(float(g), 4) for g in -2 * gradient.ravel()]
    [1.0, 1.5729]
    """
    check_number("temperature_positive", temperature_positive, strict=True)
    check_number("temperature_negative", temperature_negative, strict=True)
    temperature = jnp.where(tokens.advantages > 0, temperature_positive, temperature_negative)
    # Use exp(log σ), because in the gradient σ (1 − σ) of the sigmoid, 1 − σ is inexact for large ρ.
    gate = jnp.exp(jax.nn.log_sigmoid(temperature * (tokens.ratio - 1.0)))
    return Terms(4.0 / temperature * gate * tokens.advantages, {})
