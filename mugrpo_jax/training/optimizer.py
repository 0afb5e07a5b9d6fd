"""Make the optimizer from the config: AdamW with gradient clipping and a learning-rate schedule."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mugrpo_jax.config import OptimizerSection
from mugrpo_jax.models import Model


def make_optimizer(
    config: OptimizerSection, total_updates: int, model: Model
) -> optax.GradientTransformation:
    """Return an optimizer that clips the gradient norm, then applies AdamW (weight decay: `decay_mask`)."""
    clip = [optax.clip_by_global_norm(config.grad_clip)] if config.grad_clip > 0 else []
    adamw = optax.adamw(
        learning_rate_schedule(config, total_updates),
        b1=config.beta1,
        b2=config.beta2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=decay_mask(model),
    )
    return optax.chain(*clip, adamw)


def learning_rate_schedule(config: OptimizerSection, total_updates: int) -> optax.Schedule:
    """Return a linear warm-up followed by a constant rate, or by a cosine or linear decay to zero."""
    peak, warmup = config.learning_rate, config.warmup_updates
    rest = max(total_updates - warmup, 1)
    after = {
        "constant": optax.constant_schedule(peak),
        "cosine": optax.cosine_decay_schedule(peak, rest),
        "linear": optax.linear_schedule(peak, 0.0, rest),
    }[config.schedule]
    if not warmup:
        return after
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after], [warmup])


def learning_rates(config: OptimizerSection, total_updates: int) -> np.ndarray:
    """Return the learning rate of every update of a run, and at the end that of all later updates."""
    rates = learning_rate_schedule(config, total_updates)(jnp.arange(total_updates + 1))
    return np.broadcast_to(np.asarray(rates, np.float64), (total_updates + 1,))


def decay_mask(model: Model) -> Any:
    """Return a tree of booleans: True for each weight to which weight decay applies."""
    return jax.tree.map(lambda weight: weight.decays, model.weights())
