"""Estimate KL(π ‖ reference) for each token."""

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jax.typing import ArrayLike

from mugrpo_jax.objectives._checks import check_choice

KL_ESTIMATORS = ("k1", "k2", "k3", "weighted_k3")

# exp(80) is about 5e34, so a sum over thousands of such ratios is still finite in float32.
_LARGEST_EXPONENT = 80.0


def safe_exp(x: jax.Array) -> jax.Array:
    """Return exp(x), but at most e^80, so that no ratio is infinite. The gradient is 0 for x above 80."""
    return jnp.exp(jnp.where(x > _LARGEST_EXPONENT, _LARGEST_EXPONENT, x))


def kl_estimate(
    log_ratio: ArrayLike, estimator: str = "k3", *, importance: ArrayLike | None = None
) -> jax.Array:
    """Estimate KL(π ‖ reference) for each token.

    x is `log π − log reference` (Schulman, "Approximating KL divergence", 2020):

        k1 = x        k2 = x² / 2        k3 = exp(−x) − 1 + x        weighted_k3 = ρ · k3

    k1 and k3 are unbiased if the samples come from π. k2 and k3 are never negative. The expected gradient of
    k1 is 0, and the expected gradient of k2 is the gradient of the true KL. If the samples come from a
    behavior policy b, `weighted_k3` corrects for this with `ρ = π / b` (DeepSeek-V3.2, arXiv 2512.02556). ρ
    has a gradient too, so the gradient of `weighted_k3` is `ρ x`, which is unbiased.

    Args:
      log_ratio: x, an array of any shape.
      estimator: one of `KL_ESTIMATORS`.
      importance: `log π − log b` in the shape of `log_ratio`; only `weighted_k3` needs it.

    Returns:
      The estimates in float32, in the shape of `log_ratio`.

    >>> [round(float(kl_estimate(0.5, kind)), 4) for kind in ("k1", "k2", "k3")]
    [0.5, 0.125, 0.1065]
    >>> round(float(kl_estimate(0.5, "weighted_k3", importance=jnp.log(2.0))), 4)
    0.2131
    """
    check_choice("estimator", estimator, KL_ESTIMATORS)
    x = jnp.asarray(log_ratio, jnp.float32)
    if estimator == "k1":
        return x
    if estimator == "k2":
        return 0.5 * x**2
    # Above the largest exponent the value is constant, but the gradient keeps its direction: towards x = 0.
    reverse = safe_exp(-x)
    k3 = jnp.where(-x > _LARGEST_EXPONENT, reverse * (1.0 + stop_gradient(x) - x), reverse) - 1.0 + x
    if estimator == "k3":
        return k3
    if importance is None:
        raise ValueError("importance is None; estimator 'weighted_k3' needs log π − log b")
    return safe_exp(jnp.asarray(importance, jnp.float32)) * k3
