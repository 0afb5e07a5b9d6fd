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


def test_data_that_is_always_fresh_has_no_limit_of_a_stage():
    report = staleness_report(lag=0, learning_rate=1e-6, updates=100)
    assert (report["lag_times_rate"], report["binding"]) == (0, "horizon")
    np.testing.assert_allclose(report["largest_learning_rate"], UNPROTECTED_GRPO.horizon / 100)


def test_a_share_of_signal_below_zero_counts_as_zero():
    """`signal_share` may estimate such a share by chance."""
    limits = [largest_learning_rate(64, 256, LAW, signal) for signal in (-0.001, 0.0)]
    assert limits[0] == limits[1]


@pytest.mark.parametrize(
    "run, message",
    [
        ((4, 1e-6, 100, 200), r"runs\[1\].collapse is 200; possible: 1 to 100, or None"),
        ((4, 1e-6, 100, 0), r"runs\[1\].collapse is 0"),
        ((4, -1e-6, 100, 20), r"runs\[1\].learning_rate is -1e-06; possible: a number above 0"),
        ((-4, 1e-6, 100, 20), r"runs\[1\].lag is -4"),
    ],
)
def test_runs_that_cannot_be_are_refused(run, message):
    with pytest.raises(ValueError, match=message):
        fit_staleness([(4, 1e-6, 100, 32), run])


def test_measured_constants():
    assert update_size([2e-4, 1e-4, 6e-4], [1e-6, 1e-6, 2e-6]) == pytest.approx(200)
    assert drift_at_level([0.0, 1.0, 2.0], [0.0, 0.1, 0.3], 0.2) == pytest.approx(1.5)
    assert drift_at_level([0.5, 1.0], [0.3, 0.4], 0.2) == 0.5
    assert drift_at_level([0.0, 1.0], [0.0, 0.1], 0.2) == math.inf
    assert drift_at_level([0.0, 0.5, 1.0, 2.0], [0.0, math.nan, 0.1, 0.3], 0.2) == pytest.approx(1.5)
    assert update_size([1e-4, math.nan, 3e-4], 1e-6) == pytest.approx(200)
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
    wrong = fit.runs_on_the_wrong_side
    assert wrong.lag_times_rate == wrong.stage_drift == 0 < min(wrong.rate, wrong.root_lag_times_rate)
    assert fit.too_stale + fit.at_horizon == sum(run.collapse is not None for run in runs)


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
    assert fit_staleness(lucky).runs_on_the_wrong_side.lag_times_rate == 1
    with pytest.raises(ValueError, match="runs is empty"):
        fit_staleness([])


def test_fit_says_when_the_learning_rate_alone_decides():
    runs = [
        FinishedRun(lag, rate, 512, 20 if rate > 2e-5 else None)
        for lag in (16, 128, 512)
        for rate in (1e-6, 1e-5, 3e-5)
    ]
    wrong = fit_staleness(runs).runs_on_the_wrong_side
    # By S·η: 16 · 3e-5 collapsed below 512 · 1e-5 and 128 · 1e-5, which did not. By √S·η: below the first.
    assert (wrong.rate, wrong.root_lag_times_rate, wrong.lag_times_rate) == (0, 1, 2)


def test_a_collapse_that_looks_too_stale_is_at_the_horizon_if_noise_dominates():
    runs = [
        FinishedRun(lag, rate, 512, 21 if rate > 2e-5 else None)
        for lag in (16, 128, 512)
        for rate in (1e-6, 1e-5, 3e-5)
    ]
    straight, noise = fit_staleness(runs), fit_staleness(runs, signal=0.0)
    # By t·η the collapses (6.3e-4) are far below what the runs at 1e-5 survive (5.1e-3).
    assert (straight.too_stale, straight.at_horizon) == (3, 0)
    # By √t·η they are near it: 1.37e-4 and 2.26e-4.
    assert (noise.too_stale, noise.at_horizon) == (0, 3)
    assert noise.constants.horizon == pytest.approx(3e-5 * math.sqrt(21))
    assert noise.stale_interval == (pytest.approx(3e-5 * math.sqrt(512)), math.inf)


def test_the_general_limit_is_the_law_of_the_paper_for_signal_and_its_root_for_noise():
    for lag in (1, 7, 100, 1024):
        paper = min(LAW.stale / lag, LAW.horizon / 2000)
        assert largest_learning_rate(lag, 2000, LAW, signal=1.0, momentum=0.9) == paper
        noise = min(LAW.stale / math.sqrt(lag), LAW.horizon / math.sqrt(2000))
        assert largest_learning_rate(lag, 2000, LAW, signal=0.0) == pytest.approx(noise)
    # The horizon binds up to S = T / 20 for signal, but only up to S = T / 400 for noise.
    assert [binding_constraint(50, 2000, LAW, signal) for signal in (1.0, 0.0)] == ["horizon", "stale"]


def test_equal_products_are_not_told_apart_by_their_last_digit():
    assert 10 * 1e-6 != 1 * 1e-5
    runs = [FinishedRun(10, 1e-6, 100), FinishedRun(1, 1e-5, 100, 2), FinishedRun(9, 1e-6, 99)]
    fit = fit_staleness(runs)
    assert (
        fit.stale_interval == pytest.approx((9e-6, 1e-5)) and fit.runs_on_the_wrong_side.lag_times_rate == 1
    )


def test_gradient_cosine():
    a = {"w": jnp.array([[3.0, 0.0]]), "b": jnp.array([4.0], jnp.bfloat16)}
    b = {"w": jnp.array([[0.0, 5.0]]), "b": jnp.array([12.0], jnp.bfloat16)}
    np.testing.assert_allclose(gradient_cosine(a, a), 1, rtol=1e-6)
    np.testing.assert_allclose(gradient_cosine(a, b), 48 / (5 * 13), rtol=1e-6)
    assert gradient_cosine(a, {"w": jnp.zeros((1, 2)), "b": jnp.zeros(1)}) == 0
    np.testing.assert_allclose(
        gradient_cosine({"w": jnp.array([1e-15])}, {"w": jnp.array([-1e-15])}), -1, rtol=1e-5
    )
