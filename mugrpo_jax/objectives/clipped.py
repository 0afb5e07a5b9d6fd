"""The clipped surrogate `min(ρ A, clip(ρ, low, high) A)` with the bounds and averages of each method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jax.typing import ArrayLike

from mugrpo_jax.objectives._checks import check_bounds, check_choice, check_number, check_shape
from mugrpo_jax.objectives._objective import (
    SharedKnobs,
    finish,
    min_form,
    objective,
    read_tokens,
    token_fraction,
    token_mean,
)
from mugrpo_jax.objectives.kl import safe_exp
from mugrpo_jax.objectives.metrics import Metrics
from mugrpo_jax.objectives.veto import VETO_SCOPES, veto_mask, veto_metrics


@objective
def mu_grpo(
    logp: ArrayLike,
    behavior_logp: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    denominator: ArrayLike | None = None,
    clip_low: ArrayLike = 0.0,
    clip_high: ArrayLike = 5.0,
    veto: str = "suffix",
    veto_ratio: ArrayLike = 1e-4,
    aggregation: str = "token_mean",
    **shared: Unpack[SharedKnobs],
) -> tuple[jax.Array, Metrics]:
    """µ-GRPO: relaxed clipping and the negative-advantage veto (arXiv 2605.17570).

        L = −(1/Z) Σ_t m_t · keep_t · min(ρ_t A, clip(ρ_t, 0, 5) A)

    For A > 0 the gradient stops beyond ρ = 5; for A < 0 nothing is clipped, and `keep` is the veto, computed
    from the current ratios. Z counts the tokens of the original mask: a veto removes terms and rescales
    nothing. Bounds and veto are published; the min-form and Z are our reading.

    Args:
      logp: `[B, T]` log-probs of the policy.
      behavior_logp: `[B, T]` log-probs stored when the responses were sampled.
      advantages: `[B]` or `[B, T]`, see `group_advantages`.
      mask: `[B, T]`, non-zero on response tokens.
      denominator: Z of the whole update, when this call sees a part of it.
      clip_low, clip_high: bounds on the ratio.
      veto: scope of the veto, see `veto_mask`.
      veto_ratio: τ, the ratio below which a token is a trigger.
      aggregation: see `AGGREGATIONS`.
      **shared: the knobs all objectives share, see `help(mugrpo_jax.objectives)`.

    Returns:
      The loss, and metrics with `clipped/tokens` and those of `veto_metrics`.

    >>> ratio = jnp.array([[6.0, 1.0, 1.0], [1.0, 1e-5, 0.5]])
    >>> loss, metrics = mu_grpo(jnp.log(ratio), jnp.zeros((2, 3)), jnp.array([1.0, -1.0]), jnp.ones((2, 3)))
    >>> round(float(loss), 4)  # −(5 + 1 + 1 − 1 − 1e-5) / 6: the last token is vetoed
    -1.0
    >>> round(float(metrics["vetoed/tokens"]), 4)
    0.1667
    """
    check_bounds(clip_low, clip_high)
    check_choice("veto", veto, VETO_SCOPES)
    check_number("veto_ratio", veto_ratio, strict=True)
    tokens = read_tokens(logp, behavior_logp, advantages, mask)
    surrogate, clipped = min_form(tokens.ratio, tokens.advantages, clip_low, clip_high)
    seen = (tokens.log_ratio, tokens.advantages, tokens.mask)
    keep = veto_mask(*seen, scope=veto, ratio=veto_ratio)
    metrics = {
        "clipped/tokens": token_fraction(tokens, clipped),
        **veto_metrics(*seen, keep, ratio=veto_ratio),
    }
    return finish(
        mu_grpo,
        tokens,
        keep * surrogate,
        metrics,
        denominator=denominator,
        aggregation=aggregation,
        shared=shared,
    )


@objective
def grpo(
    logp: ArrayLike,
    behavior_logp: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    denominator: ArrayLike | None = None,
    clip_low: ArrayLike = 0.8,
    clip_high: ArrayLike = 1.2,
    aggregation: str = "seq_mean_token_mean",
    **shared: Unpack[SharedKnobs],
) -> tuple[jax.Array, Metrics]:
    """GRPO: PPO's clipped surrogate with group advantages (arXiv 2402.03300).

        J_t = min(ρ_t A, clip(ρ_t, 0.8, 1.2) A) − β k3(π, reference)

    β is `kl_coef`, zero unless set; it needs `reference_logp`.

    Args:
      logp: `[B, T]` log-probs of the policy.
      behavior_logp: `[B, T]` log-probs stored when the responses were sampled.
      advantages: `[B]` or `[B, T]`, see `group_advantages`.
      mask: `[B, T]`, non-zero on response tokens.
      denominator: that of the whole update, when this call sees a part of it.
      clip_low, clip_high: bounds on the ratio.
      aggregation: see `AGGREGATIONS`; `token_mean` is as common as the default.
      **shared: the knobs all objectives share, see `help(mugrpo_jax.objectives)`.

    Returns:
      The loss, and metrics with `clipped/tokens`.

    >>> logp = jnp.log(jnp.array([[1.5, 1.0], [0.5, 1.0]]))
    >>> loss, metrics = grpo(logp, jnp.zeros((2, 2)), jnp.array([1.0, -1.0]), jnp.array([[1, 1], [1, 0]]))
    >>> round(float(loss), 4)  # −((1.2 + 1) / 2 − 0.8) / 2
    -0.15
    """
    return _clipped(
        grpo,
        (logp, behavior_logp, advantages, mask),
        clip_low,
        clip_high,
        denominator=denominator,
        aggregation=aggregation,
        shared=shared,
    )


@objective
def dr_grpo(
    logp: ArrayLike,
    behavior_logp: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    denominator: ArrayLike | None = None,
    clip_low: ArrayLike = 0.8,
    clip_high: ArrayLike = 1.2,
    aggregation: str = "constant",
    **shared: Unpack[SharedKnobs],
) -> tuple[jax.Array, Metrics]:
    """Dr. GRPO: GRPO without its two biases (arXiv 2503.20783).

        J_t = min(ρ_t A, clip(ρ_t, 0.8, 1.2) A)     with A = r − mean, summed and divided by n · L_max

    No standard deviation in the advantage (`group_advantages(kind="mean")`, the caller's part) and no length
    of the response in the average. L_max is the knob `max_length`, by default the width T of the arrays: give
    it, or `denominator`, whenever batches are padded to different widths.

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

    >>> logp = jnp.log(jnp.array([[1.5, 1.0], [0.5, 1.0]]))
    >>> loss, _ = dr_grpo(
    ...     logp, jnp.zeros((2, 2)), jnp.array([1.0, -1.0]), jnp.array([[1, 1], [1, 0]]), max_length=10
    ... )
    >>> round(float(loss), 4)  # −(1.2 + 1 − 0.8) / (2 · 10)
    -0.07
    """
    return _clipped(
        dr_grpo,
        (logp, behavior_logp, advantages, mask),
        clip_low,
        clip_high,
        denominator=denominator,
        aggregation=aggregation,
        shared=shared,
    )


@objective
def dapo(
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
    """DAPO: a higher upper bound and a mean over tokens (arXiv 2503.14476).

        J_t = min(ρ_t A, clip(ρ_t, 0.8, 1.28) A)

    The rest of the method happens before the loss: groups with equal rewards are left out of the batch
    (`equal_groups`; in a run `batch.equal_groups: drop`, which does not resample in their place), and
    overlong responses are penalised in the reward (`overlong_penalty`; in a run `overlong_buffer`).

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

    >>> logp = jnp.log(jnp.array([[1.5, 1.0], [0.5, 1.0]]))
    >>> loss, _ = dapo(logp, jnp.zeros((2, 2)), jnp.array([1.0, -1.0]), jnp.array([[1, 1], [1, 0]]))
    >>> round(float(loss), 4)  # −(1.28 + 1 − 0.8) / 3
    -0.4933
    """
    return _clipped(
        dapo,
        (logp, behavior_logp, advantages, mask),
        clip_low,
        clip_high,
        denominator=denominator,
        aggregation=aggregation,
        shared=shared,
    )


@objective
def decoupled_ppo(
    logp: ArrayLike,
    behavior_logp: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    proximal_logp: ArrayLike,
    denominator: ArrayLike | None = None,
    clip_low: ArrayLike = 0.8,
    clip_high: ArrayLike = 1.2,
    behavior_cap: ArrayLike = 5.0,
    aggregation: str = "token_mean",
    **shared: Unpack[SharedKnobs],
) -> tuple[jax.Array, Metrics]:
    """Decoupled PPO: the trust region is around a proximal policy, not the behavior (arXiv 2110.00641).

        J_t = sg(min(π_prox / b, 5)) · min(u_t A, clip(u_t, 0.8, 1.2) A)     u_t = π / π_prox

    With a proximal policy that follows the training, stale data is corrected by the first factor and the
    clipping measures recent steps only (used for asynchronous training in arXiv 2505.24298).

    Args:
      logp: `[B, T]` log-probs of the policy.
      behavior_logp: `[B, T]` log-probs stored when the responses were sampled.
      advantages: `[B]` or `[B, T]`, see `group_advantages`.
      mask: `[B, T]`, non-zero on response tokens.
      proximal_logp: `[B, T]` log-probs of the proximal policy, for instance that before the update.
      denominator: that of the whole update, when this call sees a part of it.
      clip_low, clip_high: bounds on u.
      behavior_cap: upper bound on π_prox / b.
      aggregation: see `AGGREGATIONS`.
      **shared: the knobs all objectives share, see `help(mugrpo_jax.objectives)`.

    Returns:
      The loss, and metrics with `clipped/tokens` and the mean weight `behavior_weight/tokens`.

    >>> logp, proximal_logp = jnp.log(jnp.array([[1.5, 0.9]])), jnp.log(jnp.array([[1.0, 3.0]]))
    >>> batch = (logp, jnp.zeros((1, 2)), jnp.array([1.0]), jnp.ones((1, 2)))
    >>> loss, _ = decoupled_ppo(*batch, proximal_logp=proximal_logp)
    >>> round(float(loss), 4)  # −(1 · 1.2 + 3 · 0.3) / 2
    -1.05
    """
    check_bounds(clip_low, clip_high)
    check_number("behavior_cap", behavior_cap, strict=True)
    check_shape("proximal_logp", proximal_logp, jnp.shape(logp))
    tokens = read_tokens(logp, behavior_logp, advantages, mask)
    proximal = read_tokens(stop_gradient(jnp.asarray(proximal_logp)), behavior_logp, advantages, mask)
    weight = jnp.minimum(proximal.ratio, behavior_cap)
    update_ratio = safe_exp(tokens.logp - proximal.logp)
    surrogate, clipped = min_form(update_ratio, tokens.advantages, clip_low, clip_high)
    metrics = {
        "clipped/tokens": token_fraction(tokens, clipped),
        "behavior_weight/tokens": token_mean(tokens, weight),
    }
    return finish(
        decoupled_ppo,
        tokens,
        weight * surrogate,
        metrics,
        denominator=denominator,
        aggregation=aggregation,
        shared=shared,
    )


def _clipped(
    function: Callable[..., Any],
    inputs: Sequence[ArrayLike],
    clip_low: ArrayLike,
    clip_high: ArrayLike,
    **rest: Any,
) -> tuple[jax.Array, Metrics]:
    check_bounds(clip_low, clip_high)
    tokens = read_tokens(*inputs)
    surrogate, clipped = min_form(tokens.ratio, tokens.advantages, clip_low, clip_high)
    return finish(function, tokens, surrogate, {"clipped/tokens": token_fraction(tokens, clipped)}, **rest)
