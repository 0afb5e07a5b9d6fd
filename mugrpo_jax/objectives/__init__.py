"""Objectives for reinforcement learning on stale rollouts, as pure functions of arrays.

    from mugrpo_jax import objectives

    advantages = objectives.group_advantages(rewards).reshape(-1)
    loss, metrics = objectives.mu_grpo(logp, behavior_logp, advantages, mask)

**One signature.** Every objective is called as below. Only `decoupled_ppo` needs one more array.

    objective(logp, behavior_logp, advantages, mask, *, denominator=None, **knobs) -> (loss, metrics)

    logp            [B, T] log-probs of the policy that is trained; the loss has a gradient in this array
    behavior_logp   [B, T] log-probs stored when the responses were sampled
    advantages      [B] or [B, T], see `group_advantages`
    mask            [B, T], non-zero on response tokens
    denominator     the denominator of the whole update, when this call sees only a part of it

Each row is one response. `logp[i, t]` is the log-prob of token t in response i, given the tokens before it.
The loss is to be minimised. All inputs are converted to float32, and values on padding have no effect. Clip
bounds are absolute ratios such as 0.8 and 1.2. The docstring of an objective explains its own knobs.

**Under JAX.** The functions can be called inside `jax.jit`, `jax.vmap`, `jax.checkpoint`, `jax.lax.scan` and
`jax.shard_map`. Numbers among the knobs may be traced, except BAPO's `clip_high`, `clip_high_max` and `step`.
Text and booleans may not, so bind them first, for example with `functools.partial`. Inside `jax.shard_map` a
call sees the rows of its device: pass the `denominator` of all devices and add up the losses with
`jax.lax.psum`.

**Extremes.** A log-prob below −10,000, also −∞, counts as −10,000 and gets no gradient. A ratio is at most
e^80; beyond that, it is a constant without a gradient. NaN or +∞ on a response token gives a loss of NaN.
Functions that take a `log_ratio` take it as it is: the function `log_ratio` computes it as the objectives do.

**Notation** in all docstrings: π is the policy, b the behavior policy, and A the advantage of a token.
l_t = log π(y_t) − log b(y_t) is the log-ratio of token y_t, and ρ_t = exp(l_t) is its ratio. J_t is the
contribution of token t to the objective, which is maximised. In J_t, `log π` means log π(y_t).

**Knobs that all objectives share**:

    aggregation      token_mean, seq_mean_token_mean, seq_mean_token_sum or constant; see `aggregation`
    max_length       L_max of `constant`, in tokens; T by default, not needed when `denominator` is given
    weights          [B, T] factors on the policy term, without a gradient: `veto_mask`, `tis_weights`,
                     `mis_mask`, `icepop_mask`, `sequence_veto_mask`, `opsm_mask` or a product of them
    reference_logp   [B, T] log-probs of a reference policy; the loss gets `kl_coef` times the KL estimate
    entropy          [B, T] entropies of the policy; the loss gets −`entropy_coef` times the entropy;
                     it has a gradient in this array too

`weights` multiply only the policy term. The denominator, the KL term and the entropy term do not change.
An objective with bounds reports the share of tokens beyond its own bounds: the metrics `clipped/tokens`,
`clipped/positive_tokens` and `clipped/negative_tokens`, by the sign of the advantage. Objectives that take
the minimum of a clipped and an unclipped term, as PPO does, also have `dual_clip`.

**An update in parts.** Compute the `denominator` of the whole update with the function of that name, and pass
it to every call. Then the losses and gradients of the micro-batches add up to those of the whole update, and
`combine_metrics` combines their metrics. M2PO, P3O and BAPO take a statistic from the batch; see
`mugrpo_jax.objectives.batch_statistics` for how to share it between micro-batches.

**By subject**: the losses are in the files that end in `_loss` or `_losses`. Beside them are `veto`,
`importance_corrections`, `advantages`, `aggregation`, `kl`, `ess`, `diagnostics`, `metrics`, `staleness_law`,
`staleness_fit`, `drift_regimes`, `step_signal` and `objective_config`.
"""

from mugrpo_jax.objectives._objective import Objective, log_ratio
from mugrpo_jax.objectives.advantages import ADVANTAGE_KINDS, equal_groups, group_advantages, overlong_penalty
from mugrpo_jax.objectives.aggregation import AGGREGATIONS, denominator
from mugrpo_jax.objectives.batch_bound_losses import M2PO_FORMS, bapo, bapo_bounds, m2po, m2po_bound
from mugrpo_jax.objectives.batch_statistics import STATISTICS, Statistics
from mugrpo_jax.objectives.clipped_losses import dapo, decoupled_ppo, dr_grpo, grpo
from mugrpo_jax.objectives.diagnostics import diagnostics
from mugrpo_jax.objectives.dppo_loss import DIVERGENCES, dppo
from mugrpo_jax.objectives.drift_regimes import (
    Advice,
    DriftFit,
    advise_learning_rate,
    drift,
    effective_updates,
    fit_drift,
    regime,
    updates_until_drift,
)
from mugrpo_jax.objectives.ess import (
    effective_sample_size,
    ess_from_sums,
    ratio_sums,
    second_moment,
    sequence_ess,
)
from mugrpo_jax.objectives.importance_corrections import (
    icepop_mask,
    mis_mask,
    opsm_mask,
    sequence_veto_mask,
    tis_weights,
)
from mugrpo_jax.objectives.kl import KL_ESTIMATORS, kl_estimate
from mugrpo_jax.objectives.metrics import Metrics, combine_metrics
from mugrpo_jax.objectives.mu_grpo_loss import mu_grpo
from mugrpo_jax.objectives.objective_config import OBJECTIVES, ObjectiveConfig
from mugrpo_jax.objectives.p3o_loss import p3o
from mugrpo_jax.objectives.prefix_losses import ctpo, minpro, pnpo
from mugrpo_jax.objectives.sequence_losses import gmpo, gspo, topr, vespo
from mugrpo_jax.objectives.soft_losses import cispo, gppo, sapo
from mugrpo_jax.objectives.staleness_fit import (
    FinishedRun,
    StalenessFit,
    WrongSide,
    best_split,
    fit_staleness,
)
from mugrpo_jax.objectives.staleness_law import (
    UNPROTECTED_GRPO,
    StalenessConstants,
    binding_constraint,
    drift_at_level,
    gradient_cosine,
    largest_learning_rate,
    staleness_constants,
    staleness_report,
    update_size,
    vcpo_factor,
)
from mugrpo_jax.objectives.step_signal import (
    drift_exponent,
    random_walk_drift,
    signal_share,
    smoothed,
    updates_until_signal,
)
from mugrpo_jax.objectives.veto import VETO_SCOPES, veto_mask, veto_metrics

__all__ = [
    "ADVANTAGE_KINDS",
    "AGGREGATIONS",
    "DIVERGENCES",
    "KL_ESTIMATORS",
    "M2PO_FORMS",
    "OBJECTIVES",
    "STATISTICS",
    "UNPROTECTED_GRPO",
    "VETO_SCOPES",
    "Advice",
    "DriftFit",
    "FinishedRun",
    "Metrics",
    "Objective",
    "ObjectiveConfig",
    "StalenessConstants",
    "StalenessFit",
    "Statistics",
    "WrongSide",
    "advise_learning_rate",
    "bapo",
    "bapo_bounds",
    "best_split",
    "binding_constraint",
    "cispo",
    "combine_metrics",
    "ctpo",
    "dapo",
    "decoupled_ppo",
    "denominator",
    "diagnostics",
    "dppo",
    "dr_grpo",
    "drift",
    "drift_at_level",
    "drift_exponent",
    "effective_sample_size",
    "effective_updates",
    "equal_groups",
    "ess_from_sums",
    "fit_drift",
    "fit_staleness",
    "gmpo",
    "gppo",
    "gradient_cosine",
    "group_advantages",
    "grpo",
    "gspo",
    "icepop_mask",
    "kl_estimate",
    "largest_learning_rate",
    "log_ratio",
    "m2po",
    "m2po_bound",
    "minpro",
    "mis_mask",
    "mu_grpo",
    "opsm_mask",
    "overlong_penalty",
    "p3o",
    "pnpo",
    "random_walk_drift",
    "ratio_sums",
    "regime",
    "sapo",
    "second_moment",
    "sequence_ess",
    "sequence_veto_mask",
    "signal_share",
    "smoothed",
    "staleness_constants",
    "staleness_report",
    "tis_weights",
    "topr",
    "update_size",
    "updates_until_drift",
    "updates_until_signal",
    "vcpo_factor",
    "vespo",
    "veto_mask",
    "veto_metrics",
]
