"""The staleness law in two regimes: predicted drift, its fit, and the advised learning rate."""

import math

import numpy as np
import pytest

from mugrpo_jax.objectives import (
    StalenessConstants,
    advise_learning_rate,
    drift,
    drift_exponent,
    effective_updates,
    fit_drift,
    largest_learning_rate,
    random_walk_drift,
    regime,
    updates_until_drift,
    updates_until_signal,
)


def test_the_drift_by_hand():
    # 8 updates of length 0.1, a quarter of their power common: 0.1 · √(8 · 0.75 + 64 · 0.25) = 0.1 · √22.
    assert drift(8, 0.01, 10.0, 0.25) == pytest.approx(0.1 * math.sqrt(22))
    np.testing.assert_allclose(drift([1, 4, 9], 0.01, 10.0, 0.0), [0.1, 0.2, 0.3])
    np.testing.assert_allclose(drift([1, 4, 9], 0.01, 10.0, 1.0, momentum=0.9), [0.1, 0.4, 0.9])
    # Momentum ½ and noise only: two steps correlate by ½, so the power of their sum is 1 + 1 + 2 · ½ = 3.
    assert effective_updates(2, 0.0, 0.5) == pytest.approx(math.sqrt(3))
    # The first step of a run is a whole gradient. Later steps have (1 − ½)/(1 + ½) = ⅓ of its power.
    assert effective_updates(1, 0.0, 0.5, first_stage=True) == pytest.approx(math.sqrt(3))
    # The second is (⅓, ⅔) of two gradients, so that the sum is (4/3, 2/3) of them: 3 · 20/9.
    assert effective_updates(2, 0.0, 0.5, first_stage=True) == pytest.approx(math.sqrt(3 * 20 / 9))
    np.testing.assert_allclose(effective_updates(np.arange(1, 40), 0.0, 0.9), random_walk_drift(39, 0.9))


def test_the_crossover_does_not_depend_on_momentum():
    turn = updates_until_signal(1e-4)
    assert turn == pytest.approx(9999)
    for momentum in (0.0, 0.9):  # at the crossover, signal and noise have the same power
        noise, signal = (effective_updates(turn, c, momentum) for c in (0.0, 1e-4))
        assert signal / noise == pytest.approx(math.sqrt(2), rel=0.003)


def test_regimes():
    assert [regime(lag, 0.2) for lag in (1, 2, 15, 16)] == ["noise", "between", "between", "ballistic"]
    assert regime(4096, 0.0) == regime(4096, -0.01) == "noise" and regime(1, 1.0) == "ballistic"
    # The growth of the drift at both borders.
    for lag, power in ((0.25, 0.6), (4.0, 0.9)):
        near = drift(np.array([0.999, 1.001]) * lag * updates_until_signal(1e-3), 1.0, 1.0, 1e-3)
        assert np.diff(np.log(near))[0] / np.log(1.001 / 0.999) == pytest.approx(power, abs=1e-3)
    with pytest.raises(ValueError, match="signal is nan"):
        regime(4, math.nan)
    with pytest.raises(ValueError, match=r"signal is 1\.5; possible: a share between 0 and 1"):
        effective_updates(4, 1.5)
    with pytest.raises(ValueError, match="updates is -3"):
        effective_updates(-3, 0.5)
    with pytest.raises(ValueError, match="momentum is 1"):
        effective_updates(4, 0.5, 1.0)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("share", [0.0, 0.003, 0.05])
def test_a_simulated_walk_gives_back_its_signal_and_size(share, momentum):
    """Gradients with a known signal, averaged as Adam does, from the first update on and from a later one."""
    random = np.random.default_rng(0)
    size, rate, updates = 4000, 1e-3, 300
    gradients = math.sqrt(1 - share) * random.standard_normal((100 + updates, size)) + math.sqrt(share)
    average, steps = np.zeros(size), []
    for update, gradient in enumerate(gradients, start=1):
        average = momentum * average + (1 - momentum) * gradient
        steps.append(rate * average / (1 - momentum**update))
    later = np.linalg.norm(steps[-updates:], axis=1)
    for first_stage, kept in ((False, steps[100:]), (True, steps[:updates])):
        moved = np.linalg.norm(np.cumsum(kept, axis=0), axis=1)
        fit = fit_drift(moved, rate, momentum=momentum, first_stage=first_stage)
        assert fit.signal == pytest.approx(share, abs=0.0015 + 0.1 * share)
        assert fit.update_size == pytest.approx(np.median(later) / rate, rel=0.06)
        assert fit.error < 0.06
        exact = effective_updates(np.arange(1, updates + 1), share, momentum, first_stage=first_stage)
        assert fit.exponent == pytest.approx(drift_exponent(exact), abs=0.03)
        if share == momentum == 0:
            assert fit.exponent == pytest.approx(0.5, abs=0.02)
        # A quarter of the stage predicts its end.
        early = fit_drift(moved[: updates // 4], rate, momentum=momentum, first_stage=first_stage)
        told = drift(updates, rate, early.update_size, early.signal, momentum, first_stage=first_stage)
        assert told == pytest.approx(moved[-1], rel=0.25)


def test_a_drift_slower_than_a_random_walk_has_no_signal():
    fit = fit_drift([1.0, 2**0.3, math.nan, 4**0.3, 0.0], 1.0)
    assert fit.signal == 0 and fit.exponent == pytest.approx(0.3, abs=0.01) and fit.error > 0.05
    with pytest.raises(ValueError, match="drift has 1 usable points"):
        fit_drift([0.1, math.nan], 1.0)


def test_the_time_until_a_drift():
    assert updates_until_drift(1.0, 0.01, 10.0, 0.0) == 100
    assert updates_until_drift(1.0, 0.01, 10.0, 1.0) == 10
    assert updates_until_drift(1.0, 0.01, 10.0, 0.0, most=99) == math.inf


def test_the_advice_names_the_bound_and_the_regime():
    def advise(signal, critical=math.inf, batch=0.5, lag=100):
        return advise_learning_rate(lag, 900, signal, 50.0, batch, critical)

    # 0.5 / (50 · √100) and 0.5 / (50 · 100)
    assert advise(0.0) == (pytest.approx(1e-3), "stage", "noise", pytest.approx(1e-3), math.inf)
    assert advise(1.0) == (pytest.approx(1e-4), "stage", "ballistic", pytest.approx(1e-4), math.inf)
    assert advise(-0.01) == advise(0.0)
    # 1.2 / (50 · √900) is below that of the stage.
    assert advise(0.0, 1.2)[:2] == (pytest.approx(8e-4), "run")
    assert advise(0.0, math.inf, math.inf)[:2] == (math.inf, "none")
    # In both limits the advice is the law with the constants R / G.
    for signal in (0.0, 1.0):
        law = largest_learning_rate(100, 900, StalenessConstants(0.5 / 50, 1.2 / 50), signal)
        assert advise(signal, 1.2).learning_rate == pytest.approx(law)
    # Advice for data ten times as old: a tenth of the rate if ballistic, 1/√10 if noise.
    assert advise(0.0).learning_rate / advise(0.0, lag=1000).learning_rate == pytest.approx(math.sqrt(10))
