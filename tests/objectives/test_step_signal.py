"""Signal and noise in an update: the cosine of gradients and the growth of the drift."""

import math

import numpy as np
import pytest

from mugrpo_jax.objectives import (
    drift_exponent,
    random_walk_drift,
    signal_share,
    smoothed,
    updates_until_signal,
)


def gradients(share, updates=64, size=20_000, seed=0):
    """Gradients `s + n_k` in which the signal has this share of the power."""
    random = np.random.default_rng(seed)
    direction = random.standard_normal(size)
    signal = direction * math.sqrt(share * size) / np.linalg.norm(direction)
    return signal + random.standard_normal((updates, size)) * math.sqrt(1 - share)


def cosines(found):
    unit = found / np.linalg.norm(found, axis=1, keepdims=True)
    return (unit[1:] * unit[:-1]).sum(axis=1)


@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 1.0])
def test_the_mean_cosine_is_the_share_of_signal(share):
    estimate, error = signal_share(cosines(gradients(share)))
    assert abs(estimate - share) < 3 * error + 0.01
    assert error < 0.003


def test_the_standard_error_is_that_of_many_repetitions():
    found = [signal_share(cosines(gradients(0.3, updates=32, size=500, seed=seed))) for seed in range(200)]
    estimates, errors = np.array(found).T
    assert np.mean(errors) == pytest.approx(estimates.std(), rel=0.25)


def test_few_cosines_say_little():
    assert signal_share([0.4]) == (0.4, math.inf)
    assert signal_share([0.4, math.nan]) == (0.4, math.inf)
    assert math.isnan(signal_share([])[0]) and signal_share([])[1] == math.inf


def test_the_signal_is_half_of_the_drift_when_the_formula_says_so():
    assert updates_until_signal(0.02) == pytest.approx(49)
    moved = np.cumsum(gradients(0.02), axis=0)
    noise = 0.98 * np.arange(1, 65)  # per parameter, k (1 − c); the signal has k² c
    power = (moved**2).mean(axis=1)
    assert power[48] / noise[48] == pytest.approx(2, rel=0.1)
    assert updates_until_signal(-0.1) == math.inf and math.isnan(updates_until_signal(math.nan))


def test_exponents_of_a_random_walk_and_of_a_straight_line():
    drift = [np.linalg.norm(np.cumsum(gradients(share), axis=0), axis=1) for share in (0.0, 0.02, 1.0)]
    exponents = [drift_exponent(d) for d in drift]
    assert exponents[0] == pytest.approx(0.5, abs=0.02) and exponents[2] == pytest.approx(1)
    assert 0.52 < exponents[1] < 0.9


def test_momentum_makes_a_random_walk_look_straighter():
    steps, average = [], np.zeros(20_000)
    for gradient in gradients(0.0, updates=100):  # the first 36 updates fill the average
        average = 0.9 * average + 0.1 * gradient
        steps.append(average)
    drift = np.linalg.norm(np.cumsum(steps[36:], axis=0), axis=1)
    expected = random_walk_drift(64, 0.9)
    np.testing.assert_allclose(drift / drift[-1], expected / expected[-1], rtol=0.06)
    assert drift_exponent(drift) == pytest.approx(drift_exponent(expected), abs=0.03)
    np.testing.assert_allclose(random_walk_drift(3, 0.5), np.sqrt([1, 3, 5.5]))  # 1, 1+1+2·½, +1+2(½+¼)


def test_exponents_of_little_data():
    assert math.isnan(drift_exponent([])) and math.isnan(drift_exponent([1.0, 2.0, 0.0, math.nan]))
    assert drift_exponent([0.0, 2.0, math.nan, 4.0, 5.0]) == pytest.approx(1)


def test_smoothing_keeps_the_length_and_ignores_what_is_not_finite():
    values = [math.nan, 1.0, math.inf, 3.0, 5.0]
    np.testing.assert_allclose(smoothed(values, 2), [math.nan, 1, 1, 3, 4])
    assert smoothed([], 3).shape == (0,)
    with pytest.raises(ValueError, match="window"):
        smoothed([1.0], 0)
