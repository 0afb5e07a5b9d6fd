"""Claims about batch statistics: every objective has the same gradient, however its update is split."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest
from jax.lax import stop_gradient
from test_update_step import SETTINGS, Bigram, difference, groups, update

from mugrpo_jax import models, training
from mugrpo_jax.objectives import OBJECTIVES, STATISTICS, ObjectiveConfig
from mugrpo_jax.rollouts import Update

# Gradients, divided by the norm of the gradient, may differ only because sums are rounded in another order.
TOLERANCE = 1e-6
NAMES = tuple(OBJECTIVES)
SCALE = 65536  # larger than any denominator here
# Ratios here are far from 1. With its default of 0.04, M2PO would clip nearly all tokens in any micro-batch.
KNOBS = {"m2po": {"threshold": 1.0}}


def every_objective(*batch, denominator, **statistics):
    """The loss of objective k if the denominator is `k · SCALE` larger: one program for all objectives."""
    logp, behavior = batch[:2]
    proximal = {"decoupled_ppo": {"proximal_logp": (stop_gradient(logp) + behavior) / 2}}
    index, denominator = denominator // SCALE, denominator % SCALE

    def branch(name, logp):
        keywords = statistics.get(name, {}) | proximal.get(name, {})
        return config_of(name).build()(logp, *batch[1:], denominator=denominator, **keywords)[0]

    branches = [functools.partial(branch, name) for name in NAMES]
    return jax.lax.switch(index.astype(int), branches, logp), {"tokens": batch[3].sum()}


def every_statistic(log_ratio, advantages, mask):
    return {name: config_of(name).statistics()(log_ratio, advantages, mask) for name in STATISTICS}


def config_of(name):
    return ObjectiveConfig(name, KNOBS.get(name, {}))


@functools.cache
def weights():
    return models.random_params(Bigram())


@functools.cache
def step_of(shape=(1, 1, 1), objective=every_objective, statistics=every_statistic, **more):
    axes = dict(zip(("data", "fsdp", "tensor"), shape))
    mesh = models.make_mesh(**axes, devices=jax.devices()[: np.prod(shape)])
    model = Bigram()
    optimizer = training.make_optimizer(SETTINGS, 10, model)
    state = training.make_state(
        jax.tree.map(lambda leaf: leaf.copy(), weights()), optimizer, mesh, model, track_drift=False
    )
    step = training.UpdateStep(
        *(model, objective, optimizer, mesh, training.StepOptions()),
        state=state,
        statistics=statistics,
        **{"diagnose": False} | more,
    )
    return step, state


def sorted_update(devices=1):
    """All rows sorted by length, in micro-batches of 64 tokens for each device."""
    return update(64 * devices, 64, devices)


def halved_update():
    """The same rows in micro-batches of the same shape, but each half of the groups is sorted by itself."""
    halves = [update(64, 64, of=part) for part in (groups()[::2], groups()[1::2])]
    batches = sum((half.micro_batches for half in halves), ())
    return Update(batches, sum(half.denominator for half in halves), {})


def gradient(data, *, name="mu_grpo", **settings):
    step, state = step_of(**settings)
    data = dataclasses.replace(data, denominator=data.denominator + SCALE * NAMES.index(name))
    found, metrics = step.gradient(state, data)
    return jax.device_get(found), metrics


def relative(a, b):
    return difference(a, b) / float(optax.tree.norm(b))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_gradient_of_an_update_does_not_depend_on_micro_batches_and_devices(name):
    expected, _ = gradient(sorted_update(), name=name)
    found, _ = gradient(halved_update(), name=name)
    assert relative(found, expected) < TOLERANCE
    found, _ = gradient(sorted_update(4), name=name, shape=(2, 2, 2))
    assert relative(found, expected) < TOLERANCE


def test_the_statistics_are_those_of_the_update_or_of_each_micro_batch():
    """An update in one micro-batch needs no statistics beforehand, and has the same gradient and metrics."""
    config = ObjectiveConfig("p3o")
    pooled = {"objective": config.build(), "statistics": config.statistics()}
    whole, expected = gradient(update(100_000, 64), **pooled)
    found, metrics = gradient(sorted_update(), **pooled)
    assert relative(found, whole) < TOLERANCE
    assert 0 < metrics["cap/tokens"] < 0.9
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)
    apart, _ = gradient(sorted_update(), objective=config.build(), statistics=None)
    assert relative(apart, whole) > 1e-3
    step, _ = step_of(**pooled)
    programs = step.statistics
    sizes = programs.forward._cache_size(), programs.finish._cache_size()
    assert sizes == (1, 1)  # not compiled for the update in one micro-batch


def test_metrics_of_a_behavior_have_the_statistics_of_the_update():
    config = ObjectiveConfig("p3o")
    step, state = step_of(
        objective=config.build(), statistics=config.statistics(), diagnose=True, behaviors=("a", "b")
    )
    caps = []
    for data in (update(100_000, 64), sorted_update()):  # in one micro-batch, and in several
        numbered = [
            batch | {"behavior": np.arange(len(batch["advantages"])) % 2} for batch in data.micro_batches
        ]
        _, metrics = step.gradient(state, dataclasses.replace(data, micro_batches=tuple(numbered)))
        caps.append([float(metrics[f"cap/tokens{of}"]) for of in ("", "@a", "@b")])
    assert 0 < caps[0][0] < 0.9
    np.testing.assert_allclose(caps, caps[0][0], rtol=1e-5)
