"""The µ-GRPO loss (arXiv 2605.17570): relaxed clipping and the negative-advantage veto."""

from __future__ import annotations  # so that help() shows short types

import jax.numpy as jnp
from jax.typing import ArrayLike

from mugrpo_jax.objectives._checks import check_choice, check_clip, check_number
from mugrpo_jax.objectives._objective import Terms, Tokens, min_form, objective
from mugrpo_jax.objectives.veto import VETO_SCOPES, veto_mask, veto_metrics


@objective("token_mean")
def mu_grpo(
    tokens: Tokens,
    *,
    clip_low: ArrayLike = 0.0,
    clip_high: ArrayLike = 5.0,
    veto: str = "suffix",
    veto_ratio: ArrayLike = 1e-4,
    dual_clip: ArrayLike | None = None,
) -> Terms:
    """µ-GRPO: combine relaxed clipping with the negative-advantage veto (arXiv 2605.17570).

        L = −(1/Z) Σ_t m_t · keep_t · min(ρ_t A, clip(ρ_t, 0, 5) A)

    m_t is the mask, and keep_t is 0 for vetoed tokens, else 1. For A > 0 the gradient is 0 where ρ > 5. For
    A < 0 nothing is clipped, but tokens can be vetoed. Z is the number of response tokens, including vetoed
    tokens. The paper gives the bounds and the veto; the min-form and Z are our interpretation.

    Args:
      clip_low, clip_high: bounds on the ratio.
      veto: scope of the veto, see `veto_mask`.
      veto_ratio: τ; a token with A < 0 and a ratio below τ is a trigger.
      dual_clip: c. For A < 0 the gradient is also 0 where ρ > c. None, as in the paper, means no dual clip.

    Metrics: `clipped/tokens` (share of clipped tokens), and with a veto the metrics of `veto_metrics`.

    >>> import jax.numpy as jnp
    >>> ratio = jnp.array([[6.0, 1.0, 1.0], [1.0, 1e-5, 0.5]])
    >>> loss, metrics = mu_grpo(jnp.log(ratio), jnp.zeros((2, 3)), jnp.array([1.0, -1.0]), jnp.ones((2, 3)))
    >>> round(float(loss), 4)  # −(5 + 1 + 1 − 1 − 1e-5) / 6: the last token is vetoed
    -1.0
    >>> round(float(metrics["vetoed/tokens"]), 4)
    0.1667
    """
    check_clip(clip_low, clip_high)
    check_choice("veto", veto, VETO_SCOPES)
    check_number("veto_ratio", veto_ratio, strict=True)
    surrogate, clipped = min_form(tokens.ratio, tokens.advantages, clip_low, clip_high, dual_clip)
    batch = (tokens.log_ratio, tokens.advantages, tokens.mask)
    keep = veto_mask(*batch, scope=veto, ratio=veto_ratio)
    found = {} if veto == "none" else veto_metrics(*batch, keep, ratio=veto_ratio)
    return Terms(jnp.where(keep, surrogate, 0.0), found, clipped=clipped)
