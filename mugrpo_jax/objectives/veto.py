"""The negative-advantage veto of µ-GRPO (arXiv 2605.17570) drops tokens of bad responses from the loss."""

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
    """Return a mask that is False on tokens that the negative-advantage veto (NAV) drops.

    In a response with negative advantage, the triggers are the tokens `T = {t : ρ_t < τ}`, and κ is the
    position of the first trigger. The current policy would never sample the tokens after κ. But the ratios of
    these tokens may be near 1, so that without a veto the update would still make them less likely. The scope
    says which tokens are vetoed:

        none                 nothing
        trigger              T
        suffix               {t > κ}, the paper's definition
        suffix_non_trigger   {t > κ} without T
        sequence             the whole response, if it has a trigger

    All tokens of responses with a positive or zero advantage are kept. With advantages `[B, T]`, only tokens
    with negative advantage can be triggers, and only these tokens can be vetoed.

    Args:
      log_ratio: `[B, T]`, `log π − log b`, not clamped.
      advantages: `[B]` or `[B, T]`.
      mask: `[B, T]`, non-zero on response tokens; other positions are ignored.
      scope: one of `VETO_SCOPES`.
      ratio: τ, the ratio below which a token is a trigger.

    Returns:
      `[B, T]` bool, True on response tokens that are kept, False on vetoed tokens and on padding. It can be
      passed to any objective as `weights`.

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
    behind = negative & (columns(valid) > first_column(trigger))
    if scope == "suffix_non_trigger":
        behind &= ~trigger
    return valid & ~behind


def veto_metrics(
    log_ratio: ArrayLike, advantages: ArrayLike, mask: ArrayLike, keep: jax.Array, *, ratio: ArrayLike = 1e-4
) -> Metrics:
    """Return metrics of the veto. `keep` is the result of `veto_mask`; the other arguments are the same.

    `negative_responses` counts responses with a negative advantage, and `triggered_responses` those with a
    trigger. `vetoed/tokens` and `triggered/negative_responses` are shares. The metric
    `trigger_position/triggered_responses` is the mean share of a response's tokens before its first trigger.

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
    before = (valid & (columns(valid) < first_column(trigger))).sum(axis=1)
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
    """Return three masks `[B, T]`: triggers, tokens with negative advantage, and all response tokens."""
    check_rank("log_ratio", log_ratio, 2, "[B, T]")
    check_shape("mask", mask, jnp.shape(log_ratio))
    check_number("ratio", ratio, strict=True)
    valid = jnp.asarray(mask).astype(bool)
    negative = token_advantages(advantages, valid) < 0
    threshold = math.log(ratio) if isinstance(ratio, (int, float)) else jnp.log(ratio)
    return negative & (stop_gradient(on_tokens(log_ratio, valid)) < threshold), negative, valid


def columns(array: jax.Array) -> jax.Array:
    """Return the column numbers of an array `[B, T]`, `[1, T]`."""
    return jnp.arange(array.shape[1])[None, :]


def first_column(chosen: jax.Array) -> jax.Array:
    """Return the first column in which each row of `chosen` is True, `[B, 1]`; T for rows without one."""
    found = jnp.where(chosen, columns(chosen), chosen.shape[1])
    return found.min(axis=1, keepdims=True, initial=chosen.shape[1])
