"""Every objective, value and gradient, against float64 NumPy on ragged batches with ratios from 1e-6 to 1e3.

The tolerance is 1e-6 of the sum of the absolute values of the terms (see `numpy_reference`). For a gradient
of a single term, which is that of most objectives at every token, this is 1e-6 of the gradient itself.
"""

import numpy as np
import pytest
from batches import (
    SHARED_VARIANTS,
    VARIANTS,
    aggregation_of,
    extra_arrays,
    name_of,
    random_batch,
    run,
    shared_arrays,
)
from numpy_reference import reference

from mugrpo_jax.objectives import OBJECTIVES


def compare(variant, batch, **arrays):
    name, knobs = variant
    loss, gradient, metrics = run(variant, batch, **arrays)
    settings = {**knobs, "aggregation": aggregation_of(variant), **arrays, **extra_arrays(name, batch)}
    expected, slopes, scale, slope_scales = reference(name, *batch, **settings)
    assert abs(loss - expected) <= 1e-6 * scale
    np.testing.assert_array_less(np.abs(gradient - slopes), 1e-6 * slope_scales + 1e-30)
    return metrics


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_value_and_gradient(variant):
    for seed in range(4):
        compare(variant, random_batch(seed))


@pytest.mark.parametrize("variant", SHARED_VARIANTS, ids=name_of)
def test_reference_kl_and_entropy(variant):
    batch = random_batch(5)
    metrics = compare(variant, batch, **shared_arrays(batch))
    assert {"reference_kl/tokens", "entropy/tokens"} <= set(metrics)


@pytest.mark.parametrize("variant", [(name, {}) for name in OBJECTIVES], ids=name_of)
def test_advantages_per_token_and_weights(variant):
    logp, behavior_logp, _, mask = random_batch(6)
    random = np.random.default_rng(6)
    advantages = random.standard_normal(logp.shape).astype(np.float32)
    weights = random.uniform(0, 2, logp.shape).astype(np.float32)
    batch = logp, behavior_logp, advantages, mask
    compare(variant, batch, weights=weights)
