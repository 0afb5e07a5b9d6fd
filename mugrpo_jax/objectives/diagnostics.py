"""Diagnostics of a batch: how far the policy has moved from its data, and what clip and veto remove."""

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
    """Ratios, clipping, veto, effective sample sizes and KL of a batch, for any objective.

    The arrays are those of every objective.

    Args:
      clip_low, clip_high: bounds beyond which a token counts as clipped.
      veto: scope of the veto, see `veto_mask`.
      veto_ratio: τ of the veto.

    Returns:
      Scalars without gradient, named as `combine_metrics` reads them:

      `tokens`, `positive_tokens`, `negative_tokens`, `responses`, `negative_responses`,
      `triggered_responses`: counts; the sign is that of the advantage.
      `ratio/positive_tokens`, `ratio/negative_tokens`: mean ratio by sign, and its quantiles `ratio_p05/...`,
      `ratio_p50/...`, `ratio_p95/...`.
      `clipped/positive_tokens`, `clipped/negative_tokens`: share of tokens without gradient, by sign.
      `vetoed/tokens`, `triggered/negative_responses`, `trigger_position/triggered_responses`: see
      `veto_metrics`.
      `ess/tokens`, `sequence_ess/responses`: effective sample sizes, as shares.
      `second_moment/tokens`: mean of l².
      `k1/tokens`, `k3/tokens`: estimates of KL(b ‖ π), since the samples come from b.
      `ratio_min`, `ratio_max`: the extreme ratios; +∞ and −∞ if there is no token.

      Quantiles and effective sample sizes are those of the call. Combined over micro-batches they become
      averages, not the values of the whole update.

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
    """KL(b ‖ π). The samples come from b, so the estimators take the log-ratio −l."""
    return {
        f"{kind}/tokens": mean_over(kl_estimate(-tokens.log_ratio, kind).sum(), tokens.total)
        for kind in ("k1", "k3")
    }


def _ratios(tokens: Tokens, clipped: jax.Array, chosen: jax.Array, name: str) -> Metrics:
    """Count, mean, quantiles and clipped share of the ratios of the chosen tokens."""
    count = chosen.sum()
    quantiles = _quantiles(tokens.ratio, chosen, jnp.array(list(QUANTILES.values())))
    return {
        name: count,
        f"ratio/{name}": mean_over(jnp.where(chosen, tokens.ratio, 0.0).sum(), count),
        f"clipped/{name}": mean_over((clipped & chosen).sum(), count),
        **{f"ratio_{key}/{name}": quantiles[i] for i, key in enumerate(QUANTILES)},
    }


def _quantiles(values: jax.Array, chosen: jax.Array, levels: jax.Array) -> jax.Array:
    """Quantiles of the chosen values by nearest rank; 0 if none is chosen."""
    count = chosen.sum()
    rank = jnp.round(levels * jnp.maximum(count - 1, 0))
    values = jnp.where(chosen, values, jnp.inf)
    # The value of rank r is the largest x such that at most r values are below x.
    found = largest_float(lambda x: (values < x[:, None, None]).sum(axis=(1, 2)) <= rank, levels.shape)
    return jnp.where(count > 0, found, 0.0)
