"""GRPO and its closest relatives, which clip the ratio: `min(ρ A, clip(ρ, low, high) A)`.

The package docstring defines the symbols and the four arrays with which each loss is called.
"""

from __future__ import annotations  # so that help() shows short types

import jax.numpy as jnp
from jax.lax import stop_gradient
from jax.typing import ArrayLike

from mugrpo_jax.objectives._checks import check_clip, check_number, check_shape
from mugrpo_jax.objectives._objective import Terms, Tokens, logp_on_tokens, min_form, objective
from mugrpo_jax.objectives.kl import safe_exp


@objective("seq_mean_token_mean")
def grpo(
    tokens: Tokens,
    *,
    clip_low: ArrayLike = 0.8,
    clip_high: ArrayLike = 1.2,
    dual_clip: ArrayLike | None = None,
) -> Terms:
    """GRPO: PPO's clipped loss with group advantages (arXiv 2402.03300).

        J_t = min(ρ_t A, clip(ρ_t, 0.8, 1.2) A) − β k3(π, reference)

    β is the shared knob `kl_coef`, which is 0 by default. A positive β needs `reference_logp`. Many
    implementations use the aggregation `token_mean` instead of the default.

    Args:
      clip_low, clip_high: bounds on the ratio.
      dual_clip: c. For A < 0 the gradient is also 0 where ρ > c. None means no dual clip.

    Metrics: `clipped/tokens`, the share of clipped tokens.

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
    """Dr. GRPO: GRPO without dividing by the standard deviation and the response length (arXiv 2503.20783).

        J_t = min(ρ_t A, clip(ρ_t, 0.8, 1.2) A)     with A = r − mean, summed and divided by n · L_max

    The caller computes the advantages with `group_advantages(kind="mean")`. n is the number of responses, and
    L_max is the shared knob `max_length`, by default the width T of the arrays. If batches are padded to
    different widths, pass `max_length` or `denominator`.

    Args:
      clip_low, clip_high: bounds on the ratio.
      dual_clip: c. For A < 0 the gradient is also 0 where ρ > c. None means no dual clip.

    Metrics: `clipped/tokens`, the share of clipped tokens.

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
    """DAPO: use GRPO with a higher upper bound on the ratio and a mean over all tokens (arXiv 2503.14476).

        J_t = min(ρ_t A, clip(ρ_t, 0.8, 1.28) A)

    Two parts of the method come before the loss. Groups with equal rewards are left out of the batch, see
    `equal_groups`, or `batch.equal_groups: drop` in a config. Unlike in the paper, no new groups are sampled
    to replace these groups. Long responses get a lower reward, see `overlong_penalty`, or `overlong_buffer`
    in a config.

    Args:
      clip_low, clip_high: bounds on the ratio.
      dual_clip: c. For A < 0 the gradient is also 0 where ρ > c. None means no dual clip.

    Metrics: `clipped/tokens`, the share of clipped tokens.

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
    """Decoupled PPO: clip the ratio to a proximal policy, not to the behavior policy (arXiv 2110.00641).

        J_t = stop_gradient(min(π_prox / b, 5)) · min(u_t A, clip(u_t, 0.8, 1.2) A)     u_t = π / π_prox

    π_prox is the proximal policy, a recent version of π. The first factor corrects for stale data, and the
    clip limits only the change since π_prox. arXiv 2505.24298 uses this loss for asynchronous training. Its
    code drops tokens with π_prox / b above the cap; here the weight of these tokens is the cap.

    Args:
      proximal_logp: `[B, T]` log-probs of the proximal policy, for example the policy before the update.
      clip_low, clip_high: bounds on u.
      behavior_cap: upper bound on π_prox / b.
      dual_clip: c. For A < 0 the gradient is also 0 where u > c. None means no dual clip.

    Metrics: `clipped/tokens` (share) and `behavior_weight/tokens`, the mean of the first factor.

    >>> logp, proximal_logp = jnp.log(jnp.array([[1.5, 0.9]])), jnp.log(jnp.array([[1.0, 3.0]]))
    >>> batch = (logp, jnp.zeros((1, 2)), jnp.array([1.0]), jnp.ones((1, 2)))
    >>> loss, _ = decoupled_ppo(*batch, proximal_logp=proximal_logp)
    >>> round(float(loss), 4)  # −(1 · 1.2 + 3 · 0.3) / 2
    -1.05
    """
    check_clip(clip_low, clip_high)
    check_number("behavior_cap", behavior_cap, strict=True)
    check_shape("proximal_logp", proximal_logp, tokens.mask.shape)
    proximal = stop_gradient(logp_on_tokens(proximal_logp, tokens.mask))
    weight = jnp.minimum(safe_exp(proximal - tokens.behavior_logp), behavior_cap)
    step_ratio = safe_exp(tokens.logp - proximal)
    surrogate, clipped = min_form(step_ratio, tokens.advantages, clip_low, clip_high, dual_clip)
    return Terms(weight * surrogate, {"behavior_weight/tokens": tokens.mean(weight)}, clipped=clipped)


def _clipped(tokens: Tokens, clip_low: ArrayLike, clip_high: ArrayLike, dual_clip: ArrayLike | None) -> Terms:
    check_clip(clip_low, clip_high)
    surrogate, clipped = min_form(tokens.ratio, tokens.advantages, clip_low, clip_high, dual_clip)
    return Terms(surrogate, {}, clipped=clipped)
