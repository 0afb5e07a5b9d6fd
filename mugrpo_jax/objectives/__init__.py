"""Objectives for reinforcement learning on stale rollouts, as pure functions of arrays.

loss, metrics = objective(logp, behavior_logp, advantages, mask, denominator=None, **knobs)
"""

from mugrpo_jax.objectives.advantages import ADVANTAGE_KINDS, equal_groups, group_advantages, overlong_penalty
from mugrpo_jax.objectives.aggregation import AGGREGATIONS, denominator
from mugrpo_jax.objectives.clipped import grpo, mu_grpo
from mugrpo_jax.objectives.config import OBJECTIVES, ObjectiveConfig
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
from mugrpo_jax.objectives.veto import VETO_SCOPES, veto_mask, veto_metrics

__all__ = [
    "ADVANTAGE_KINDS",
    "AGGREGATIONS",
    "KL_ESTIMATORS",
    "OBJECTIVES",
    "VETO_SCOPES",
    "Metrics",
    "ObjectiveConfig",
    "combine_metrics",
    "denominator",
    "diagnostics",
    "effective_sample_size",
    "equal_groups",
    "ess_from_sums",
    "group_advantages",
    "grpo",
    "kl_estimate",
    "mu_grpo",
    "overlong_penalty",
    "ratio_sums",
    "second_moment",
    "sequence_ess",
    "veto_mask",
    "veto_metrics",
]
