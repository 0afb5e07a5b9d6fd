"""The DPPO loss, which limits the change of probabilities instead of ratios."""

from __future__ import annotations  # so that help() shows short types

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jax.typing import ArrayLike

from mugrpo_jax.objectives._checks import check_choice, check_number
from mugrpo_jax.objectives._objective import Terms, Tokens, objective

DIVERGENCES = {"tv": 0.15, "kl": 0.05}
"""The names of the divergences in DPPO, and the threshold of the paper for each divergence."""

_LARGEST = 1 - 1e-7  # largest probability p, so that log(1 − p) is finite


@objective("token_mean")
def dppo(
    tokens: Tokens,
    *,
    divergence: str = "tv",
    threshold: ArrayLike | None = None,
    ratio_cap: ArrayLike = 5.0,
) -> Terms:
    """DPPO: drop tokens whose probability has moved too far away (arXiv 2602.04879).

        J_t = stop_gradient(M_t · min(ρ_t, 5)) · A · log π
        M_t = 0   if D_t > δ and the update moves the token further: A > 0 and ρ > 1, or A < 0 and ρ < 1
        tv        D_t = |π − b|
        kl        D_t = b log(b / π) + (1 − b) log((1 − b) / (1 − π))

    π and b are the probabilities of the sampled token. D is the divergence between two distributions with two
    outcomes, "this token" and "any other token". A rare token may have a large ratio although its probability
    hardly changes, so it keeps its gradient. The cap on ρ is 5 or none in the paper, and 20 in TRL and slime.

    Args:
      divergence: `tv` or `kl`.
      threshold: δ. None means the threshold of the paper, 0.15 for `tv` and 0.05 for `kl`.
      ratio_cap: upper bound on the weight ρ.

    Metrics: `clipped/tokens`, the share of dropped tokens, and `divergence/tokens`, the mean of D.

    >>> logp, behavior_logp = jnp.log(jnp.array([[0.9, 0.02]])), jnp.log(jnp.array([[0.6, 0.01]]))
    >>> rest = (behavior_logp, jnp.array([1.0]), jnp.ones((1, 2)))
    >>> gradient, _ = jax.grad(dppo, has_aux=True)(logp, *rest, denominator=1)
    >>> print(-gradient.round(4))  # the first moved by 0.3, the second by 0.01
    [[0. 2.]]
    """
    check_choice("divergence", divergence, DIVERGENCES)
    limit = DIVERGENCES[divergence] if threshold is None else threshold
    check_number("threshold", limit, strict=True)
    check_number("ratio_cap", ratio_cap, strict=True)
    log_ratio = stop_gradient(tokens.log_ratio)
    distance = _divergence(divergence, stop_gradient(tokens.logp), tokens.behavior_logp)
    dropped = (distance > limit) & (log_ratio * jnp.sign(tokens.advantages) > 0)
    weight = jnp.where(dropped, 0.0, jnp.minimum(stop_gradient(tokens.ratio), ratio_cap))
    metrics = {"divergence/tokens": tokens.mean(distance)}
    return Terms(weight * tokens.advantages * tokens.logp, metrics, clipped=dropped)


def _divergence(kind: str, logp: jax.Array, behavior_logp: jax.Array) -> jax.Array:
    policy, behavior = (jnp.exp(jnp.minimum(x, 0.0)) for x in (logp, behavior_logp))
    if kind == "tv":
        return jnp.abs(policy - behavior)
    others = jnp.log1p(-jnp.minimum(behavior, _LARGEST)) - jnp.log1p(-jnp.minimum(policy, _LARGEST))
    return behavior * (behavior_logp - logp) + (1.0 - behavior) * others
