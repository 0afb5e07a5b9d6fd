"""The negative-advantage veto of µ-GRPO (arXiv 2605.17570): which tokens of bad responses leave the loss."""

import math

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jax.typing import ArrayLike

from mugrpo_jax.objectives._checks import check_choice, check_number, check_rank, check_shape
from mugrpo_jax.objectives._objective import on_tokens, token_advantages
from mugrpo_jax.objectives.metrics import Metrics, as_metrics, mean_over

VETO_SCOPES = ("none", "trigger", "suffix", "suffix_non_trigger", "sequence")


def veto_mask(
    log_ratio: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    scope: str = "suffix",
    ratio: ArrayLike = 1e-4,
) -> jax.Array:
    """Which tokens keep their update under the negative-advantage veto (NAV).

    In a response with negative advantage, the triggers are the tokens `T = {t : ρ_t < τ}`, and κ is the
    position of the first one. The current policy would never reach the tokens behind κ. Their own ratios are
    near 1, so without a veto each of them would still be pushed down at full size. The scope says which
    tokens are vetoed:

        none                 nothing
        trigger              T
        suffix               {t > κ}, the paper's definition
        suffix_non_trigger   {t > κ} without T
        sequence             the whole response, if it has a trigger

    Responses with a positive or zero advantage are never changed. With advantages per token, only tokens of
    negative advantage can be triggers, and only they can be vetoed.

    Args:
      log_ratio: `[B, T]`, `log π − log b`, not clamped.
      advantages: `[B]` or `[B, T]`.
      mask: `[B, T]`, non-zero on response tokens; other positions are ignored.
      scope: one of `VETO_SCOPES`.
      ratio: τ, the ratio below which a token is a trigger.

    Returns:
      `[B, T]` bool: true on response tokens that are kept, false on vetoed tokens and on padding. Any
      objective takes it as `weights`.

    >>> log_ratio = jnp.log(jnp.array([[0.9, 1.1, 5e-5, 0.8, 2e-5, 1.2]]))
    >>> mask = jnp.ones_like(log_ratio)
    >>> veto_mask(log_ratio, jnp.array([-1.0]), mask).astype(int).tolist()
    [[1, 1, 1, 0, 0, 0]]
    >>> veto_mask(log_ratio, jnp.array([-1.0]), mask, scope="suffix_non_trigger").astype(int).tolist()
    [[1, 1, 1, 0, 1, 0]]
    >>> veto_mask(log_ratio, jnp.array([1.0]), mask).astype(int).tolist()
    [[1, 1, 1, 1, 1, 1]]
    """
    check_choice("scope", scope, VETO_SCOPES)
    trigger, negative, valid = _triggers(log_ratio, advantages, mask, ratio)
    if scope == "none":
        return valid
    if scope == "trigger":
        return valid & ~trigger
    if scope == "sequence":
        return valid & ~(negative & trigger.any(axis=1, keepdims=True))
    behind = negative & (_positions(valid) > _first(trigger))
    if scope == "suffix_non_trigger":
        behind &= ~trigger
    return valid & ~behind


def veto_metrics(
    log_ratio: ArrayLike, advantages: ArrayLike, mask: ArrayLike, keep: jax.Array, *, ratio: ArrayLike = 1e-4
) -> Metrics:
    """Metrics of the veto: vetoed tokens, negative responses with a trigger, position of the first trigger.

    Args:
      log_ratio: `[B, T]`.
      advantages: `[B]` or `[B, T]`.
      mask: `[B, T]`.
      keep: `[B, T]`, the result of `veto_mask`.
      ratio: τ.

    Returns:
      The counts `negative_responses` and `triggered_responses` and the means `vetoed/tokens`,
      `triggered/negative_responses` and `trigger_position/triggered_responses`: the share of the response's
      tokens that lie before its first trigger.

    >>> log_ratio = jnp.log(jnp.array([[0.9, 1.1, 5e-5, 0.8], [1.0, 1.0, 1.0, 1.0]]))
    >>> advantages, mask = jnp.array([-1.0, -1.0]), jnp.ones_like(log_ratio)
    >>> metrics = veto_metrics(log_ratio, advantages, mask, veto_mask(log_ratio, advantages, mask))
    >>> float(metrics["vetoed/tokens"]), float(metrics["triggered/negative_responses"])
    (0.125, 0.5)
    >>> float(metrics["trigger_position/triggered_responses"])
    0.5
    """
    trigger, negative, valid = _triggers(log_ratio, advantages, mask, ratio)
    triggered, negatives = trigger.any(axis=1), negative.any(axis=1)
    before = (valid & (_positions(valid) < _first(trigger))).sum(axis=1)
    position = jnp.where(triggered, before / jnp.maximum(valid.sum(axis=1), 1), 0.0)
    found = {
        "negative_responses": negatives.sum(),
        "triggered_responses": triggered.sum(),
        "vetoed/tokens": mean_over((valid & ~keep).sum(), valid.sum()),
        "triggered/negative_responses": mean_over(triggered.sum(), negatives.sum()),
        "trigger_position/triggered_responses": mean_over(position.sum(), triggered.sum()),
    }
    return as_metrics(found)


def _triggers(
    log_ratio: ArrayLike, advantages: ArrayLike, mask: ArrayLike, ratio: ArrayLike
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The triggers, the tokens of negative advantage and the valid tokens, each `[B, T]` bool."""
    check_rank("log_ratio", log_ratio, 2, "[B, T]")
    check_shape("mask", mask, jnp.shape(log_ratio))
    check_number("ratio", ratio, strict=True)
    valid = jnp.asarray(mask) != 0
    negative = token_advantages(advantages, valid) < 0
    threshold = math.log(ratio) if isinstance(ratio, (int, float)) else jnp.log(ratio)
    return negative & (stop_gradient(on_tokens(log_ratio, valid)) < threshold), negative, valid


def _positions(valid: jax.Array) -> jax.Array:
    return jnp.arange(valid.shape[1])[None, :]


def _first(trigger: jax.Array) -> jax.Array:
    """The column of the first trigger of each row `[B, 1]`; the row length T where there is none."""
    columns = jnp.where(trigger, _positions(trigger), trigger.shape[1])
    return columns.min(axis=1, keepdims=True, initial=trigger.shape[1])
