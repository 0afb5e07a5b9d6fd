"""Turn the formula of a loss into an objective: read the inputs, apply the formula, and sum over tokens.

A formula is a function of `Tokens` and its own knobs that returns `Terms`. The decorator `objective` turns a
formula into an objective: a function of four arrays, its own knobs and the knobs that all objectives share.
"""

from __future__ import annotations  # so that help() shows short types

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jax.typing import ArrayLike

from mugrpo_jax.objectives._checks import check_choice, check_number, check_rank, check_shape, known_number
from mugrpo_jax.objectives.aggregation import denominator as count_denominator
from mugrpo_jax.objectives.aggregation import token_shares
from mugrpo_jax.objectives.kl import KL_ESTIMATORS, kl_estimate, safe_exp
from mugrpo_jax.objectives.metrics import Metrics, as_metrics, mean_over

Objective = Callable[..., tuple[jax.Array, Metrics]]
LARGEST_LOGP = 1e4  # the largest |log-prob| that an objective sees


class Tokens(NamedTuple):
    """The inputs of an objective in float32. All arrays are 0 on padding, so that `exp` and sums are safe."""

    logp: jax.Array  # [B, T] log π(y_t), the only array with a gradient
    behavior_logp: jax.Array  # [B, T] log b(y_t)
    log_ratio: jax.Array  # [B, T] l_t = log π(y_t) − log b(y_t)
    advantages: jax.Array  # [B, T]
    mask: jax.Array  # [B, T] bool, True on response tokens; these are the "valid" tokens

    @property
    def ratio(self) -> jax.Array:
        """The ratio of each token, ρ_t = exp(l_t)."""
        return safe_exp(self.log_ratio)

    @property
    def total(self) -> jax.Array:
        """Number of valid tokens."""
        return self.mask.sum()

    def mean(self, values: jax.Array) -> jax.Array:
        """Return the mean of `values` `[B, T]` over the valid tokens."""
        return mean_over(jnp.where(self.mask, values, 0.0).sum(), self.total)

    def share(self, chosen: jax.Array) -> jax.Array:
        """Return the share of the valid tokens for which `chosen` `[B, T]` is True."""
        return mean_over((chosen & self.mask).sum(), self.total)


class Terms(NamedTuple):
    """The result of a formula: two terms per token, metrics, and which tokens are clipped."""

    policy: jax.Array  # [B, T] J_t, to be maximised; multiplied by the knob `weights`
    metrics: Metrics
    penalty: ArrayLike = 0.0  # [B, T], to be minimised; not multiplied by `weights`
    clipped: jax.Array | None = None  # [B, T] bool, True on tokens beyond the bounds of this objective


def objective(aggregation: str) -> Callable[[Callable[..., Terms]], Objective]:
    """Return a decorator that makes an objective of a formula; `aggregation` is the default of that knob."""

    def decorate(formula: Callable[..., Terms]) -> Objective:
        signature = _public_signature(formula, aggregation)
        own = [p.name for p in _keywords(formula)]
        known = [p.name for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]

        @functools.wraps(formula)
        def function(
            logp: ArrayLike, behavior_logp: ArrayLike, advantages: ArrayLike, mask: ArrayLike, **knobs: Any
        ) -> tuple[jax.Array, Metrics]:
            for name in knobs:
                if name not in known:
                    raise ValueError(f"{formula.__name__} has no knob {name!r}; possible: {', '.join(known)}")
            tokens = read_tokens(logp, behavior_logp, advantages, mask)
            terms = formula(tokens, **{name: value for name, value in knobs.items() if name in own})
            shared = {name: value for name, value in knobs.items() if name not in own}
            return aggregate(tokens, terms, **{"aggregation": aggregation, **shared})

        function.__doc__ = (
            f"{formula.__doc__}\n    The other arguments are explained in `mugrpo_jax.objectives`.\n"
        )
        function.__signature__ = signature  # type: ignore[attr-defined]  # what help() and inspect show
        return function

    return decorate


def aggregate(
    tokens: Tokens,
    terms: Terms,
    *,
    denominator: ArrayLike | None = None,
    aggregation: str,
    weights: ArrayLike | None = None,
    reference_logp: ArrayLike | None = None,
    kl_coef: ArrayLike = 0.0,
    kl_estimator: str = "k3",
    entropy: ArrayLike | None = None,
    entropy_coef: ArrayLike = 0.0,
    max_length: int | None = None,
) -> tuple[jax.Array, Metrics]:
    """Sum the terms of all tokens and return the loss and the metrics.

    The keywords are the knobs that all objectives share; the docstring of the package explains them.
    """
    shape = tokens.mask.shape
    check_choice("kl_estimator", kl_estimator, KL_ESTIMATORS)
    if max_length is not None:
        check_number("max_length", max_length, strict=True)
    for name, array in {"weights": weights, "reference_logp": reference_logp, "entropy": entropy}.items():
        if array is not None:
            check_shape(name, array, shape)
    _check_coefficient("kl_coef", kl_coef, "reference_logp", reference_logp, shape)
    _check_coefficient("entropy_coef", entropy_coef, "entropy", entropy, shape)
    if denominator is None:
        budget = max(shape[1], 1) if max_length is None else max_length
        denominator = count_denominator(tokens.mask, aggregation, max_length=budget)
    shares = token_shares(tokens.mask, aggregation, denominator=denominator)
    metrics = {"tokens": tokens.total, **terms.metrics, **_clipped_shares(tokens, terms.clipped)}

    policy = terms.policy
    if weights is not None:
        policy = policy * stop_gradient(on_tokens(weights, tokens.mask))
    per_token = terms.penalty - policy
    if reference_logp is not None:
        reference = stop_gradient(logp_on_tokens(reference_logp, tokens.mask))
        kl = kl_estimate(tokens.logp - reference, kl_estimator, importance=tokens.log_ratio)
        per_token += kl_coef * kl
        metrics["reference_kl/tokens"] = mean_over(kl.sum(), tokens.total)
    if entropy is not None:
        entropy = on_tokens(entropy, tokens.mask)
        per_token -= entropy_coef * entropy
        metrics["entropy/tokens"] = mean_over(entropy.sum(), tokens.total)
    loss = (shares * per_token).sum() + _not_a_number(tokens)
    return loss.astype(jnp.float32), as_metrics(metrics)


def _not_a_number(tokens: Tokens) -> jax.Array:
    """Return NaN if an input is NaN or +∞, else 0.

    A formula may drop such a token from the loss, for example by a veto, but its gradient would still be NaN.
    """
    usable = jnp.isfinite(tokens.log_ratio) & jnp.isfinite(tokens.advantages)
    return jnp.where(usable.all(), 0.0, jnp.nan)


def _clipped_shares(tokens: Tokens, clipped: jax.Array | None) -> Metrics:
    """Return the share of clipped tokens: of all, and of those with a positive or negative advantage."""
    if clipped is None:
        return {}
    found: Metrics = {"clipped/tokens": tokens.share(clipped)}
    for name, chosen in (
        ("positive_tokens", tokens.advantages > 0),
        ("negative_tokens", tokens.advantages < 0),
    ):
        found[name] = chosen.sum()
        found[f"clipped/{name}"] = mean_over((clipped & chosen).sum(), found[name])
    return found


def _keywords(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]


def _public_signature(formula: Callable[..., Terms], aggregation: str) -> inspect.Signature:
    """Return the signature that `help` shows: the four arrays, `denominator`, own knobs, shared knobs."""
    names = ("logp", "behavior_logp", "advantages", "mask")
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    arrays = [inspect.Parameter(name, kind, annotation="ArrayLike") for name in names]
    required = [p for p in _keywords(formula) if p.default is p.empty]
    own = [p for p in _keywords(formula) if p.default is not p.empty]
    denominator, _, *shared = _keywords(aggregate)
    average = inspect.Parameter("aggregation", denominator.kind, default=aggregation, annotation="str")
    returns = inspect.signature(aggregate).return_annotation
    return inspect.Signature(
        [*arrays, *required, denominator, *own, average, *shared], return_annotation=returns
    )


def _check_coefficient(
    name: str, value: ArrayLike, array_name: str, array: ArrayLike | None, shape: tuple[int, ...]
) -> None:
    """Raise an error if a coefficient is negative, or is not 0 although its array was not given."""
    check_number(name, value)
    if array is None and known_number(value) != 0:
        shown = "a traced value" if isinstance(value, jax.core.Tracer) else value
        raise ValueError(f"{array_name} is None; {name}={shown} needs an array {shape}")


def read_tokens(logp: ArrayLike, behavior_logp: ArrayLike, advantages: ArrayLike, mask: ArrayLike) -> Tokens:
    """Check the shapes of the four arrays and return them as `Tokens`, in float32 and 0 on padding."""
    check_rank("logp", logp, 2, "[B, T]")
    shape = jnp.shape(logp)
    check_shape("behavior_logp", behavior_logp, shape)
    check_shape("mask", mask, shape)
    valid = jnp.asarray(mask).astype(bool)
    logp = logp_on_tokens(logp, valid)
    behavior_logp = stop_gradient(logp_on_tokens(behavior_logp, valid))
    return Tokens(logp, behavior_logp, logp - behavior_logp, token_advantages(advantages, valid), valid)


def log_ratio(logp: ArrayLike, behavior_logp: ArrayLike, mask: ArrayLike) -> jax.Array:
    """Return the log-ratios l `[B, T]` as an objective computes them, for functions that take `log_ratio`.

    They are in float32, 0 on padding, and a log-prob below −10⁴, also −∞, counts as −10⁴.

    >>> logp, behavior_logp = jnp.array([[-1.0, -jnp.inf, 9.0]]), jnp.array([[-2.0, -jnp.inf, 0.0]])
    >>> log_ratio(logp, behavior_logp, jnp.array([[1, 1, 0]])).tolist()
    [[1.0, 0.0, 0.0]]
    """
    return read_tokens(logp, behavior_logp, jnp.zeros(jnp.shape(logp)[:1]), mask).log_ratio


def read_log_ratio(log_ratio: ArrayLike, advantages: ArrayLike, mask: ArrayLike) -> Tokens:
    """Return `Tokens` that have these log-ratios and no gradient, to compute statistics of a batch."""
    check_rank("log_ratio", log_ratio, 2, "[B, T]")
    log_ratio = stop_gradient(jnp.asarray(log_ratio))
    return read_tokens(log_ratio, jnp.zeros_like(log_ratio), advantages, mask)


def on_tokens(values: ArrayLike, mask: jax.Array) -> jax.Array:
    """Convert values `[B, T]` to float32 and set them to 0 where `mask` is False."""
    return jnp.where(mask, jnp.asarray(values).astype(jnp.float32), 0.0)


def logp_on_tokens(logp: ArrayLike, mask: jax.Array) -> jax.Array:
    """As `on_tokens`, for log-probs: −10⁴ and no gradient where they are below −10⁴, as −∞ is.

    In float32 the probability is 0 in both cases. But −∞ − (−∞) and 0 · −∞ would be NaN.
    """
    logp = on_tokens(logp, mask)
    return jnp.where(logp < -LARGEST_LOGP, -LARGEST_LOGP, logp)


def token_advantages(advantages: ArrayLike, mask: jax.Array) -> jax.Array:
    """Convert advantages `[B]` or `[B, T]` to `[B, T]`, without a gradient and 0 on padding."""
    check_shape("advantages", advantages, mask.shape[:1], mask.shape)
    advantages = stop_gradient(jnp.asarray(advantages))
    return on_tokens(advantages if advantages.ndim == 2 else advantages[:, None], mask)


def min_form(
    ratio: jax.Array,
    advantages: jax.Array,
    clip_low: ArrayLike,
    clip_high: ArrayLike,
    dual_clip: ArrayLike | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return PPO's `min(ρ A, clip(ρ, low, high) A)` per token, and a mask that is True on clipped tokens.

    With `dual_clip` c, the value for A < 0 is at least c A, so the gradient is also 0 beyond ρ = c
    (arXiv 1912.09729). The code does not use `min`, so that a ratio on a bound keeps its whole gradient.
    """
    above = (advantages > 0) & (ratio > clip_high)
    below = (advantages < 0) & (ratio < clip_low)
    bounded = jnp.where(above, clip_high, jnp.where(below, clip_low, ratio))
    clipped = above | below
    if dual_clip is not None:
        far = beyond_dual_clip(ratio, advantages, dual_clip)
        bounded, clipped = jnp.where(far, dual_clip, bounded), clipped | far
    return bounded * advantages, clipped


def beyond_dual_clip(ratio: jax.Array, advantages: jax.Array, dual_clip: ArrayLike) -> jax.Array:
    """Return a mask that is True where the advantage is negative and the ratio is above the dual clip."""
    check_number("dual_clip", dual_clip, low=1.0, strict=True)
    return (advantages < 0) & (ratio > dual_clip)


def mean_log_ratio(tokens: Tokens) -> jax.Array:
    """Return the mean of the log-ratios over the tokens of each response, `[B, 1]`."""
    return mean_over(tokens.log_ratio.sum(axis=1, keepdims=True), tokens.mask.sum(axis=1, keepdims=True))


def through_own_token(weight: jax.Array, tokens: Tokens) -> jax.Array:
    """Return `weight` with another gradient: that of weight · log π(y_t), with the weight as a constant."""
    return stop_gradient(weight) * jnp.exp(tokens.logp - stop_gradient(tokens.logp))
