"""The P3O loss (arXiv 2605.12380), which caps the ratio at the effective sample size."""

from __future__ import annotations  # so that help() shows short types

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jax.typing import ArrayLike

from mugrpo_jax.objectives._checks import check_flag, check_number
from mugrpo_jax.objectives._objective import Terms, Tokens, objective
from mugrpo_jax.objectives.ess import effective_sample_size
from mugrpo_jax.objectives.metrics import mean_over


@objective("token_mean")
def p3o(tokens: Tokens, *, ess: ArrayLike | None = None, safe_kl: bool = False) -> Terms:
    """P3O: cap the ratio at the effective sample size e, and add 1 − e times a KL term (arXiv 2605.12380).

        L_t = −stop_gradient(min(ρ_t, e)) · A · log π + (1 − e) · K_t
        K_t = l_t + exp(clip(−l_t, −10, 10)) − 1        e = effective_sample_size(l, m)

    There is no lower bound on ρ. K estimates the KL between π and b; `weights` do not multiply K. The
    entropy bonus and the k3 penalty to a reference policy are the shared knobs `entropy_coef` and `kl_coef`.

    For l < −10 the published gradient of K is 1, so the update makes these unlikely tokens even less likely.
    `safe_kl` is our own variant: K has the same value, but the gradient `1 − exp(clip(−l, −10, 10))`.

    Args:
      ess: e of the whole update. None computes e from the arrays of this call.
      safe_kl: whether to use this gradient.

    Metrics: `cap/tokens` (e), `behavior_kl/tokens` (mean of K), `clipped/tokens` (share with ρ > e).

    >>> logp = jnp.log(jnp.array([[4.0, 1.0, 1.0, 1.0]]))
    >>> rest = (jnp.zeros((1, 4)), jnp.array([1.0]), jnp.ones((1, 4)))
    >>> gradient, metrics = jax.grad(p3o, has_aux=True)(logp, *rest, denominator=1)
    >>> round(float(metrics["cap/tokens"]), 6), round(float(gradient[0, 0]), 6)
    (0.644737, -0.378289)
    """
    check_flag("safe_kl", safe_kl)
    if ess is None:
        ess = effective_sample_size(tokens.log_ratio, tokens.mask)
    check_number("ess", ess)
    ess = stop_gradient(jnp.asarray(ess, jnp.float32))
    ratio = stop_gradient(tokens.ratio)
    kl = _behavior_kl(tokens.log_ratio, safe=safe_kl)
    metrics = {"cap/tokens": ess, "behavior_kl/tokens": mean_over(kl.sum(), tokens.total)}
    policy = jnp.minimum(ratio, ess) * tokens.advantages * tokens.logp
    return Terms(policy, metrics, penalty=(1.0 - ess) * kl, clipped=ratio > ess)


def _behavior_kl(log_ratio: jax.Array, *, safe: bool) -> jax.Array:
    """Return K_t = l + exp(clip(−l, −10, 10)) − 1; `safe` selects the gradient of `safe_kl`."""
    within = jnp.abs(log_ratio) <= 10.0
    reverse = jnp.exp(jnp.where(within, -log_ratio, stop_gradient(jnp.clip(-log_ratio, -10.0, 10.0))))
    kl = log_ratio + reverse - 1.0
    if not safe:
        return kl
    slope = stop_gradient(1.0 - reverse)
    return stop_gradient(kl) + slope * (log_ratio - stop_gradient(log_ratio))
