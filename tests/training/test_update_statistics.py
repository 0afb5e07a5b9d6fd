"""Claims about batch statistics: every objective has the gradient of its update, however the update is split."""

import functools

import jax
import numpy as np
import optax
import pytest
from jax.lax import stop_gradient
from test_update_step import SETTINGS, Bigram, difference, groups, update

from mugrpo_jax import models, objectives, training
from mugrpo_jax.objectives import OBJECTIVES, STATISTICS, ObjectiveConfig

# Gradients may differ only because sums are rounded in another order.
TOLERANCE = 2e-6


def with_proximal(name, objective):
    """Give `decoupled_ppo` a proximal policy between the behavior policy and the policy."""
    if name != "decoupled_ppo":
        return objective
    return lambda logp, behavior, *rest, **more: objective(
        logp, behavior, *rest, **more, proximal_logp=(stop_gradient(logp) + behavior) / 2
    )


@functools.cache
def step_of(name, shape=(1, 1, 1), statistics="update", knobs=()):
    config = ObjectiveConfig(name, dict(knobs))
    mesh = models.make_mesh(
        **dict(zip(("data", "fsdp", "tensor"), shape)), devices=jax.devices()[: np.prod(shape)]
    )
    model = Bigram()
    optimizer = training.make_optimizer(SETTINGS, 10, model)
    with jax.set_mesh(mesh):
        state = training.init_state(models.random_params(model), optimizer, track_drift=False)
        state = jax.device_put(state, training.state_sharding(mesh, model, state))
    step = training.UpdateStep(
        model,
        with_proximal(name, config.build()),
        optimizer,
        mesh,
        training.StepOptions(),
        state=state,
        statistics=config.statistics() if statistics == "update" else None,
        diagnose=False,
    )
    return step, state


def split(tokens, multiple=1):
    return update(tokens, 64, multiple)


def relative(a, b):
    return difference(a, b) / float(optax.tree.norm(b))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_gradient_of_an_update_does_not_depend_on_micro_batches_and_devices(name):
    step, state = step_of(name)
    many, few = split(256), split(768)
    assert len(many.micro_batches) > len(few.micro_batches) > 1
    expected, metrics = step.gradient(state, few)
    found, other = step.gradient(state, many)
    assert relative(found, expected) < TOLERANCE
    for key in metrics:
        np.testing.assert_allclose(other[key], metrics[key], rtol=1e-5, atol=1e-6, err_msg=key)
    spread_step, spread_state = step_of(name, (2, 2, 2))
    spread, _ = spread_step.gradient(spread_state, split(768, multiple=4))
    assert relative(spread, expected) < TOLERANCE
