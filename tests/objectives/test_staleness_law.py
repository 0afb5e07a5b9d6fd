"""The staleness law and the fit of its constants."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from mugrpo_jax.objectives import (
    UNPROTECTED_GRPO,
    FinishedRun,
    StalenessConstants,
    binding_constraint,
    drift_at_level,
    fit_staleness,
    gradient_cosine,
    largest_learning_rate,
    staleness_constants,
    staleness_report,
    update_size,
)

LAW = StalenessConstants(stale=2e-4, horizon=4e-3)


def test_the_limit_is_stale_for_large_lags_and_independent_of_them_for_small_ones():
    limits = {lag: largest_learning_rate(lag, 1000, LAW) for lag in (1, 10, 100, 1000)}
    assert limits[1] == limits[10] == 4e-6
    np.testing.assert_allclose([100 * limits[100], 1000 * limits[1000]], LAW.stale)
    assert [binding_constraint(lag, 1000, LAW) for lag in limits] == ["horizon", "horizon", "stale", "stale"]


def test_report_of_the_published_setting():
    report = staleness_report(lag=1024, learning_rate=1e-6, updates=4096)
    assert report["lag_times_rate"] == 1024 * 1e-6
    assert report["updates_times_rate"] == 4096 * 1e-6
    assert report["binding"] == "stale"
    np.testing.assert_allclose(report["largest_learning_rate"], UNPROTECTED_GRPO.stale / 1024)
    np.testing.assert_allclose(report["share_of_limit"], 640)


def test_measured_constants():
    assert update_size([2e-4, 1e-4, 6e-4], [1e-6, 1e-6, 2e-6]) == pytest.approx(200)
    assert drift_at_level([0.0, 1.0, 2.0], [0.0, 0.1, 0.3], 0.2) == pytest.approx(1.5)
    assert drift_at_level([0.5, 1.0], [0.3, 0.4], 0.2) == 0.5
    assert drift_at_level([0.0, 1.0], [0.0, 0.1], 0.2) == math.inf
    assert staleness_constants(200.0, 0.04, 0.8) == pytest.approx(LAW)


@pytest.mark.parametrize("law", [LAW, UNPROTECTED_GRPO])
def test_fit_recovers_the_law_from_a_grid(law):
    """Runs that obey the law: too stale ones collapse early, the others at the horizon if they get there."""
    random = np.random.default_rng(0)
    runs = []
    for lag in (1, 4, 16, 64, 256, 1024):
        for rate in np.geomspace(1e-3, 10, 9) * law.stale / 64:
            updates = 0.3 * law.horizon / law.stale * 1024
            at_horizon = law.horizon / rate * random.uniform(0.9, 1.1)
            if lag * rate > law.stale:
                runs.append(FinishedRun(lag, rate, updates, min(at_horizon / 4, updates / 10)))
            else:
                runs.append(FinishedRun(lag, rate, updates, at_horizon if at_horizon < updates else None))
    fit = fit_staleness(runs)
    low, high = fit.stale_interval
    assert low <= law.stale <= high
    assert high / low < 4
    assert low <= fit.constants.stale <= high
    assert fit.constants.horizon == pytest.approx(law.horizon, rel=0.1)
    assert fit.horizon_interval[0] <= law.horizon <= fit.horizon_interval[1]
    assert fit.misplaced == 0 < fit.misplaced_by_rate


def test_fit_says_what_the_table_cannot_tell():
    survivors = fit_staleness([FinishedRun(4, 1e-6, 100), FinishedRun(8, 1e-6, 200)])
    assert survivors.stale_interval == (8e-6, math.inf)
    assert survivors.constants == pytest.approx((8e-6, 2e-4))
    assert survivors.horizon_interval[1] == math.inf
    hopeless = fit_staleness([FinishedRun(64, 1e-6, 100, 5), FinishedRun(1, 1e-6, 100, 90)])
    assert hopeless.stale_interval == pytest.approx((1e-6, 64e-6))
    assert hopeless.constants == pytest.approx((8e-6, 9e-5))


def test_fit_tolerates_a_run_on_the_wrong_side():
    clean = [FinishedRun(lag, 1e-6, 100, None if lag < 30 else 5) for lag in (1, 2, 4, 8, 16, 32, 64, 128)]
    lucky = [*clean, FinishedRun(100, 1e-6, 100, None)]
    assert fit_staleness(lucky).stale_interval == pytest.approx((16e-6, 32e-6))
    assert fit_staleness(lucky).misplaced == 1
    with pytest.raises(ValueError, match="runs is empty"):
        fit_staleness([])


def test_fit_says_when_the_learning_rate_alone_decides():
    runs = [
        FinishedRun(lag, rate, 512, 20 if rate > 2e-5 else None)
        for lag in (16, 128, 512)
        for rate in (1e-6, 1e-5, 3e-5)
    ]
    fit = fit_staleness(runs)
    assert fit.misplaced_by_rate == 0
    # By S·η: 16 · 3e-5 collapsed below 512 · 1e-5, which did not.
    assert fit.misplaced == 2


def test_equal_products_are_not_told_apart_by_their_last_digit():
    assert 10 * 1e-6 != 1 * 1e-5
    runs = [FinishedRun(10, 1e-6, 100), FinishedRun(1, 1e-5, 100, 2), FinishedRun(9, 1e-6, 99)]
    fit = fit_staleness(runs)
    assert fit.stale_interval == pytest.approx((9e-6, 1e-5)) and fit.misplaced == 1


def test_gradient_cosine():
    a = {"w": jnp.array([[3.0, 0.0]]), "b": jnp.array([4.0], jnp.bfloat16)}
    b = {"w": jnp.array([[0.0, 5.0]]), "b": jnp.array([12.0], jnp.bfloat16)}
    np.testing.assert_allclose(gradient_cosine(a, a), 1, rtol=1e-6)
    np.testing.assert_allclose(gradient_cosine(a, b), 48 / (5 * 13), rtol=1e-6)
    assert gradient_cosine(a, {"w": jnp.zeros((1, 2)), "b": jnp.zeros(1)}) == 0
    np.testing.assert_allclose(
        gradient_cosine({"w": jnp.array([1e-15])}, {"w": jnp.array([-1e-15])}), -1, rtol=1e-5
    )
