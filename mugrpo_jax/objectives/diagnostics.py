"""Measure how far the policy has moved from the behavior policy, in the same way for all objectives.

What an objective itself clips or vetoes is in the metrics of that objective.
"""

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jax.typing import ArrayLike

from mugrpo_jax.objectives._checks import check_number
from mugrpo_jax.objectives._objective import Tokens, read_tokens
from mugrpo_jax.objectives.bisection import largest_float
from mugrpo_jax.objectives.ess import effective_sample_size, second_moment, sequence_ess
from mugrpo_jax.objectives.kl import kl_estimate
from mugrpo_jax.objectives.metrics import Metrics, as_metrics, mean_over
from mugrpo_jax.objectives.veto import columns, first_column

QUANTILES = {"p05": 0.05, "p50": 0.5, "p95": 0.95}
PARITY_BANDS = (0.001, 0.01, 0.05)  # distances of a ratio from 1


def diagnostics(
    logp: ArrayLike,
    behavior_logp: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    abandoned_ratio: ArrayLike = 1e-4,
) -> Metrics:
    """Return statistics of ratios, effective sample size and KL in a batch, the same for every objective.

    Args:
      logp, behavior_logp, advantages, mask: the four arrays of every objective.
      abandoned_ratio: a token with a ratio below this number is abandoned: π would hardly ever sample it.
        In responses with A < 0 these are the triggers of the veto, if its τ is the same number.

    Returns:
      Scalars without a gradient. `combine_metrics` can combine them:

      `tokens`, `positive_tokens`, `negative_tokens`, `responses`, `positive_responses`, `negative_responses`:
      counts; `positive` and `negative` are the sign of the advantage.
      `ratio/tokens`, `ratio/positive_tokens`, `ratio/negative_tokens`: mean ratio. Quantiles of the ratio are
      `ratio_p05/positive_tokens`, `ratio_p05/negative_tokens`, and so on for `p50` and `p95`.
      `within_0.001/tokens`, `within_0.01/tokens`, `within_0.05/tokens`: share of the tokens with a ratio this
      close to 1. Before the first update of a stage, only a gap between sampler and trainer moves ratios.
      `abandoned/positive_responses`, `abandoned/negative_responses`: share of the responses with A > 0 (or
      A < 0) that have an abandoned token.
      `before_abandoned_tokens`, `behind_abandoned_tokens`: counts of the tokens with A < 0 before and behind
      the first abandoned token of their response; `ratio/before_abandoned_tokens` and
      `ratio/behind_abandoned_tokens` are their mean ratios. Responses without such a token are not counted.
      `negative_pull`: Σ|ρA| over the tokens with A < 0, which is how strongly an unclipped loss pushes them
      down. `behind_abandoned/negative_pull`: share of this sum behind the first abandoned token.
      `ess/tokens`, `sequence_ess/responses`: effective sample sizes, as shares.
      `second_moment/tokens`: mean of l².
      `k1/tokens`, `k3/tokens`: estimates of KL(b ‖ π), because the samples come from b.
      `ratio_min`, `ratio_max`: the smallest and the largest ratio; +∞ and −∞ if there is no token.

      `combine_metrics` averages quantiles and `sequence_ess` over micro-batches. These averages are not the
      values of the whole update. All other values are.

    >>> logp = jnp.log(jnp.array([[1.1, 0.9, 6.0], [1.0, 5e-5, 0.5]]))
    >>> found = diagnostics(logp, jnp.zeros((2, 3)), jnp.array([1.0, -1.0]), jnp.ones((2, 3)))
    >>> round(float(found["ratio_p50/positive_tokens"]), 4), round(float(found["ratio_min"]), 6)
    (1.1, 5e-05)
    >>> float(found["abandoned/negative_responses"]), float(found["ratio/behind_abandoned_tokens"])
    (1.0, 0.5)
    >>> round(float(found["behind_abandoned/negative_pull"]), 4)  # 0.5 / (1.0 + 5e-5 + 0.5)
    0.3333
    """
    check_number("abandoned_ratio", abandoned_ratio, strict=True)
    tokens = read_tokens(stop_gradient(jnp.asarray(logp)), behavior_logp, advantages, mask)
    positive, negative = tokens.advantages > 0, tokens.advantages < 0
    abandoned = tokens.mask & (tokens.ratio < abandoned_ratio)
    found = {
        "tokens": tokens.total,
        "responses": tokens.mask.any(axis=1).sum(),
        **_abandoned(positive, abandoned, "positive_responses"),
        **_abandoned(negative, abandoned, "negative_responses"),
        **_around_abandoned(tokens, negative, abandoned),
        "ratio/tokens": tokens.mean(tokens.ratio),
        **_ratios(tokens, positive, "positive_tokens"),
        **_ratios(tokens, negative, "negative_tokens"),
        **{f"within_{band}/tokens": tokens.share(jnp.abs(tokens.ratio - 1) <= band) for band in PARITY_BANDS},
        "ess/tokens": effective_sample_size(tokens.log_ratio, tokens.mask),
        "sequence_ess/responses": sequence_ess(tokens.log_ratio, tokens.mask),
        "second_moment/tokens": second_moment(tokens.log_ratio, tokens.mask),
        "ratio_min": jnp.where(tokens.mask, tokens.ratio, jnp.inf).min(initial=jnp.inf),
        "ratio_max": jnp.where(tokens.mask, tokens.ratio, -jnp.inf).max(initial=-jnp.inf),
        **_behavior_kl(tokens),
    }
    return as_metrics(found)


def _abandoned(chosen: jax.Array, abandoned: jax.Array, name: str) -> Metrics:
    """Return the number of responses with a token in `chosen`, and the share in which one is abandoned."""
    count = chosen.any(axis=1).sum()
    return {name: count, f"abandoned/{name}": mean_over((chosen & abandoned).any(axis=1).sum(), count)}


def _around_abandoned(tokens: Tokens, negative: jax.Array, abandoned: jax.Array) -> Metrics:
    """Compare the tokens with A < 0 before and behind the first abandoned token of their response."""
    first = first_column(negative & abandoned)
    place, end = columns(negative), negative.shape[1]
    before, behind = negative & (place < first) & (first < end), negative & (place > first)
    pull = jnp.where(negative, tokens.ratio * jnp.abs(tokens.advantages), 0.0)
    return {
        **_mean_ratio(tokens, before, "before_abandoned_tokens"),
        **_mean_ratio(tokens, behind, "behind_abandoned_tokens"),
        "negative_pull": pull.sum(),
        "behind_abandoned/negative_pull": mean_over(jnp.where(behind, pull, 0.0).sum(), pull.sum()),
    }


def _behavior_kl(tokens: Tokens) -> Metrics:
    """Estimate KL(b ‖ π). The samples come from b, so the estimators get the log-ratio −l."""
    return {
        f"{kind}/tokens": mean_over(kl_estimate(-tokens.log_ratio, kind).sum(), tokens.total)
        for kind in ("k1", "k3")
    }


def _ratios(tokens: Tokens, chosen: jax.Array, name: str) -> Metrics:
    """Return count, mean ratio and ratio quantiles of the tokens where `chosen` is True."""
    quantiles = _quantiles(tokens.ratio, chosen, jnp.array(list(QUANTILES.values())))
    return {
        **_mean_ratio(tokens, chosen, name),
        **{f"ratio_{key}/{name}": quantiles[i] for i, key in enumerate(QUANTILES)},
    }


def _mean_ratio(tokens: Tokens, chosen: jax.Array, name: str) -> Metrics:
    """Return count and mean ratio of the tokens where `chosen` is True."""
    count = chosen.sum()
    return {name: count, f"ratio/{name}": mean_over(jnp.where(chosen, tokens.ratio, 0.0).sum(), count)}


def _quantiles(values: jax.Array, chosen: jax.Array, levels: jax.Array) -> jax.Array:
    """Return nearest-rank quantiles of the values where `chosen` is True; 0 if no value is chosen."""
    count = chosen.sum()
    rank = jnp.round(levels * jnp.maximum(count - 1, 0).astype(levels.dtype))
    values = jnp.where(chosen, values, jnp.inf)
    # The value of rank r is the largest x such that at most r values are below x.
    found = largest_float(
        lambda x: (values < x[:, None, None]).sum(axis=(1, 2)).astype(rank.dtype) <= rank, levels.shape
    )
    return jnp.where(count > 0, found, 0.0)
