"""Measure how far the policy has moved from the behavior policy, and how many tokens clip and veto remove."""

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jax.typing import ArrayLike

from mugrpo_jax.objectives._checks import check_bounds, check_choice, check_number
from mugrpo_jax.objectives._objective import Tokens, min_form, read_tokens
from mugrpo_jax.objectives.bisection import largest_float
from mugrpo_jax.objectives.ess import effective_sample_size, second_moment, sequence_ess
from mugrpo_jax.objectives.kl import kl_estimate
from mugrpo_jax.objectives.metrics import Metrics, as_metrics, mean_over
from mugrpo_jax.objectives.veto import VETO_SCOPES, veto_mask, veto_metrics

QUANTILES = {"p05": 0.05, "p50": 0.5, "p95": 0.95}


def diagnostics(
    logp: ArrayLike,
    behavior_logp: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    clip_low: ArrayLike = 0.0,
    clip_high: ArrayLike = 5.0,
    veto: str = "suffix",
    veto_ratio: ArrayLike = 1e-4,
) -> Metrics:
    """Return statistics of ratios, clipping, veto, effective sample size and KL in a batch.

    Args:
      logp, behavior_logp, advantages, mask: the four arrays of every objective.
      clip_low, clip_high: bounds on the ratio; a token beyond them is clipped as in PPO.
      veto: scope of the veto, see `veto_mask`.
      veto_ratio: τ; a token with negative advantage and a ratio below τ is a trigger.

    Returns:
      Scalars without a gradient. `combine_metrics` can combine them:

      `tokens`, `positive_tokens`, `negative_tokens`, `responses`, `negative_responses`,
      `triggered_responses`: counts; `positive` and `negative` are the sign of the advantage.
      `ratio/positive_tokens`, `ratio/negative_tokens`: mean ratio. The quantiles of the ratio are
      `ratio_p05/...`, `ratio_p50/...`, `ratio_p95/...`.
      `clipped/positive_tokens`, `clipped/negative_tokens`: share of clipped tokens, which have no gradient.
      `vetoed/tokens`, `triggered/negative_responses`, `trigger_position/triggered_responses`: see
      `veto_metrics`.
      `ess/tokens`, `sequence_ess/responses`: effective sample sizes, as shares.
      `second_moment/tokens`: mean of l².
      `k1/tokens`, `k3/tokens`: estimates of KL(b ‖ π), because the samples come from b.
      `ratio_min`, `ratio_max`: the smallest and the largest ratio; +∞ and −∞ if there is no token.

      `combine_metrics` averages quantiles and effective sample sizes over micro-batches. These averages are
      not the values of the whole update.

    >>> logp = jnp.log(jnp.array([[1.1, 0.9, 6.0], [1.0, 5e-5, 0.5]]))
    >>> found = diagnostics(logp, jnp.zeros((2, 3)), jnp.array([1.0, -1.0]), jnp.ones((2, 3)))
    >>> round(float(found["ratio_p50/positive_tokens"]), 4), round(float(found["ratio_min"]), 6)
    (1.1, 5e-05)
    >>> round(float(found["clipped/positive_tokens"]), 4), round(float(found["vetoed/tokens"]), 4)
    (0.3333, 0.1667)
    """
    check_bounds(clip_low, clip_high)
    check_choice("veto", veto, VETO_SCOPES)
    check_number("veto_ratio", veto_ratio, strict=True)
    tokens = read_tokens(stop_gradient(jnp.asarray(logp)), behavior_logp, advantages, mask)
    keep = veto_mask(tokens.log_ratio, tokens.advantages, tokens.mask, scope=veto, ratio=veto_ratio)
    veto_found = veto_metrics(tokens.log_ratio, tokens.advantages, tokens.mask, keep, ratio=veto_ratio)
    _, clipped = min_form(tokens.ratio, tokens.advantages, clip_low, clip_high)
    found = {
        "tokens": tokens.total,
        "responses": tokens.mask.any(axis=1).sum(),
        **_ratios(tokens, clipped, tokens.advantages > 0, "positive_tokens"),
        **_ratios(tokens, clipped, tokens.advantages < 0, "negative_tokens"),
        **veto_found,
        "ess/tokens": effective_sample_size(tokens.log_ratio, tokens.mask),
        "sequence_ess/responses": sequence_ess(tokens.log_ratio, tokens.mask),
        "second_moment/tokens": second_moment(tokens.log_ratio, tokens.mask),
        "ratio_min": jnp.where(tokens.mask, tokens.ratio, jnp.inf).min(initial=jnp.inf),
        "ratio_max": jnp.where(tokens.mask, tokens.ratio, -jnp.inf).max(initial=-jnp.inf),
        **_behavior_kl(tokens),
    }
    return as_metrics(found)


def _behavior_kl(tokens: Tokens) -> Metrics:
    """Estimate KL(b ‖ π). The samples come from b, so the estimators get the log-ratio −l."""
    return {
        f"{kind}/tokens": mean_over(kl_estimate(-tokens.log_ratio, kind).sum(), tokens.total)
        for kind in ("k1", "k3")
    }


def _ratios(tokens: Tokens, clipped: jax.Array, chosen: jax.Array, name: str) -> Metrics:
    """Return count, mean ratio, ratio quantiles and clipped share of the tokens where `chosen` is True."""
    count = chosen.sum()
    quantiles = _quantiles(tokens.ratio, chosen, jnp.array(list(QUANTILES.values())))
    return {
        name: count,
        f"ratio/{name}": mean_over(jnp.where(chosen, tokens.ratio, 0.0).sum(), count),
        f"clipped/{name}": mean_over((clipped & chosen).sum(), count),
        **{f"ratio_{key}/{name}": quantiles[i] for i, key in enumerate(QUANTILES)},
    }


def _quantiles(values: jax.Array, chosen: jax.Array, levels: jax.Array) -> jax.Array:
    """Return nearest-rank quantiles of the values where `chosen` is True; 0 if no value is chosen."""
    count = chosen.sum()
    rank = jnp.round(levels * jnp.maximum(count - 1, 0))
    values = jnp.where(chosen, values, jnp.inf)
    # The value of rank r is the largest x such that at most r values are below x.
    found = largest_float(lambda x: (values < x[:, None, None]).sum(axis=(1, 2)) <= rank, levels.shape)
    return jnp.where(count > 0, found, 0.0)
