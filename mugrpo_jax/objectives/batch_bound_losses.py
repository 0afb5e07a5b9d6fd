"""M2PO and BAPO: losses whose clip bounds are computed from a statistic of the batch.

By default, a call computes the statistic from its own arrays. If an update has several micro-batches, compute
the statistic of the whole update once, with `m2po_bound` or `bapo_bounds`, and pass it to every call. Then
the gradients add up to the gradient of the whole update. `batch_statistics` lists these objectives.
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
_ROUNDING = 1e-4  # relative, of |l|


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

    A token is harmful if the update moves it further away from b: `Q = {A > 0, ρ > 1} ∪ {A < 0, ρ < 1}`.
    If the mean of l² over Q is above the threshold, tokens are clipped with the bound c from `m2po_bound`:

        winsorize   J_t = min(ρ_t A, clip(ρ_t, e^−c, e^c) A)
        mask        J_t = ρ_t A, and 0 for harmful tokens with |l_t| > c

    A token is beyond the bound if |l| > c · (1 + 1e-4). So the token that gives c never is, even if the
    program of a micro-batch rounds its |l| differently than the program that computed c.

    Args:
      threshold: τ, the largest mean of l² over harmful tokens at which nothing is clipped.
      form: `winsorize` or `mask`.
      log_bound: c of the whole update, from `m2po_bound`. None computes c from the arrays of this call.
      dual_clip: d. For A < 0 the gradient is also 0 where ρ > d. None means no dual clip.

    Metrics: `clipped/tokens` (share), `harmful_tokens` (count), `second_moment/harmful_tokens` (the mean of
    l² over harmful tokens) and `clip_low_max` (e^−c, which is 0 if nothing is clipped).

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
    beyond = jnp.abs(log_ratio) > bound * (1 + _ROUNDING)
    low, high = (0.0, jnp.inf) if form == "mask" else (jnp.exp(-bound), jnp.exp(bound))
    low, high = jnp.where(beyond, low, 0.0), jnp.where(beyond, high, jnp.inf)
    surrogate, clipped = min_form(tokens.ratio, tokens.advantages, low, high, dual_clip)
    if form == "mask":
        removed = harmful & beyond
        surrogate, clipped = jnp.where(removed, 0.0, surrogate), clipped | removed
    metrics = {
        "harmful_tokens": harmful.sum(),
        "second_moment/harmful_tokens": mean_over(jnp.where(harmful, log_ratio**2, 0.0).sum(), harmful.sum()),
        "clip_low_max": jnp.exp(-bound),
    }
    return Terms(surrogate, metrics, clipped=clipped)


def m2po_bound(
    log_ratio: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    threshold: ArrayLike = 0.04,
    form: str = "winsorize",
) -> jax.Array:
    """Return the bound c on |l| with which the mean of l² over the harmful tokens is at most the threshold τ.

    `v_0 ≤ v_1 ≤ …` are the sorted l² of the n harmful tokens, which `m2po` defines:

        winsorize   c = sqrt(v_{k−1}) for the first k with Σ_{j ≤ k} v_j + (n − k − 1) v_k ≥ τ n
        mask        c = the largest |l| that stays when the largest l² are removed until their mean is ≤ τ;
                    tokens that tie with a removed one are removed with it

    c is infinite if the mean of all v is at most τ, and 0 if even v_0 is above τ (this case is our choice).

    Args:
      log_ratio, advantages, mask: as in `veto_mask`, for the whole update.
      threshold: τ.
      form: `winsorize` or `mask`.

    Returns:
      c, a scalar without a gradient. Pass it to `m2po` as `log_bound`.

    >>> size = jnp.array([[0.05, 0.1, 0.1, 0.2, 0.3, 0.9]])
    >>> round(float(m2po_bound(size, jnp.array([1.0]), jnp.ones((1, 6)))), 4)
    0.2
    """
    check_number("threshold", threshold, strict=True)
    check_choice("form", form, M2PO_FORMS)
    tokens = read_log_ratio(log_ratio, advantages, mask)
    return _m2po_bound(jnp.abs(tokens.log_ratio), _harmful(tokens), threshold, form)


def _harmful(tokens: Tokens) -> jax.Array:
    """Return a mask that is True on tokens that the update moves further away from the behavior policy."""
    return tokens.mask & (stop_gradient(tokens.log_ratio) * jnp.sign(tokens.advantages) > 0)


def _m2po_bound(size: jax.Array, harmful: jax.Array, threshold: ArrayLike, form: str) -> jax.Array:
    count = harmful.sum().astype(size.dtype)
    squares = jnp.where(harmful, size**2, 0.0)

    def within(bound: jax.Array) -> jax.Array:
        if form == "winsorize":  # Σ_j min(v_j, v_k) is the sum of the first k + 1 and n − k − 1 times v_k
            return jnp.minimum(squares, bound**2).sum() < threshold * count
        kept = harmful & (size <= bound)
        return jnp.where(kept, squares, 0.0).sum() <= threshold * kept.sum().astype(size.dtype)

    # Round down to a size in the batch, because the search may end at any number between two sizes.
    bound = jnp.where(harmful & (size <= largest_float(within)), size, 0.0).max(initial=0.0)
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
    """BAPO: choose the clip bounds so that good responses weigh as much as bad ones (arXiv 2510.18927).

        J_t = min(ρ_t A, clip(ρ_t, c_l, c_h) A)     (c_l, c_h) from `bapo_bounds`

    The defaults are those of the authors' code, where the target is positive mass divided by negative mass.
    Their code also has a dual clip of 3. In the paper, c_l goes from 0.6 to 0.9 and c_h from 1.2 to 3.0, and
    the target is the positive share s of the total mass: 0.4 in the paper, 0.5 in their README. A share s
    corresponds to the target s / (1 − s) here, so 0.5 corresponds to 1.

    Args:
      clip_low, clip_low_max, clip_high, clip_high_max, step, target: see `bapo_bounds`.
      bounds: (c_l, c_h) of the whole update. None computes the bounds from the arrays of this call.
      dual_clip: c. For A < 0 the gradient is also 0 where ρ > c. None means no dual clip.

    Metrics: `clipped/tokens` (share), and the bounds `clip_low/tokens` and `clip_high/tokens`.

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
    return Terms(surrogate, {"clip_low/tokens": low, "clip_high/tokens": high}, clipped=clipped)


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
    """Return the first bounds at which the positive mass is at least `target` times the negative mass.

        positive mass = Σ_{A > 0} min(ρ, c_h) |A|        negative mass = Σ_{A < 0} max(ρ, c_l) |A|

    The method raises first c_l and then c_h in steps. The masses are computed as in the authors' code. A
    higher c_l can only increase the negative mass, so raising c_l never helps to reach the target. So if the
    first bounds do not reach the target, c_l is set to `clip_low_max`, and only c_h is searched.

    Args:
      log_ratio, advantages, mask: as in `veto_mask`, for the whole update.
      clip_low, clip_low_max: the first and the last value of c_l.
      clip_high, clip_high_max: the first and the last value of c_h.
      step: by how much c_h grows in one step.
      target: the smallest positive mass divided by negative mass that is accepted.

    Returns:
      (c_l, c_h), two scalars without a gradient. If no bounds reach the target, both have their last value.

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

    # One step outside the loop: inside `jax.shard_map` the bounds vary over the devices as the tokens do.
    ends = halve(0, (jnp.int32(0), jnp.int32(len(highs) - 1)))
    index = jax.lax.fori_loop(1, len(highs).bit_length(), halve, ends)[0]
    moved = short(clip_low, clip_high)
    low = jnp.where(moved, clip_low_max, clip_low)
    return low, jnp.where(moved, jnp.asarray(highs)[index], clip_high)


def _steps(start: float, end: float, step: float) -> np.ndarray:
    """Return start, start + step, start + 2 step, … and as last value `end`."""
    count = int(np.ceil(round((end - start) / step, 6)))
    return np.minimum(start + step * np.arange(count + 1), end).astype(np.float32)
