"""Objectives that read a bound from the batch itself: M2PO, P3O and BAPO.

The statistic of a call is that of the arrays it sees, without gradient; arrays sharded over devices and hosts
count as a whole. An update in micro-batches therefore has one statistic per micro-batch, which is what the
papers' code does, and its gradient depends on the split.
The pooled form computes the statistic once for the whole update (`m2po_bound`, `effective_sample_size` or
`ratio_sums`, `bapo_bounds`) and hands it to every call (`log_bound`, `ess`, `bounds`): then any split gives
the same gradient.
"""

from __future__ import annotations

from typing import Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient
from jax.typing import ArrayLike

from mugrpo_jax.objectives._checks import check_bounds, check_choice, check_flag, check_number, check_rank
from mugrpo_jax.objectives._objective import (
    SharedKnobs,
    Tokens,
    finish,
    min_form,
    objective,
    read_tokens,
    token_fraction,
)
from mugrpo_jax.objectives._search import largest_float
from mugrpo_jax.objectives.metrics import Metrics, mean_over
from mugrpo_jax.objectives.moments import effective_sample_size

M2PO_FORMS = ("winsorize", "mask")


@objective
def m2po(
    logp: ArrayLike,
    behavior_logp: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    denominator: ArrayLike | None = None,
    threshold: ArrayLike = 0.04,
    form: str = "winsorize",
    log_bound: ArrayLike | None = None,
    aggregation: str = "token_mean",
    **shared: Unpack[SharedKnobs],
) -> tuple[jax.Array, Metrics]:
    """M2PO: keep the second moment of the harmful log-ratios below a threshold (arXiv 2510.01161).

    Harmful are the tokens that move further away: `Q = {A > 0, ρ > 1} ∪ {A < 0, ρ < 1}`. While the mean of l²
    over Q is within the threshold nothing is clipped. Beyond it, with the bound c of `m2po_bound`:

        winsorize   J_t = min(ρ_t A, clip(ρ_t, e^−c, e^c) A)
        mask        J_t = ρ_t A, and 0 for harmful tokens with |l_t| > c

    Args:
      logp: `[B, T]` log-probs of the policy.
      behavior_logp: `[B, T]` log-probs stored when the responses were sampled.
      advantages: `[B]` or `[B, T]`, see `group_advantages`.
      mask: `[B, T]`, non-zero on response tokens.
      denominator: that of the whole update, when this call sees a part of it.
      threshold: τ, the second moment that is tolerated.
      form: `winsorize` or `mask`.
      log_bound: c of the whole update, from `m2po_bound`; by default that of this call.
      aggregation: see `AGGREGATIONS`.
      **shared: the knobs all objectives share, see `help(mugrpo_jax.objectives)`.

    Returns:
      The loss, and metrics with `clipped/tokens`, the count `harmful_tokens`, their mean l² in
      `second_moment/harmful_tokens`, and the tightest lower bound `clip_low_max` (0: nothing clipped).

    >>> size = jnp.array([[0.05, 0.1, 0.1, 0.2, 0.3, 0.9]])
    >>> loss, metrics = m2po(size, jnp.zeros((1, 6)), jnp.array([1.0]), jnp.ones((1, 6)))
    >>> round(float(metrics["second_moment/harmful_tokens"]), 4), round(float(metrics["clip_low_max"]), 4)
    (0.1604, 0.8187)
    """
    check_number("threshold", threshold, strict=True)
    check_choice("form", form, M2PO_FORMS)
    tokens = read_tokens(logp, behavior_logp, advantages, mask)
    harmful = _harmful(tokens)
    log_ratio = stop_gradient(tokens.log_ratio)
    bound = _m2po_bound(jnp.abs(log_ratio), harmful, threshold, form) if log_bound is None else log_bound
    check_number("log_bound", bound)
    bound = stop_gradient(jnp.asarray(bound, jnp.float32))
    if form == "mask":
        clipped = harmful & (jnp.abs(log_ratio) > bound)
        surrogate = jnp.where(clipped, 0.0, tokens.ratio * tokens.advantages)
    else:
        surrogate, clipped = min_form(tokens.ratio, tokens.advantages, jnp.exp(-bound), jnp.exp(bound))
    metrics = {
        "clipped/tokens": token_fraction(tokens, clipped),
        "harmful_tokens": harmful.sum(),
        "second_moment/harmful_tokens": mean_over(jnp.where(harmful, log_ratio**2, 0.0).sum(), harmful.sum()),
        "clip_low_max": jnp.exp(-bound),
    }
    return finish(
        m2po,
        tokens,
        surrogate,
        metrics,
        denominator=denominator,
        aggregation=aggregation,
        shared=shared,
    )


def m2po_bound(
    log_ratio: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    threshold: ArrayLike = 0.04,
    form: str = "winsorize",
) -> jax.Array:
    """The bound c on |l| that brings the second moment of the harmful tokens down to the threshold τ.

    With `v_0 ≤ v_1 ≤ …` the l² of the n harmful tokens:

        winsorize   c = sqrt(v_{k−1}) for the first k with Σ_{j ≤ k} v_j + (n − k − 1) v_k ≥ τ n
        mask        c = the largest |l| that stays when the largest l² are removed until their mean is ≤ τ;
                    tokens that tie with a removed one are removed with it

    c is infinite while the mean is within τ, and 0 if even the smallest v is not (that case is our choice).

    Args:
      log_ratio: `[B, T]`.
      advantages: `[B]` or `[B, T]`.
      mask: `[B, T]`, non-zero on response tokens.
      threshold: τ.
      form: `winsorize` or `mask`.

    Returns:
      A scalar without gradient, the `log_bound` of `m2po`.

    >>> size = jnp.array([[0.05, 0.1, 0.1, 0.2, 0.3, 0.9]])
    >>> round(float(m2po_bound(size, jnp.array([1.0]), jnp.ones((1, 6)))), 4)
    0.2
    """
    check_rank("log_ratio", log_ratio, 2, "[B, T]")
    check_number("threshold", threshold, strict=True)
    check_choice("form", form, M2PO_FORMS)
    log_ratio = stop_gradient(jnp.asarray(log_ratio))
    tokens = read_tokens(log_ratio, jnp.zeros_like(log_ratio), advantages, mask)
    return _m2po_bound(jnp.abs(tokens.log_ratio), _harmful(tokens), threshold, form)


def _harmful(tokens: Tokens) -> jax.Array:
    """Tokens that the update moves further away from the behavior policy."""
    return tokens.mask & (stop_gradient(tokens.log_ratio) * jnp.sign(tokens.advantages) > 0)


def _m2po_bound(size: jax.Array, harmful: jax.Array, threshold: ArrayLike, form: str) -> jax.Array:
    count = harmful.sum()
    squares = jnp.where(harmful, size**2, 0.0)

    def within(bound: jax.Array) -> jax.Array:
        if form == "winsorize":  # Σ_j min(v_j, v_k) is the sum of the first k + 1 and n − k − 1 times v_k
            return jnp.minimum(squares, bound**2).sum() < threshold * count
        kept = harmful & (size <= bound)
        return jnp.where(kept, squares, 0.0).sum() <= threshold * kept.sum()

    # The largest size that is within; the search itself may end anywhere between two sizes.
    bound = jnp.where(harmful & (size <= largest_float(within)), size, 0.0).max()
    return jnp.where(squares.sum() > threshold * count, bound, jnp.inf)


@objective
def p3o(
    logp: ArrayLike,
    behavior_logp: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    denominator: ArrayLike | None = None,
    ess: ArrayLike | None = None,
    safe_kl: bool = False,
    aggregation: str = "token_mean",
    **shared: Unpack[SharedKnobs],
) -> tuple[jax.Array, Metrics]:
    """P3O: the effective sample size caps the ratio and sets a pull to the behavior (arXiv 2605.12380).

        L_t = −sg(min(ρ_t, e)) · A · log π + (1 − e) · K_t
        K_t = l_t + exp(clip(−l_t, −10, 10)) − 1        e = effective_sample_size(l, m)

    The cap is e itself, on one side only. The method's own entropy bonus and k3 penalty towards a reference
    are the shared knobs `entropy_coef` and `kl_coef`.

    Outside the clamp (l < −10) the gradient of K as published is 1, which pushes such tokens further down.
    `safe_kl` keeps the value and uses the gradient `1 − exp(clip(−l, −10, 10))` everywhere; it is ours.

    Args:
      logp: `[B, T]` log-probs of the policy.
      behavior_logp: `[B, T]` log-probs stored when the responses were sampled.
      advantages: `[B]` or `[B, T]`, see `group_advantages`.
      mask: `[B, T]`, non-zero on response tokens.
      denominator: that of the whole update, when this call sees a part of it.
      ess: e of the whole update; by default that of this call.
      safe_kl: repair the gradient of K beyond the clamp.
      aggregation: see `AGGREGATIONS`.
      **shared: the knobs all objectives share, see `help(mugrpo_jax.objectives)`. `weights` leave K alone.

    Returns:
      The loss, and metrics with `ess/tokens`, `behavior_kl/tokens` (K) and `clipped/tokens`.

    >>> logp = jnp.log(jnp.array([[4.0, 1.0, 1.0, 1.0]]))
    >>> rest = (jnp.zeros((1, 4)), jnp.array([1.0]), jnp.ones((1, 4)))
    >>> gradient, metrics = jax.grad(p3o, has_aux=True)(logp, *rest, denominator=1)
    >>> round(float(metrics["ess/tokens"]), 6), round(float(gradient[0, 0]), 6)
    (0.644737, -0.378289)
    """
    check_flag("safe_kl", safe_kl)
    tokens = read_tokens(logp, behavior_logp, advantages, mask)
    if ess is None:
        ess = effective_sample_size(tokens.log_ratio, tokens.mask)
    check_number("ess", ess)
    ess = stop_gradient(jnp.asarray(ess, jnp.float32))
    ratio = stop_gradient(tokens.ratio)
    kl = _behavior_kl(tokens.log_ratio, safe=safe_kl)
    metrics = {
        "ess/tokens": ess,
        "behavior_kl/tokens": mean_over(kl.sum(), tokens.total),
        "clipped/tokens": token_fraction(tokens, ratio > ess),
    }
    return finish(
        p3o,
        tokens,
        jnp.minimum(ratio, ess) * tokens.advantages * tokens.logp,
        metrics,
        penalty=(1.0 - ess) * kl,
        denominator=denominator,
        aggregation=aggregation,
        shared=shared,
    )


def _behavior_kl(log_ratio: jax.Array, *, safe: bool) -> jax.Array:
    """K_t = l + exp(clip(−l, −10, 10)) − 1, as published or with the repaired gradient."""
    within = jnp.abs(log_ratio) <= 10.0
    reverse = jnp.exp(jnp.where(within, -log_ratio, stop_gradient(jnp.clip(-log_ratio, -10.0, 10.0))))
    kl = log_ratio + reverse - 1.0
    if not safe:
        return kl
    slope = stop_gradient(1.0 - reverse)
    return stop_gradient(kl) + slope * (log_ratio - stop_gradient(log_ratio))


@objective
def bapo(
    logp: ArrayLike,
    behavior_logp: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    denominator: ArrayLike | None = None,
    clip_low: float = 0.6,
    clip_low_max: float = 0.8,
    clip_high: float = 1.2,
    clip_high_max: float = 2.0,
    step: float = 0.05,
    target: ArrayLike = 1.0,
    bounds: tuple[ArrayLike, ArrayLike] | None = None,
    aggregation: str = "token_mean",
    **shared: Unpack[SharedKnobs],
) -> tuple[jax.Array, Metrics]:
    """BAPO: bounds that move until good responses weigh as much as bad ones (arXiv 2510.18927).

        J_t = min(ρ_t A, clip(ρ_t, c_l, c_h) A)     (c_l, c_h) from `bapo_bounds`

    Args:
      logp: `[B, T]` log-probs of the policy.
      behavior_logp: `[B, T]` log-probs stored when the responses were sampled.
      advantages: `[B]` or `[B, T]`, see `group_advantages`.
      mask: `[B, T]`, non-zero on response tokens.
      denominator: that of the whole update, when this call sees a part of it.
      clip_low, clip_low_max, clip_high, clip_high_max, step, target: see `bapo_bounds`.
      bounds: (c_l, c_h) of the whole update; by default those of this call.
      aggregation: see `AGGREGATIONS`.
      **shared: the knobs all objectives share, see `help(mugrpo_jax.objectives)`.

    Returns:
      The loss, and metrics with `clipped/tokens`, `clip_low/tokens` and `clip_high/tokens`.

    >>> logp = jnp.log(jnp.array([[1.5, 1.0], [1.0, 1.25]]))
    >>> rest = (jnp.zeros((2, 2)), jnp.array([1.0, -1.0]), jnp.ones((2, 2)))
    >>> loss, metrics = bapo(logp, *rest)
    >>> round(float(metrics["clip_high/tokens"]), 4)  # 1.25 + 1 weighs as much as 1 + 1.25
    1.25
    """
    tokens = read_tokens(logp, behavior_logp, advantages, mask)
    if bounds is None:
        bounds = bapo_bounds(
            tokens.log_ratio,
            tokens.advantages,
            tokens.mask,
            clip_low=clip_low,
            clip_low_max=clip_low_max,
            clip_high=clip_high,
            clip_high_max=clip_high_max,
            step=step,
            target=target,
        )
    if not isinstance(bounds, (tuple, list)) or len(bounds) != 2:
        raise ValueError(f"bounds is {bounds!r}; possible: a pair (c_l, c_h)")
    check_bounds(*bounds, names=("bounds[0]", "bounds[1]"))
    low, high = (stop_gradient(jnp.asarray(bound, jnp.float32)) for bound in bounds)
    surrogate, clipped = min_form(tokens.ratio, tokens.advantages, low, high)
    return finish(
        bapo,
        tokens,
        surrogate,
        {"clipped/tokens": token_fraction(tokens, clipped), "clip_low/tokens": low, "clip_high/tokens": high},
        denominator=denominator,
        aggregation=aggregation,
        shared=shared,
    )


def bapo_bounds(
    log_ratio: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    clip_low: float = 0.6,
    clip_low_max: float = 0.8,
    clip_high: float = 1.2,
    clip_high_max: float = 2.0,
    step: float = 0.05,
    target: ArrayLike = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """The first bounds at which the positive mass is at least `target` times the negative mass.

        positive mass = Σ_{A > 0} min(ρ, c_h) |A|        negative mass = Σ_{A < 0} max(ρ, c_l) |A|

    First c_l goes up in steps, then c_h. The masses are those of the surrogate, as in the authors' code, so a
    higher c_l can only add to the negative mass: it takes the gradient from unlikely tokens, but never meets
    the target. If the bounds of the start miss it, c_l therefore goes all the way, and c_h is searched for.

    Args:
      log_ratio: `[B, T]`.
      advantages: `[B]` or `[B, T]`.
      mask: `[B, T]`, non-zero on response tokens.
      clip_low, clip_low_max: where c_l starts and ends.
      clip_high, clip_high_max: where c_h starts and ends.
      step: by how much a bound moves.
      target: the least quotient of the masses.

    Returns:
      (c_l, c_h), two scalars without gradient; the last ones if no bounds meet the target.

    >>> log_ratio = jnp.log(jnp.array([[1.5, 1.0], [1.0, 1.25]]))
    >>> low, high = bapo_bounds(log_ratio, jnp.array([1.0, -1.0]), jnp.ones((2, 2)))
    >>> round(float(low), 4), round(float(high), 4)
    (0.8, 1.25)
    """
    check_bounds(clip_low, clip_low_max, names=("clip_low", "clip_low_max"))
    check_bounds(clip_high, clip_high_max, names=("clip_high", "clip_high_max"))
    check_bounds(clip_low_max, clip_high, names=("clip_low_max", "clip_high"))
    check_number("step", step, strict=True)
    check_number("target", target)
    check_rank("log_ratio", log_ratio, 2, "[B, T]")
    log_ratio = stop_gradient(jnp.asarray(log_ratio))
    tokens = read_tokens(log_ratio, jnp.zeros_like(log_ratio), advantages, mask)
    gains = jnp.maximum(tokens.advantages, 0.0)
    losses = jnp.maximum(-tokens.advantages, 0.0)
    highs = _steps(clip_high, clip_high_max, step)

    def short(low: ArrayLike, high: ArrayLike) -> jax.Array:
        negative = (jnp.maximum(tokens.ratio, low) * losses).sum()
        return (jnp.minimum(tokens.ratio, high) * gains).sum() < target * negative

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        first, last = bounds  # the index of the first high that is not short is one of first..last
        middle = (first + last) // 2
        higher = (first < last) & short(clip_low_max, jnp.asarray(highs)[middle])
        return jnp.where(higher, middle + 1, first), jnp.where(higher, last, middle)

    ends = jnp.int32(0), jnp.int32(len(highs) - 1)
    index = jax.lax.fori_loop(0, len(highs).bit_length(), halve, ends)[0]
    moved = short(clip_low, clip_high)
    low = jnp.where(moved, clip_low_max, clip_low)
    return low, jnp.where(moved, jnp.asarray(highs)[index], clip_high)


def _steps(start: float, end: float, step: float) -> np.ndarray:
    """start, start + step, … up to and including the end."""
    count = int(np.ceil(round((end - start) / step, 6)))
    return np.minimum(start + step * np.arange(count + 1), end).astype(np.float32)
