"""The P3O loss (arXiv 2605.12380): the effective sample size sets the trust region."""

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
    """P3O: the effective sample size caps the ratio and sets a pull to the behavior (arXiv 2605.12380).

        L_t = −stop_gradient(min(ρ_t, e)) · A · log π + (1 − e) · K_t
        K_t = l_t + exp(clip(−l_t, −10, 10)) − 1        e = effective_sample_size(l, m)

    The cap is e itself, on one side only. The method's entropy bonus and its k3 penalty towards a reference
    are the shared knobs `entropy_coef` and `kl_coef`. `weights` leave K alone.

    Outside the clamp (l < −10) the gradient of K as published is 1, which pushes such tokens further down.
    `safe_kl` keeps the value and uses the gradient `1 − exp(clip(−l, −10, 10))` everywhere; it is our own.

    Args:
      ess: e of the whole update; by default that of this call.
      safe_kl: repair the gradient of K outside the clamp.

    Metrics: `ess/tokens`, `behavior_kl/tokens` (K) and `clipped/tokens`.

    >>> logp = jnp.log(jnp.array([[4.0, 1.0, 1.0, 1.0]]))
    >>> rest = (jnp.zeros((1, 4)), jnp.array([1.0]), jnp.ones((1, 4)))
    >>> gradient, metrics = jax.grad(p3o, has_aux=True)(logp, *rest, denominator=1)
    >>> round(float(metrics["ess/tokens"]), 6), round(float(gradient[0, 0]), 6)
    (0.644737, -0.378289)
    """
    check_flag("safe_kl", safe_kl)
    if ess is None:
        ess = effective_sample_size(tokens.log_ratio, tokens.mask)
    check_number("ess", ess)
    ess = stop_gradient(jnp.asarray(ess, jnp.float32))
    ratio = stop_gradient(tokens.ratio)
    kl = _behavior_kl(tokens.log_ratio, safe=safe_kl)
    metrics = {
        "ess/tokens": ess,
        "behavior_kl/tokens": mean_over(kl.sum(), tokens.total),
        "clipped/tokens": tokens.share(ratio > ess),
    }
    policy = jnp.minimum(ratio, ess) * tokens.advantages * tokens.logp
    return Terms(policy, metrics, penalty=(1.0 - ess) * kl)


def _behavior_kl(log_ratio: jax.Array, *, safe: bool) -> jax.Array:
    """K_t = l + exp(clip(−l, −10, 10)) − 1, with the published gradient or the repaired one."""
    within = jnp.abs(log_ratio) <= 10.0
    reverse = jnp.exp(jnp.where(within, -log_ratio, stop_gradient(jnp.clip(-log_ratio, -10.0, 10.0))))
    kl = log_ratio + reverse - 1.0
    if not safe:
        return kl
    slope = stop_gradient(1.0 - reverse)
    return stop_gradient(kl) + slope * (log_ratio - stop_gradient(log_ratio))
