"""M2PO and BAPO: clip bounds that follow from a statistic of the batch.

A call without the statistic takes it from its own arrays. For an update in several micro-batches, compute the
statistic once (`m2po_bound`, `bapo_bounds`; for P3O `ratio_sums` and `ess_from_sums`) and pass it to every
call: then the gradients add up to that of the whole update.
"""

from __future__ import annotations  # so that help() shows short types

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient
from jax.typing import ArrayLike

from mugrpo_jax.objectives._checks import check_bounds, check_choice, check_number
from mugrpo_jax.objectives._objective import Terms, Tokens, min_form, objective, read_log_ratio
from mugrpo_jax.objectives.bisection import largest_float
from mugrpo_jax.objectives.metrics import mean_over

M2PO_FORMS = ("winsorize", "mask")


@objective("token_mean")
def m2po(
    tokens: Tokens,
    *,
    threshold: ArrayLike = 0.04,
    form: str = "winsorize",
    log_bound: ArrayLike | None = None,
    dual_clip: ArrayLike | None = None,
) -> Terms:
    """M2PO: keep the second moment of the harmful log-ratios below a threshold (arXiv 2510.01161).

    Harmful are the tokens that move further away: `Q = {A > 0, ρ > 1} ∪ {A < 0, ρ < 1}`. While the mean of l²
    over Q is within the threshold, nothing is clipped. Beyond it, with the bound c of `m2po_bound`:

        winsorize   J_t = min(ρ_t A, clip(ρ_t, e^−c, e^c) A)
        mask        J_t = ρ_t A, and 0 for harmful tokens with |l_t| > c

    Args:
      threshold: τ, the second moment that is tolerated.
      form: `winsorize` or `mask`.
      log_bound: c of the whole update, from `m2po_bound`; by default that of this call.
      dual_clip: c of the dual clip; for A < 0 the gradient also stops beyond it.

    Metrics: `clipped/tokens`, the count `harmful_tokens`, their mean l² in `second_moment/harmful_tokens`,
    and the tightest lower bound `clip_low_max` (0: nothing clipped).

    >>> size = jnp.array([[0.05, 0.1, 0.1, 0.2, 0.3, 0.9]])
    >>> loss, metrics = m2po(size, jnp.zeros((1, 6)), jnp.array([1.0]), jnp.ones((1, 6)))
    >>> round(float(metrics["second_moment/harmful_tokens"]), 4), round(float(metrics["clip_low_max"]), 4)
    (0.1604, 0.8187)
    """
    check_number("threshold", threshold, strict=True)
    check_choice("form", form, M2PO_FORMS)
    harmful = _harmful(tokens)
    log_ratio = stop_gradient(tokens.log_ratio)
    bound = _m2po_bound(jnp.abs(log_ratio), harmful, threshold, form) if log_bound is None else log_bound
    check_number("log_bound", bound)
    bound = stop_gradient(jnp.asarray(bound, jnp.float32))
    low, high = (0.0, jnp.inf) if form == "mask" else (jnp.exp(-bound), jnp.exp(bound))
    surrogate, clipped = min_form(tokens.ratio, tokens.advantages, low, high, dual_clip)
    if form == "mask":
        removed = harmful & (jnp.abs(log_ratio) > bound)
        surrogate, clipped = jnp.where(removed, 0.0, surrogate), clipped | removed
    metrics = {
        "clipped/tokens": tokens.share(clipped),
        "harmful_tokens": harmful.sum(),
        "second_moment/harmful_tokens": mean_over(jnp.where(harmful, log_ratio**2, 0.0).sum(), harmful.sum()),
        "clip_low_max": jnp.exp(-bound),
    }
    return Terms(surrogate, metrics)


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
    check_number("threshold", threshold, strict=True)
    check_choice("form", form, M2PO_FORMS)
    tokens = read_log_ratio(log_ratio, advantages, mask)
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

    # Round down to a size that occurs: the search may end anywhere between two of them.
    bound = jnp.where(harmful & (size <= largest_float(within)), size, 0.0).max()
    return jnp.where(squares.sum() > threshold * count, bound, jnp.inf)


@objective("token_mean")
def bapo(
    tokens: Tokens,
    *,
    clip_low: float = 0.6,
    clip_low_max: float = 0.8,
    clip_high: float = 1.2,
    clip_high_max: float = 2.0,
    step: float = 0.05,
    target: ArrayLike = 1.0,
    bounds: tuple[ArrayLike, ArrayLike] | None = None,
    dual_clip: ArrayLike | None = None,
) -> Terms:
    """BAPO: bounds that move until good responses weigh as much as bad ones (arXiv 2510.18927).

        J_t = min(ρ_t A, clip(ρ_t, c_l, c_h) A)     (c_l, c_h) from `bapo_bounds`

    The defaults are those of the authors' code, where the target is the quotient of positive and negative
    mass; their code also has a dual clip of 3. Their paper lets c_l go from 0.6 to 0.9 and c_h from 1.2 to
    3.0, with a target ρ₀ for the positive share of the total mass: 0.4 in the paper, 0.5 in their README. A
    share s is the target s / (1 − s) here, so 0.5 is 1.

    Args:
      clip_low, clip_low_max, clip_high, clip_high_max, step, target: see `bapo_bounds`.
      bounds: (c_l, c_h) of the whole update; by default those of this call.
      dual_clip: c; for A < 0 the gradient also stops beyond ρ = c.

    Metrics: `clipped/tokens`, `clip_low/tokens` and `clip_high/tokens`.

    >>> logp = jnp.log(jnp.array([[1.5, 1.0], [1.0, 1.25]]))
    >>> rest = (jnp.zeros((2, 2)), jnp.array([1.0, -1.0]), jnp.ones((2, 2)))
    >>> loss, metrics = bapo(logp, *rest)
    >>> round(float(metrics["clip_high/tokens"]), 4)  # 1.25 + 1 weighs as much as 1 + 1.25
    1.25
    """
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
    surrogate, clipped = min_form(tokens.ratio, tokens.advantages, low, high, dual_clip)
    metrics = {"clipped/tokens": tokens.share(clipped), "clip_low/tokens": low, "clip_high/tokens": high}
    return Terms(surrogate, metrics)


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

    First c_l rises in steps, then c_h. The masses are those of the surrogate, as in the authors' code. A
    higher c_l can only add to the negative mass: it removes the gradient of unlikely tokens but never helps
    to meet the target. So if the first bounds miss the target, c_l goes to its end and c_h is searched for.

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
    tokens = read_log_ratio(log_ratio, advantages, mask)
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
