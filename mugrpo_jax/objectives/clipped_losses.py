"""GRPO and its closest relatives, which clip the ratio: `min(ρ A, clip(ρ, low, high) A)`.

Each loss is written as a formula of `Tokens` and called with four arrays (see `_objective`).
"""

from __future__ import annotations  # so that help() shows short types

import jax.numpy as jnp
from jax.lax import stop_gradient
from jax.typing import ArrayLike

from mugrpo_jax.objectives._checks import check_bounds, check_number, check_shape
from mugrpo_jax.objectives._objective import Terms, Tokens, min_form, objective, on_tokens
from mugrpo_jax.objectives.kl import safe_exp


@objective("seq_mean_token_mean")
def grpo(
    tokens: Tokens,
    *,
    clip_low: ArrayLike = 0.8,
    clip_high: ArrayLike = 1.2,
    dual_clip: ArrayLike | None = None,
) -> Terms:
    """GRPO: PPO's clipped surrogate with group advantages (arXiv 2402.03300).

        J_t = min(ρ_t A, clip(ρ_t, 0.8, 1.2) A) − β k3(π, reference)

    β is the shared knob `kl_coef`, zero by default; it needs `reference_logp`. Averaging by `token_mean` is
    as common as the default.

    Args:
      clip_low, clip_high: bounds on the ratio.
      dual_clip: c; for A < 0 the gradient also stops beyond ρ = c.

    Metrics: `clipped/tokens`.

    >>> logp = jnp.log(jnp.array([[1.5, 1.0], [0.5, 1.0]]))
    >>> loss, metrics = grpo(logp, jnp.zeros((2, 2)), jnp.array([1.0, -1.0]), jnp.array([[1, 1], [1, 0]]))
    >>> round(float(loss), 4)  # −((1.2 + 1) / 2 − 0.8) / 2
    -0.15
    """
    return _clipped(tokens, clip_low, clip_high, dual_clip)


@objective("constant")
def dr_grpo(
    tokens: Tokens,
    *,
    clip_low: ArrayLike = 0.8,
    clip_high: ArrayLike = 1.2,
    dual_clip: ArrayLike | None = None,
) -> Terms:
    """Dr. GRPO: GRPO without its two biases (arXiv 2503.20783).

        J_t = min(ρ_t A, clip(ρ_t, 0.8, 1.2) A)     with A = r − mean, summed and divided by n · L_max

    The advantage has no standard deviation: the caller uses `group_advantages(kind="mean")`. The average has
    no response length: L_max is the shared knob `max_length`, by default the width T of the arrays. Give
    `max_length` or `denominator` whenever batches are padded to different widths.

    Args:
      clip_low, clip_high: bounds on the ratio.
      dual_clip: c; for A < 0 the gradient also stops beyond ρ = c.

    Metrics: `clipped/tokens`.

    >>> logp = jnp.log(jnp.array([[1.5, 1.0], [0.5, 1.0]]))
    >>> loss, _ = dr_grpo(
    ...     logp, jnp.zeros((2, 2)), jnp.array([1.0, -1.0]), jnp.array([[1, 1], [1, 0]]), max_length=10
    ... )
    >>> round(float(loss), 4)  # −(1.2 + 1 − 0.8) / (2 · 10)
    -0.07
    """
    return _clipped(tokens, clip_low, clip_high, dual_clip)


@objective("token_mean")
def dapo(
    tokens: Tokens,
    *,
    clip_low: ArrayLike = 0.8,
    clip_high: ArrayLike = 1.28,
    dual_clip: ArrayLike | None = None,
) -> Terms:
    """DAPO: GRPO with a higher upper bound on the ratio and a mean over all tokens (arXiv 2503.14476).

        J_t = min(ρ_t A, clip(ρ_t, 0.8, 1.28) A)

    The rest of the method happens before the loss. Groups with equal rewards are left out of the batch: see
    `equal_groups`, or `batch.equal_groups: drop` in a config. Unlike in the paper, no new groups are sampled
    to replace them. Too long responses are penalised in the reward: see `overlong_penalty`, or
    `overlong_buffer` in a config.

    Args:
      clip_low, clip_high: bounds on the ratio.
      dual_clip: c; for A < 0 the gradient also stops beyond ρ = c.

    Metrics: `clipped/tokens`.

    >>> logp = jnp.log(jnp.array([[1.5, 1.0], [0.5, 1.0]]))
    >>> loss, _ = dapo(logp, jnp.zeros((2, 2)), jnp.array([1.0, -1.0]), jnp.array([[1, 1], [1, 0]]))
    >>> round(float(loss), 4)  # −(1.28 + 1 − 0.8) / 3
    -0.4933
    """
    return _clipped(tokens, clip_low, clip_high, dual_clip)


@objective("token_mean")
def decoupled_ppo(
    tokens: Tokens,
    *,
    proximal_logp: ArrayLike,
    clip_low: ArrayLike = 0.8,
    clip_high: ArrayLike = 1.2,
    behavior_cap: ArrayLike = 5.0,
    dual_clip: ArrayLike | None = None,
) -> Terms:
    """Decoupled PPO: the trust region is around a proximal policy, not the behavior (arXiv 2110.00641).

        J_t = stop_gradient(min(π_prox / b, 5)) · min(u_t A, clip(u_t, 0.8, 1.2) A)     u_t = π / π_prox

    The proximal policy follows the training. The first factor corrects for stale data; the clip measures
    recent steps only (used for asynchronous training in arXiv 2505.24298, whose code drops tokens above the
    cap where this caps them).

    Args:
      proximal_logp: `[B, T]` log-probs of the proximal policy, for instance of the policy before the update.
      clip_low, clip_high: bounds on u.
      behavior_cap: upper bound on π_prox / b.
      dual_clip: c; for A < 0 the gradient also stops beyond u = c.

    Metrics: `clipped/tokens` and the mean weight `behavior_weight/tokens`.

    >>> logp, proximal_logp = jnp.log(jnp.array([[1.5, 0.9]])), jnp.log(jnp.array([[1.0, 3.0]]))
    >>> batch = (logp, jnp.zeros((1, 2)), jnp.array([1.0]), jnp.ones((1, 2)))
    >>> loss, _ = decoupled_ppo(*batch, proximal_logp=proximal_logp)
    >>> round(float(loss), 4)  # −(1 · 1.2 + 3 · 0.3) / 2
    -1.05
    """
    check_bounds(clip_low, clip_high)
    check_number("behavior_cap", behavior_cap, strict=True)
    check_shape("proximal_logp", proximal_logp, tokens.mask.shape)
    proximal = stop_gradient(on_tokens(proximal_logp, tokens.mask))
    weight = jnp.minimum(safe_exp(proximal - tokens.behavior_logp), behavior_cap)
    step_ratio = safe_exp(tokens.logp - proximal)
    surrogate, clipped = min_form(step_ratio, tokens.advantages, clip_low, clip_high, dual_clip)
    metrics = {"clipped/tokens": tokens.share(clipped), "behavior_weight/tokens": tokens.mean(weight)}
    return Terms(weight * surrogate, metrics)


def _clipped(tokens: Tokens, clip_low: ArrayLike, clip_high: ArrayLike, dual_clip: ArrayLike | None) -> Terms:
    check_bounds(clip_low, clip_high)
    surrogate, clipped = min_form(tokens.ratio, tokens.advantages, clip_low, clip_high, dual_clip)
    return Terms(surrogate, {"clipped/tokens": tokens.share(clipped)})
