"""Objectives in which a token beyond the bounds keeps a bounded gradient instead of none."""

from __future__ import annotations

from typing import Unpack

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jax.typing import ArrayLike

from mugrpo_jax.objectives._checks import check_bounds, check_number
from mugrpo_jax.objectives._objective import (
    SharedKnobs,
    finish,
    min_form,
    objective,
    read_tokens,
    token_fraction,
)
from mugrpo_jax.objectives.metrics import Metrics


@objective
def cispo(
    logp: ArrayLike,
    behavior_logp: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    denominator: ArrayLike | None = None,
    clip_low: ArrayLike = 0.0,
    clip_high: ArrayLike = 5.0,
    aggregation: str = "token_mean",
    **shared: Unpack[SharedKnobs],
) -> tuple[jax.Array, Metrics]:
    """CISPO: clip the importance weight, not the update (arXiv 2506.13585).

        J_t = sg(clip(ρ_t, 0, 5)) · A · log π

    Every token keeps a gradient; its weight is bounded. The lower bound is off at 0.

    Args:
      logp: `[B, T]` log-probs of the policy.
      behavior_logp: `[B, T]` log-probs stored when the responses were sampled.
      advantages: `[B]` or `[B, T]`, see `group_advantages`.
      mask: `[B, T]`, non-zero on response tokens.
      denominator: that of the whole update, when this call sees a part of it.
      clip_low, clip_high: bounds on the weight.
      aggregation: see `AGGREGATIONS`.
      **shared: the knobs all objectives share, see `help(mugrpo_jax.objectives)`.

    Returns:
      The loss, and metrics with `clipped/tokens`, the share of tokens whose weight is at a bound.

    >>> logp, behavior_logp = jnp.array([[-1.0, -2.0]]), jnp.array([[-1.0, -4.0]])
    >>> loss, _ = cispo(logp, behavior_logp, jnp.array([1.0]), jnp.ones((1, 2)))
    >>> round(float(loss), 4)  # −(1 · −1 + 5 · −2) / 2: the second ratio is e² = 7.39
    5.5
    """
    check_bounds(clip_low, clip_high)
    tokens = read_tokens(logp, behavior_logp, advantages, mask)
    ratio = stop_gradient(tokens.ratio)
    weight = jnp.clip(ratio, clip_low, clip_high)
    return finish(
        cispo,
        tokens,
        weight * tokens.advantages * tokens.logp,
        {"clipped/tokens": token_fraction(tokens, weight != ratio)},
        denominator=denominator,
        aggregation=aggregation,
        shared=shared,
    )


@objective
def gppo(
    logp: ArrayLike,
    behavior_logp: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    denominator: ArrayLike | None = None,
    clip_low: ArrayLike = 0.8,
    clip_high: ArrayLike = 1.28,
    aggregation: str = "token_mean",
    **shared: Unpack[SharedKnobs],
) -> tuple[jax.Array, Metrics]:
    """GPPO: the values of PPO, with a gradient on clipped tokens (arXiv 2508.07629).

        J_t = min(ρ_t A, sg(clip(ρ_t, 0.8, 1.28) / ρ_t) ρ_t A)

    A clipped token pushes with the weight of the bound it stands on: `d J / d log π = clip(ρ) A`.

    Args:
      logp: `[B, T]` log-probs of the policy.
      behavior_logp: `[B, T]` log-probs stored when the responses were sampled.
      advantages: `[B]` or `[B, T]`, see `group_advantages`.
      mask: `[B, T]`, non-zero on response tokens.
      denominator: that of the whole update, when this call sees a part of it.
      clip_low, clip_high: bounds on the ratio.
      aggregation: see `AGGREGATIONS`.
      **shared: the knobs all objectives share, see `help(mugrpo_jax.objectives)`.

    Returns:
      The loss, and metrics with `clipped/tokens`.

    >>> logp = jnp.log(jnp.array([[2.0, 1.0]]))
    >>> rest = (jnp.zeros((1, 2)), jnp.array([1.0]), jnp.ones((1, 2)))
    >>> (loss, _), gradient = jax.value_and_grad(gppo, has_aux=True)(logp, *rest)
    >>> print(loss, gradient)
    -1.14 [[-0.64 -0.5 ]]
    """
    check_bounds(clip_low, clip_high)
    tokens = read_tokens(logp, behavior_logp, advantages, mask)
    surrogate, clipped = min_form(tokens.ratio, tokens.advantages, clip_low, clip_high)
    # exp(l − sg(l)) is ρ / sg(ρ) without dividing by a ratio that may be tiny: 1, with gradient 1.
    one = jnp.exp(tokens.log_ratio - stop_gradient(tokens.log_ratio))
    return finish(
        gppo,
        tokens,
        jnp.where(clipped, stop_gradient(surrogate) * one, surrogate),
        {"clipped/tokens": token_fraction(tokens, clipped)},
        denominator=denominator,
        aggregation=aggregation,
        shared=shared,
    )


@objective
def sapo(
    logp: ArrayLike,
    behavior_logp: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    denominator: ArrayLike | None = None,
    temperature_positive: ArrayLike = 1.0,
    temperature_negative: ArrayLike = 1.05,
    aggregation: str = "seq_mean_token_mean",
    **shared: Unpack[SharedKnobs],
) -> tuple[jax.Array, Metrics]:
    """SAPO: a sigmoid gate in place of the clip (arXiv 2511.20347).

        J_t = (4 / τ) · sigmoid(τ (ρ_t − 1)) · A     τ = 1.0 for A > 0, 1.05 for A < 0

    The weight of the gradient, `4 σ (1 − σ) ρ`, is 1 on-policy and fades smoothly on both sides.

    Args:
      logp: `[B, T]` log-probs of the policy.
      behavior_logp: `[B, T]` log-probs stored when the responses were sampled.
      advantages: `[B]` or `[B, T]`, see `group_advantages`.
      mask: `[B, T]`, non-zero on response tokens.
      denominator: that of the whole update, when this call sees a part of it.
      temperature_positive, temperature_negative: τ by the sign of the advantage; larger fades faster.
      aggregation: see `AGGREGATIONS`.
      **shared: the knobs all objectives share, see `help(mugrpo_jax.objectives)`.

    Returns:
      The loss and metrics.

    >>> logp = jnp.log(jnp.array([[1.0], [2.0]]))
    >>> gradient, _ = jax.grad(sapo, has_aux=True)(logp, jnp.zeros((2, 1)), jnp.ones(2), jnp.ones((2, 1)))
    >>> [round(float(g), 4) for g in -2 * gradient.ravel()]
    [1.0, 1.5729]
    """
    check_number("temperature_positive", temperature_positive, strict=True)
    check_number("temperature_negative", temperature_negative, strict=True)
    tokens = read_tokens(logp, behavior_logp, advantages, mask)
    temperature = jnp.where(tokens.advantages > 0, temperature_positive, temperature_negative)
    # Through the logarithm: the gradient σ (1 − σ) of the sigmoid itself cancels for large ρ.
    gate = jnp.exp(jax.nn.log_sigmoid(temperature * (tokens.ratio - 1.0)))
    return finish(
        sapo,
        tokens,
        4.0 / temperature * gate * tokens.advantages,
        {},
        denominator=denominator,
        aggregation=aggregation,
        shared=shared,
    )
