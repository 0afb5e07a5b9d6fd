"""AdamW with clipping, a schedule and a decay mask, from the config."""

from typing import Any

import jax
import optax

from mugrpo_jax.config import OptimizerSection


def make_optimizer(config: OptimizerSection, total_updates: int) -> optax.GradientTransformation:
    """Clip by global norm, then AdamW; norms and biases are not decayed."""
    steps = []
    if config.grad_clip > 0:
        steps.append(optax.clip_by_global_norm(config.grad_clip))
    steps.append(
        optax.adamw(
            learning_rate_schedule(config, total_updates),
            b1=config.beta1,
            b2=config.beta2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            mask=decay_mask,
        )
    )
    return optax.chain(*steps)


def learning_rate_schedule(config: OptimizerSection, total_updates: int) -> optax.Schedule:
    """Linear warm-up, then constant, cosine to zero or linear to zero."""
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


def decay_mask(params: Any) -> Any:
    """True for matrices; vectors, even when stacked over layers, are not decayed."""
    return jax.tree.map_with_path(
        lambda path, _: not str(getattr(path[-1], "key", "")).endswith(("norm", "bias")), params
    )
