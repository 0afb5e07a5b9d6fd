"""What all objectives share: reading the inputs, the clipped surrogate, and the way to a scalar loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypedDict, TypeVar

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jax.typing import ArrayLike

from mugrpo_jax.objectives._checks import check_choice, check_number, check_rank, check_shape, is_number
from mugrpo_jax.objectives.aggregation import denominator as count_denominator
from mugrpo_jax.objectives.aggregation import token_shares
from mugrpo_jax.objectives.kl import KL_ESTIMATORS, kl_estimate, safe_exp
from mugrpo_jax.objectives.metrics import Metrics, as_metrics, mean_over

F = TypeVar("F", bound=Callable[..., Any])


class SharedKnobs(TypedDict, total=False):
    """The knobs that every objective takes beside its own; the package docstring explains them."""

    weights: ArrayLike | None
    reference_logp: ArrayLike | None
    kl_coef: ArrayLike
    kl_estimator: str
    entropy: ArrayLike | None
    entropy_coef: ArrayLike
    max_length: int | None


_DEFAULTS: dict[str, Any] = {
    "weights": None,
    "reference_logp": None,
    "kl_coef": 0.0,
    "kl_estimator": "k3",
    "entropy": None,
    "entropy_coef": 0.0,
    "max_length": None,
}


def objective(function: F) -> F:
    """Write the shared knobs out in the signature that `help` and `inspect` show, in place of `**shared`."""
    signature = inspect.signature(function)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    hints = SharedKnobs.__annotations__
    shared = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[name].__forward_arg__
        )
        for name, default in _DEFAULTS.items()
    ]
    function.__signature__ = signature.replace(parameters=own + shared)  # type: ignore[attr-defined]  # for help()
    return function


def check_knobs(function: Callable[..., Any], names: Iterable[str]) -> None:
    """Refuse a knob the objective does not have."""
    parameters = inspect.signature(function).parameters.values()
    known = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    for name in names:
        if name not in known:
            raise ValueError(f"{function.__name__} has no knob {name!r}; possible: {', '.join(known)}")


class Tokens(NamedTuple):
    """A batch in float32. Everything is zero on padding, so that `exp` and sums over rows are harmless."""

    logp: jax.Array  # [B, T] log π(y_t), the only input that carries a gradient
    log_ratio: jax.Array  # [B, T] l_t = log π(y_t) − log b(y_t)
    advantages: jax.Array  # [B, T]
    mask: jax.Array  # [B, T] bool

    @property
    def ratio(self) -> jax.Array:
        """ρ_t = exp(l_t)."""
        return safe_exp(self.log_ratio)

    @property
    def total(self) -> jax.Array:
        """Valid tokens of this batch."""
        return self.mask.sum()


def read_tokens(logp: ArrayLike, behavior_logp: ArrayLike, advantages: ArrayLike, mask: ArrayLike) -> Tokens:
    """Check the shapes, go to float32, and blank the padding."""
    check_rank("logp", logp, 2, "[B, T]")
    shape = jnp.shape(logp)
    check_shape("behavior_logp", behavior_logp, shape)
    check_shape("mask", mask, shape)
    valid = jnp.asarray(mask) != 0
    logp = on_tokens(logp, valid)
    behavior_logp = stop_gradient(on_tokens(behavior_logp, valid))
    return Tokens(logp, logp - behavior_logp, token_advantages(advantages, valid), valid)


def on_tokens(values: ArrayLike, mask: jax.Array) -> jax.Array:
    """The values in float32, with zeros on padding whatever stood there."""
    return jnp.where(mask, jnp.asarray(values).astype(jnp.float32), 0.0)


def token_advantages(advantages: ArrayLike, mask: jax.Array) -> jax.Array:
    """Advantages `[B]` or `[B, T]` as constants per token."""
    check_shape("advantages", advantages, mask.shape[:1], mask.shape)
    advantages = stop_gradient(jnp.asarray(advantages))
    return on_tokens(advantages if advantages.ndim == 2 else advantages[:, None], mask)


def min_form(
    ratio: jax.Array, advantages: jax.Array, clip_low: ArrayLike, clip_high: ArrayLike
) -> tuple[jax.Array, jax.Array]:
    """PPO's `min(ρ A, clip(ρ, low, high) A)` and the tokens that stand on the clipped branch.

    Written by cases, so that a ratio exactly on a bound keeps its whole gradient.
    """
    above = (advantages > 0) & (ratio > clip_high)
    below = (advantages < 0) & (ratio < clip_low)
    bounded = jnp.where(above, clip_high, jnp.where(below, clip_low, ratio))
    return bounded * advantages, above | below


def token_mean(tokens: Tokens, values: jax.Array) -> jax.Array:
    """The mean over the valid tokens, as a metric."""
    return mean_over(jnp.where(tokens.mask, values, 0.0).sum(), tokens.total)


def token_fraction(tokens: Tokens, chosen: jax.Array) -> jax.Array:
    """The share of the valid tokens that are chosen."""
    return mean_over((chosen & tokens.mask).sum(), tokens.total)


def finish(
    function: Callable[..., Any],
    tokens: Tokens,
    policy: jax.Array,
    metrics: Metrics,
    *,
    denominator: ArrayLike | None,
    aggregation: str,
    shared: SharedKnobs,
    penalty: ArrayLike = 0.0,
) -> tuple[jax.Array, Metrics]:
    """From the per-token objective `policy` (to be maximised) to the loss (to be minimised).

    `weights` scale the policy term alone. The penalty of the method, the KL term and the entropy bonus are
    regularisers: they see every valid token.
    """
    check_knobs(function, shared)
    knobs: dict[str, Any] = {**_DEFAULTS, **shared}
    _check_shared(knobs, tokens.mask.shape)
    if denominator is None:
        budget = knobs["max_length"] or tokens.mask.shape[1]
        denominator = count_denominator(tokens.mask, aggregation, max_length=budget)
    shares = token_shares(tokens.mask, aggregation, denominator=denominator)
    metrics = {"tokens": tokens.total, **metrics}

    if knobs["weights"] is not None:
        policy = policy * stop_gradient(on_tokens(knobs["weights"], tokens.mask))
    per_token = penalty - policy
    if knobs["reference_logp"] is not None:
        reference_logp = stop_gradient(on_tokens(knobs["reference_logp"], tokens.mask))
        kl = kl_estimate(tokens.logp - reference_logp, knobs["kl_estimator"])
        per_token += knobs["kl_coef"] * kl
        metrics["reference_kl/tokens"] = mean_over(kl.sum(), tokens.total)
    if knobs["entropy"] is not None:
        entropy = on_tokens(knobs["entropy"], tokens.mask)
        per_token -= knobs["entropy_coef"] * entropy
        metrics["entropy/tokens"] = mean_over(entropy.sum(), tokens.total)
    return (shares * per_token).sum(), as_metrics(metrics)


def _check_shared(knobs: dict[str, Any], shape: tuple[int, ...]) -> None:
    check_choice("kl_estimator", knobs["kl_estimator"], KL_ESTIMATORS)
    check_number("kl_coef", knobs["kl_coef"])
    check_number("entropy_coef", knobs["entropy_coef"])
    if knobs["max_length"] is not None:
        check_number("max_length", knobs["max_length"], strict=True)
    for name in ("weights", "reference_logp", "entropy"):
        if knobs[name] is not None:
            check_shape(name, knobs[name], shape)
    for coefficient, array in (("kl_coef", "reference_logp"), ("entropy_coef", "entropy")):
        off = is_number(knobs[coefficient]) and knobs[coefficient] == 0
        if knobs[array] is None and not off:
            raise ValueError(f"{array} is None; {coefficient}={knobs[coefficient]} needs an array {shape}")
