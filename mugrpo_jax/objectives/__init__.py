"""Objectives for reinforcement learning on stale rollouts, as pure functions of arrays.

    from mugrpo_jax import objectives

    advantages = objectives.group_advantages(rewards).reshape(-1)
    loss, metrics = objectives.mu_grpo(logp, behavior_logp, advantages, mask)

**One signature.** Every objective is called as

    objective(logp, behavior_logp, advantages, mask, *, denominator=None, **knobs) -> (loss, metrics)

A row is a response. `logp[b, t]` is the log-prob of token t given the tokens before it, under the policy
that is trained; `behavior_logp` the one stored when the token was sampled; both `[B, T]`. `advantages` are
`[B]` or `[B, T]`, `mask` is non-zero on response tokens. The loss is to be minimised; only `logp` (and
`entropy`) carry a gradient. Everything is computed in float32, whatever comes in, and what stands on padding
is never read. Clip bounds are absolute ratios.

**An update in parts.** `denominator` is that of the whole update, from the function of that name. With it,
losses and gradients of micro-batches add up to those of the whole, and `combine_metrics` puts their metrics
together; the names of the metrics say how. M2PO, P3O and BAPO read a statistic from the batch: see
`mugrpo_jax.objectives.adaptive` for their pooled form.

**Knobs that all objectives share**, beside their own:

    aggregation      token_mean, seq_mean_token_mean, seq_mean_token_sum or constant; each has its default
    max_length       L_max of `constant`, in tokens; T by default, not needed when `denominator` is given
    weights          [B, T] factors on the policy term, without gradient: `veto_mask`, `tis_weights`,
                     `mis_mask`, `icepop_mask`, `sequence_veto_mask`, `opsm_mask` or a product of them
    reference_logp   [B, T] log-probs of a reference, to add `kl_coef` times the `kl_estimator` k1, k2 or k3
    entropy          [B, T] entropies of the policy, to subtract `entropy_coef` times them

Weights remove or rescale terms of the sum and leave the denominator, the KL term and the entropy alone.

**By subject**: `advantages`, `clipped`, `soft`, `sequence` and `adaptive` objectives, `veto`, `corrections`,
`aggregation`, `kl`, `moments`, `diagnostics`, `staleness`, `config`.
"""

from mugrpo_jax.objectives.adaptive import M2PO_FORMS, bapo, bapo_bounds, m2po, m2po_bound, p3o
from mugrpo_jax.objectives.advantages import ADVANTAGE_KINDS, equal_groups, group_advantages, overlong_penalty
from mugrpo_jax.objectives.aggregation import AGGREGATIONS, denominator
from mugrpo_jax.objectives.clipped import dapo, decoupled_ppo, dr_grpo, grpo, mu_grpo
from mugrpo_jax.objectives.config import OBJECTIVES, Objective, ObjectiveConfig
from mugrpo_jax.objectives.corrections import (
    icepop_mask,
    mis_mask,
    opsm_mask,
    sequence_veto_mask,
    tis_weights,
)
from mugrpo_jax.objectives.diagnostics import diagnostics
from mugrpo_jax.objectives.kl import KL_ESTIMATORS, kl_estimate
from mugrpo_jax.objectives.metrics import Metrics, combine_metrics
from mugrpo_jax.objectives.moments import (
    effective_sample_size,
    ess_from_sums,
    ratio_sums,
    second_moment,
    sequence_ess,
)
from mugrpo_jax.objectives.sequence import gspo, minpro, pnpo, topr
from mugrpo_jax.objectives.soft import cispo, gppo, sapo
from mugrpo_jax.objectives.staleness_law import (
    UNPROTECTED_GRPO,
    FinishedRun,
    StalenessConstants,
    StalenessFit,
    binding_constraint,
    drift_at_level,
    fit_staleness,
    gradient_cosine,
    largest_learning_rate,
    staleness_constants,
    staleness_report,
    update_size,
    vcpo_factor,
)
from mugrpo_jax.objectives.veto import VETO_SCOPES, veto_mask, veto_metrics

__all__ = [
    "ADVANTAGE_KINDS",
    "AGGREGATIONS",
    "KL_ESTIMATORS",
    "M2PO_FORMS",
    "OBJECTIVES",
    "UNPROTECTED_GRPO",
    "VETO_SCOPES",
    "FinishedRun",
    "Metrics",
    "Objective",
    "ObjectiveConfig",
    "StalenessConstants",
    "StalenessFit",
    "bapo",
    "bapo_bounds",
    "binding_constraint",
    "cispo",
    "combine_metrics",
    "dapo",
    "decoupled_ppo",
    "denominator",
    "diagnostics",
    "dr_grpo",
    "drift_at_level",
    "effective_sample_size",
    "equal_groups",
    "ess_from_sums",
    "fit_staleness",
    "gppo",
    "gradient_cosine",
    "group_advantages",
    "grpo",
    "gspo",
    "icepop_mask",
    "kl_estimate",
    "largest_learning_rate",
    "m2po",
    "m2po_bound",
    "minpro",
    "mis_mask",
    "mu_grpo",
    "opsm_mask",
    "overlong_penalty",
    "p3o",
    "pnpo",
    "ratio_sums",
    "sapo",
    "second_moment",
    "sequence_ess",
    "sequence_veto_mask",
    "staleness_constants",
    "staleness_report",
    "tis_weights",
    "topr",
    "update_size",
    "vcpo_factor",
    "veto_mask",
    "veto_metrics",
]
