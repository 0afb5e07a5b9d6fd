"""Random batches, the variants of every objective, and compiled programs that the tests share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from numpy_reference import count

from mugrpo_jax.objectives import AGGREGATIONS, KL_ESTIMATORS, OBJECTIVES, VETO_SCOPES, ObjectiveConfig

SHAPE = (8, 16)  # one shape for nearly all tests, so that few programs are compiled

VARIANTS = [
    *((name, {}) for name in OBJECTIVES),
    *(("mu_grpo", {"veto": scope}) for scope in VETO_SCOPES if scope != "suffix"),
    *(("grpo", {"aggregation": kind}) for kind in AGGREGATIONS if kind != "seq_mean_token_mean"),
    ("dr_grpo", {"max_length": 40}),
    ("gspo", {"clip_low": 0.2, "clip_high": 3.0}),
    ("gspo", {"clip_low": 0.2, "clip_high": 3.0, "level": "token"}),
    ("m2po", {"form": "mask"}),
    ("m2po", {"threshold": 5.0}),
    ("p3o", {"safe_kl": True}),
    ("bapo", {"target": 0.4}),
    ("topr", {"length_normalized": True}),
    ("pnpo", {"clip_low": 0.01, "clip_high": 20.0}),
    ("gmpo", {"clip_low": 0.01, "clip_high": 20.0}),
    ("ctpo", {"log_low": 3.0, "log_high": 5.0}),
    ("dppo", {"divergence": "kl"}),
    ("dppo", {"threshold": 0.01, "ratio_cap": 2.0}),
    ("vespo", {"k_positive": 0.1, "lambda_positive": 0.1}),
    *((name, {"dual_clip": 3.0}) for name in ("mu_grpo", "grpo", "gppo", "bapo")),
    ("m2po", {"form": "mask", "dual_clip": 3.0}),
]
SHARED_VARIANTS = [
    *(("mu_grpo", {"kl_coef": 0.1, "kl_estimator": kind}) for kind in KL_ESTIMATORS),
    ("p3o", {"kl_coef": 0.05, "entropy_coef": 0.02}),
]


def name_of(variant):
    name, knobs = variant
    return "-".join([name, *(f"{key}={value}" for key, value in knobs.items())])


def random_batch(seed, *, shape=SHAPE, low=1e-6, high=1e3):
    """logp, behavior_logp, advantages, mask: ragged, one row empty, responses that start anywhere.

    Log-probs are never positive, and the ratios cover [low, high] evenly in the logarithm.
    """
    random = np.random.default_rng(seed)
    log_ratio = random.uniform(np.log(low), np.log(high), shape)
    log_ratio[1, -2:] = np.log(low), np.log(high)
    behavior_logp = -random.exponential(1.0, shape) - np.maximum(log_ratio, 0)
    start = random.integers(0, 4, (shape[0], 1))
    length = random.integers(1, shape[1] - 4, (shape[0], 1))
    start[1], length[1], length[2] = 0, shape[1], 0
    columns = np.arange(shape[1])
    mask = (columns >= start) & (columns < start + length)
    advantages = random.standard_normal(shape[0])
    advantages[:2] = np.abs(advantages[0]), -np.abs(advantages[1])
    logp = (behavior_logp + log_ratio).astype(np.float32)
    return logp, behavior_logp.astype(np.float32), advantages.astype(np.float32), mask


def extra_arrays(name, batch):
    """What some objectives need beside the batch: a proximal policy half way from the behavior policy."""
    logp, behavior_logp, _, mask = batch
    if name != "decoupled_ppo":
        return {}
    return {"proximal_logp": np.where(mask, logp / 2 + np.where(mask, behavior_logp, 0) / 2, np.nan)}


def shared_arrays(batch, seed=0):
    """A reference near the policy, and entropies."""
    random = np.random.default_rng(seed)
    logp = batch[0]
    reference_logp = (logp + random.uniform(-2, 2, logp.shape)).astype(np.float32)
    return {"reference_logp": reference_logp, "entropy": random.uniform(0, 3, logp.shape).astype(np.float32)}


@functools.cache
def _program(name, settings):
    objective = functools.partial(OBJECTIVES[name], **dict(settings))
    return jax.jit(jax.value_and_grad(objective, has_aux=True))


def run(variant, batch, *, denominator=None, **arrays):
    """Loss, gradient with respect to logp, and metrics, from one compiled program per variant.

    The denominator is always given, that of the batch by default, so that parts of a batch run in the same
    program as the whole.
    """
    name, knobs = variant
    if denominator is None:
        denominator = count(batch[3], aggregation_of(variant), knobs.get("max_length", batch[3].shape[1]))
    arrays |= extra_arrays(name, batch)
    program = _program(name, tuple(sorted(knobs.items())))
    (loss, metrics), gradient = program(
        *map(jnp.asarray, batch), denominator=jnp.float32(denominator), **arrays
    )
    return np.asarray(loss), np.asarray(gradient), metrics


def aggregation_of(variant):
    name, knobs = variant
    return knobs.get("aggregation", _default_aggregation(name))


@functools.cache
def _default_aggregation(name):
    return ObjectiveConfig(name).settings["aggregation"]
