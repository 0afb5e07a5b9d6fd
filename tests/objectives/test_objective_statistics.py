"""Advantages, corrections, moments, KL estimates, diagnostics, denominators and combined metrics."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import SHAPE, random_batch
from hypothesis import given, settings
from hypothesis import strategies as st

from mugrpo_jax import objectives

REWARDS = np.array([[1.0, 0.0, 0.0, 1.0, 0.5], [0.9] * 5, [3.0, 1.0, 2.0, -1.0, 0.0]])


def test_group_advantages_of_each_kind():
    centred = REWARDS - REWARDS.mean(axis=1, keepdims=True)
    others = (REWARDS.sum(axis=1, keepdims=True) - REWARDS) / 4
    expected = {
        "std": centred / (REWARDS.std(axis=1, ddof=1, keepdims=True) + 1e-6),
        "mean": centred,
        "rloo": REWARDS - others,
        "batch_std": centred / (REWARDS.std(ddof=1) + 1e-6),
    }
    for kind in objectives.ADVANTAGE_KINDS:
        advantages = objectives.group_advantages(REWARDS, kind=kind)
        np.testing.assert_allclose(advantages[::2], expected[kind][::2], rtol=2e-6, atol=1e-7)
        assert np.all(advantages[1] == 0), "equal rewards, although their float32 mean is not 0.9"
    assert objectives.equal_groups(REWARDS).tolist() == [False, True, False]


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(0, 1000), st.floats(0.1, 10), st.floats(-5, 5))
def test_group_advantages_ignore_shift_and_scale(seed, scale, shift):
    rewards = np.random.default_rng(seed).uniform(0, 1, (3, 5))
    plain = objectives.group_advantages(rewards, eps=0.0)
    moved = objectives.group_advantages(scale * rewards + shift, eps=0.0)
    np.testing.assert_allclose(moved, plain, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(plain.sum(axis=1), 0, atol=1e-5)


def test_corrections():
    ratio = np.array([[0.5, 3.0, 1.0, 9.0], [2.0, 2.0, 2.0, 0.01]])
    mask = np.array([[1, 1, 1, 0], [1, 1, 1, 1]])
    log_ratio = np.log(ratio)
    np.testing.assert_allclose(
        objectives.tis_weights(log_ratio, mask), [[0.5, 2, 1, 0], [2, 2, 2, 0.01]], rtol=1e-6
    )
    np.testing.assert_allclose(
        objectives.tis_weights(log_ratio, mask, level="sequence"), [[1.5, 1.5, 1.5, 0], [0.08] * 4], rtol=1e-6
    )
    assert objectives.mis_mask(log_ratio, mask).astype(int).tolist() == [[1, 0, 1, 0], [1, 1, 1, 0]]
    sequence = objectives.mis_mask(log_ratio, mask, level="sequence")
    assert sequence.astype(int).tolist() == [[1, 1, 1, 0], [0, 0, 0, 0]]
    assert objectives.icepop_mask(log_ratio, mask).astype(int).tolist() == [[1, 1, 1, 0], [1, 1, 1, 0]]
    # mean(−l) is −log(1.5)/3 = −0.135 and −log(0.08)/4 = 0.631.
    for delta, kept in ((0.6, [1, 0]), (0.7, [1, 1])):
        keep = objectives.opsm_mask(log_ratio, np.array([-1.0, -1.0]), mask, delta=delta)
        assert keep.astype(int).tolist() == (np.array(kept)[:, None] * mask).tolist()
    assert objectives.opsm_mask(log_ratio, np.array([-1.0, 1.0]), mask, delta=0.6).sum() == 7


def test_corrections_use_only_the_tokens_of_one_response():
    """So they need no statistics of the whole update, unlike the objectives in `STATISTICS`."""
    logp, behavior_logp, advantages, mask = random_batch(2)
    log_ratio, part = logp - behavior_logp, (np.arange(SHAPE[0]) % 2 == 0)[:, None]
    for correct in (
        objectives.tis_weights,
        objectives.mis_mask,
        objectives.icepop_mask,
        objectives.sequence_veto_mask,
        *(functools.partial(objectives.tis_weights, level=level) for level in ("sequence", "geometric")),
        lambda x, m: objectives.opsm_mask(x, advantages, m, delta=0.1),
        lambda x, m: objectives.veto_mask(x, advantages, m),
    ):
        alone, together = np.asarray(correct(log_ratio, mask & part)), np.asarray(correct(log_ratio, mask))
        np.testing.assert_array_equal(alone, np.where(part, together, 0))
        assert together.any()


def test_sequence_weights_survive_long_responses():
    log_ratio = np.array([[80.0] * 50, [-80.0] * 50])
    weights = objectives.tis_weights(log_ratio, np.ones((2, 50)), level="sequence")
    assert weights[:, 0].tolist() == [2.0, 0.0]
    assert objectives.sequence_ess(log_ratio, np.ones((2, 50))) == 0.5
    assert objectives.vcpo_factor(log_ratio, np.ones((2, 50))) == np.float32(np.sqrt(0.5))


def test_moments_of_nothing_and_of_overflow():
    log_ratio, empty = np.full((2, 3), 80.0), np.zeros((2, 3))
    assert objectives.effective_sample_size(log_ratio, empty) == 1
    assert objectives.effective_sample_size(log_ratio, np.ones((2, 3))) == 1, "the sum of squares is infinite"
    assert objectives.sequence_ess(log_ratio, empty) == 1
    assert objectives.second_moment(log_ratio, empty) == 0


def test_kl_estimates_agree_in_expectation():
    """For samples of π, k1 and k3 average to the KL divergence exactly; k2 has the KL's gradient."""
    policy, reference = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
    x = np.log(policy / reference)
    kl = np.sum(policy * x)
    for estimator in ("k1", "k3"):
        np.testing.assert_allclose(np.sum(policy * objectives.kl_estimate(x, estimator)), kl, rtol=1e-6)
    slope = jax.vmap(jax.grad(lambda y: objectives.kl_estimate(y, "k2")))(jnp.asarray(x))
    np.testing.assert_allclose(slope, x, rtol=1e-6)


def test_the_gradient_of_k3_never_turns_round():
    """Its exponential has a largest value. Beyond it the gradient still pulls the policy back."""
    slopes = [jax.grad(objectives.kl_estimate)(jnp.float32(x)) for x in (-2.0, -79.0, -81.0, -1e4)]
    np.testing.assert_allclose(slopes[0], 1 - np.exp(2), rtol=1e-6)
    assert all(slope < 0 and np.isfinite(slope) for slope in slopes) and slopes[2] == slopes[3]


def test_overlong_penalty_counts_tokens():
    penalty = objectives.overlong_penalty([0, 3072, 3584, 4096, 4608], max_length=4096, buffer=1024)
    np.testing.assert_allclose(penalty, [0, 0, -0.5, -1, -1.5])


def test_denominators_add_up_and_stay_in_numpy():
    mask = random_batch(1)[3]
    for aggregation in objectives.AGGREGATIONS:
        whole = objectives.denominator(mask, aggregation, max_length=40)
        parts = [
            objectives.denominator(part, aggregation, max_length=40) for part in (mask[:3], mask[3:, :15])
        ]
        assert isinstance(whole, np.generic)
        assert sum(parts) == whole
    assert objectives.denominator(mask, "token_mean") == mask.sum()
    large = objectives.denominator(jnp.ones((4, 2)), "constant", max_length=2**30)
    assert float(large) == 2**32, "more than an integer of JAX can hold"
    assert objectives.denominator(mask, "seq_mean_token_sum") == SHAPE[0] - 1, "an empty row is padding"


def test_the_square_of_a_large_reward_does_not_overflow():
    rewards = np.array([[0.0, 1e20, 2e20, 1e30], [1e30, 0.0, 0.0, 1e30]], np.float32)
    for kind in objectives.ADVANTAGE_KINDS:
        advantages = objectives.group_advantages(rewards, kind=kind)
        scaled = objectives.group_advantages(rewards * np.float32(1e-30), kind=kind, eps=1e-36)
        assert advantages.dtype == np.float32 and np.abs(advantages).max() > 0
        scale = np.float32(1e30 if kind in ("mean", "rloo") else 1)
        np.testing.assert_allclose(advantages, scale * scaled, rtol=1e-5)


@pytest.fixture(scope="module")
def diagnose():
    return jax.jit(objectives.diagnostics)


def _around_triggers(log_ratio, advantages, mask):
    """The diagnostics about triggers, response by response."""
    before, behind, pull, pull_behind, right = [], [], 0.0, 0.0, []
    for ratio, advantage, valid in zip(np.exp(log_ratio), advantages, mask):
        ratio = ratio[valid]
        triggers = np.flatnonzero(ratio < 1e-4)
        if advantage > 0 and len(ratio):
            right.append(len(triggers) > 0)
        if advantage < 0:
            pull += abs(advantage) * ratio.sum()
            if len(triggers):
                before += [*ratio[: triggers[0]]]
                behind += [*ratio[triggers[0] + 1 :]]
                pull_behind += abs(advantage) * ratio[triggers[0] + 1 :].sum()
    return {
        "positive_responses": len(right),
        "abandoned/positive_responses": np.mean(right),
        "before_abandoned_tokens": len(before),
        "behind_abandoned_tokens": len(behind),
        "ratio/before_abandoned_tokens": np.mean(before),
        "ratio/behind_abandoned_tokens": np.mean(behind),
        "negative_pull": pull,
        "behind_abandoned/negative_pull": pull_behind / pull,
    }


@pytest.mark.parametrize("seed", range(3))
def test_diagnostics_against_numpy(seed, diagnose):
    logp, behavior_logp, advantages, mask = random_batch(seed)
    found = {key: float(value) for key, value in diagnose(logp, behavior_logp, advantages, mask).items()}
    log_ratio = (logp.astype(np.float64) - behavior_logp)[mask]
    ratio = np.exp(log_ratio)
    sign = np.repeat(np.sign(advantages)[:, None], SHAPE[1], axis=1)[mask]
    expected = {
        "tokens": mask.sum(),
        "responses": mask.any(axis=1).sum(),
        "ess/tokens": ratio.sum() ** 2 / (ratio**2).sum() / len(ratio),
        "second_moment/tokens": np.mean(log_ratio**2),
        "k1/tokens": np.mean(-log_ratio),
        "k3/tokens": np.mean(ratio - 1 - log_ratio),
        "ratio_min": ratio.min(),
        "ratio_max": ratio.max(),
        "ratio/tokens": ratio.mean(),
        "negative_responses": (mask.any(axis=1) & (advantages < 0)).sum(),
    }
    for name, chosen in (("positive_tokens", ratio[sign > 0]), ("negative_tokens", ratio[sign < 0])):
        expected[name] = len(chosen)
        expected[f"ratio/{name}"] = chosen.mean()
        for key, level in (("p05", 0.05), ("p50", 0.5), ("p95", 0.95)):
            expected[f"ratio_{key}/{name}"] = np.quantile(chosen, level, method="nearest")
    totals = np.where(mask, logp.astype(np.float64) - behavior_logp, 0).sum(axis=1)[mask.any(axis=1)]
    weights = np.exp(totals - totals.max())
    expected["sequence_ess/responses"] = weights.sum() ** 2 / (weights**2).sum() / len(weights)
    wrong = np.where(mask & (advantages < 0)[:, None], logp.astype(np.float64) - behavior_logp, 0)
    abandoned = (wrong < np.log(1e-4)).any(axis=1).sum()
    expected["abandoned/negative_responses"] = abandoned / expected["negative_responses"]
    expected |= _around_triggers(np.where(mask, logp.astype(np.float64) - behavior_logp, 0), advantages, mask)
    for band in (0.001, 0.01, 0.05):
        expected[f"within_{band}/tokens"] = np.mean(np.abs(ratio - 1) <= band)
    for key, value in expected.items():
        np.testing.assert_allclose(found.pop(key), value, rtol=1e-5, err_msg=key)
    assert not found


def test_diagnostics_of_micro_batches_combine(diagnose):
    batch = random_batch(5)
    rows = np.arange(SHAPE[0])[:, None]
    whole = diagnose(*batch)
    parts = [diagnose(*batch[:3], batch[3] & (rows % 3 == k)) for k in range(3)]
    combined = objectives.combine_metrics(parts)
    averages = {key for key in whole if "sequence_ess/" in key or key.startswith("ratio_p")}
    for key in set(whole) - averages:
        np.testing.assert_allclose(combined[key], whole[key], rtol=1e-5, atol=1e-7, err_msg=key)
    assert len(averages) == 7


def test_metrics_that_do_not_belong_together_are_refused(diagnose):
    whole = diagnose(*random_batch(5))
    with pytest.raises(ValueError, match="'drift' is not in all parts; possible: metrics of one objective"):
        objectives.combine_metrics([whole, whole | {"drift": 1.0}])
    means = {key: value for key, value in whole.items() if "/" in key}
    with pytest.raises(ValueError, match=r"is a mean over '.*', which is not in parts"):
        objectives.combine_metrics([means, means])


def test_triggers_by_sign_and_the_pull_behind_the_first_one(diagnose):
    """Two wrong responses, one with triggers; a right one with a trigger; one of advantage 0."""
    ratio, advantages, mask = np.ones(SHAPE), np.zeros(SHAPE[0]), np.zeros(SHAPE, bool)
    for row, (advantage, values) in enumerate(
        [
            (-0.1, [0.5, 2.0, 5e-5, 0.8, 2e-5]),
            (-0.2, [1.0005, 1.005, 0.96]),
            (1.0, [3.0] * 5 + [5e-5]),
            (0.0, [5e-5] * 6),
        ]
    ):
        advantages[row], ratio[row, : len(values)], mask[row, : len(values)] = advantage, values, True
    found = diagnose(*np.float32([np.log(ratio), np.zeros(SHAPE)]), np.float32(advantages), mask)
    pull = 0.1 * (0.5 + 2.0 + 7e-5 + 0.8) + 0.2 * (1.0005 + 1.005 + 0.96)  # below 1, and a share all the same
    expected = {
        "positive_responses": 1,
        "negative_responses": 2,
        "abandoned/positive_responses": 1.0,
        "abandoned/negative_responses": 0.5,
        "before_abandoned_tokens": 2,
        "behind_abandoned_tokens": 2,
        "ratio/before_abandoned_tokens": 1.25,
        "ratio/behind_abandoned_tokens": (0.8 + 2e-5) / 2,
        "negative_pull": pull,
        "behind_abandoned/negative_pull": 0.1 * (0.8 + 2e-5) / pull,
        "within_0.001/tokens": 1 / 20,
        "within_0.01/tokens": 2 / 20,
        "within_0.05/tokens": 3 / 20,
    }
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, rtol=1e-5, err_msg=key)


def test_combining_is_associative():
    parts = [
        {"tokens": 3.0, "x/tokens": 1.0, "y_min": 2.0, "y_max": 2.0},
        {"tokens": 0.0, "x/tokens": 0.0, "y_min": np.inf, "y_max": -np.inf},
        {"tokens": 1.0, "x/tokens": 5.0, "y_min": 1.0, "y_max": 1.0},
    ]
    at_once = objectives.combine_metrics(parts)
    in_steps = objectives.combine_metrics([objectives.combine_metrics(parts[:2]), parts[2]])
    assert at_once == in_steps == {"tokens": 4.0, "x/tokens": 2.0, "y_min": 1.0, "y_max": 2.0}


@pytest.mark.parametrize("kind", objectives.ADVANTAGE_KINDS)
def test_equal_rewards_give_exactly_zero_even_without_an_eps(kind):
    rewards = jnp.array([[1.0, 1.0], [0.0, 0.0]])
    assert objectives.group_advantages(rewards, kind=kind, eps=0.0).tolist() == [[0.0, 0.0], [0.0, 0.0]]
    mixed = objectives.group_advantages(jnp.array([[1.0, 1.0], [0.0, 1.0]]), kind=kind, eps=0.0)
    assert mixed[0].tolist() == [0.0, 0.0]
    assert mixed[1, 1] == -mixed[1, 0] > 0


def test_effective_sample_size_of_finite_sums_does_not_overflow():
    sums = jnp.array([1e25, 1e34, 1e18])  # the square of the first and the product of the others overflow
    np.testing.assert_allclose(objectives.ess_from_sums(sums), 1e-2, rtol=1e-5)
    assert objectives.ess_from_sums(jnp.array([jnp.inf, jnp.inf, 4.0])) == 1


def test_updates_without_a_learning_rate_say_nothing_of_their_size():
    np.testing.assert_allclose(objectives.update_size([0.0, 2.0, 4.0], [0.0, 0.5, 1.0]), 4.0)
    with pytest.raises(ValueError, match="above 0"):
        objectives.update_size([1.0], 0.0)
