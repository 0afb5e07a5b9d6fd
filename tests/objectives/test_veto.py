"""The negative-advantage veto: the exact set of vetoed tokens, and what it leaves alone."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mugrpo_jax.objectives import VETO_SCOPES, mu_grpo, sequence_veto_mask, veto_mask, veto_metrics

FAR = 5e-5  # a trigger at the default threshold of 1e-4


def vetoed(ratio, advantages, mask=None, **knobs):
    """The set of vetoed positions of each response."""
    log_ratio = np.log(np.asarray(ratio, np.float32))
    mask = np.ones_like(log_ratio) if mask is None else np.asarray(mask)
    keep = np.asarray(veto_mask(log_ratio, np.asarray(advantages, np.float32), mask, **knobs))
    assert not keep[mask == 0].any()
    return [set(np.flatnonzero((m != 0) & ~k).tolist()) for m, k in zip(mask, keep)]


CASES = {
    "no trigger": ([0.9, 1.1, 2e-4, 0.8, 1.0, 1.2], {}),
    "first token": (
        [FAR, 1, 1, 1, 1, 1],
        {
            "trigger": {0},
            "suffix": {1, 2, 3, 4, 5},
            "suffix_non_trigger": {1, 2, 3, 4, 5},
            "sequence": set(range(6)),
        },
    ),
    "last token": ([1, 1, 1, 1, 1, FAR], {"trigger": {5}, "sequence": set(range(6))}),
    "several triggers": (
        [0.9, 1.1, 5e-5, 0.8, 2e-5, 1.2],
        {"trigger": {2, 4}, "suffix": {3, 4, 5}, "suffix_non_trigger": {3, 5}, "sequence": set(range(6))},
    ),
    "all triggers": (
        [FAR] * 6,
        {"trigger": set(range(6)), "suffix": {1, 2, 3, 4, 5}, "sequence": set(range(6))},
    ),
}


@pytest.mark.parametrize("scope", VETO_SCOPES)
@pytest.mark.parametrize("case", CASES)
def test_the_exact_set(case, scope):
    ratio, expected = CASES[case]
    same_ratios = [ratio, ratio, ratio]
    assert vetoed(same_ratios, [-1.0, 1.0, 0.0], scope=scope) == [expected.get(scope, set()), set(), set()]


@pytest.mark.parametrize("scope", VETO_SCOPES)
def test_triggers_on_padding_are_none(scope):
    """Padding before and behind the response, full of triggers, changes nothing."""
    ratio = [[FAR, 1, FAR, 1, 1, FAR], [FAR, 1, 1, 1, FAR, FAR]]
    mask = [[0, 1, 1, 1, 1, 0], [0, 1, 1, 1, 0, 0]]
    expected = {"trigger": {2}, "suffix": {3, 4}, "suffix_non_trigger": {3, 4}, "sequence": {1, 2, 3, 4}}
    assert vetoed(ratio, [-1.0, -1.0], mask, scope=scope) == [expected.get(scope, set()), set()]


@pytest.mark.parametrize("scope", VETO_SCOPES)
def test_advantages_per_token(scope):
    """Only tokens of negative advantage trigger, and only they are vetoed."""
    ratio, advantages = [[FAR, 1, FAR, 1, 1, 1]], [[1, 1, -1, 1, -1, -1]]
    expected = {"trigger": {2}, "suffix": {4, 5}, "suffix_non_trigger": {4, 5}, "sequence": {2, 4, 5}}
    assert vetoed(ratio, advantages, scope=scope) == [expected.get(scope, set())]


def test_the_threshold_itself_does_not_trigger():
    log_ratio = jnp.array([[math.log(1e-4), 0.0]])
    assert veto_mask(log_ratio, jnp.array([-1.0]), jnp.ones((1, 2))).all()
    below = veto_mask(log_ratio - 1e-5, jnp.array([-1.0]), jnp.ones((1, 2)))
    assert below.tolist() == [[True, False]]


def test_a_vetoed_token_leaves_the_denominator_alone():
    """Of six terms three are vetoed: the others keep their sixth, the vetoed ones get exactly nothing."""
    logp = jnp.log(jnp.array([[0.9, 1.1, 5e-5, 0.8, 2e-5, 1.2]]))
    batch = (jnp.zeros((1, 6)), jnp.array([-1.0]), jnp.ones((1, 6)))
    (loss, metrics), gradient = jax.jit(jax.value_and_grad(mu_grpo, has_aux=True))(logp, *batch)
    np.testing.assert_allclose(loss, (0.9 + 1.1 + 5e-5) / 6, rtol=1e-6)
    np.testing.assert_allclose(gradient[0], np.array([0.9, 1.1, 5e-5, 0, 0, 0]) / 6, rtol=2e-6, atol=0)
    assert metrics["vetoed/tokens"] == 0.5


def test_metrics():
    ratio = jnp.array([[1, FAR, 1, FAR], [1, 1, 1, 1], [FAR, 1, 1, 1], [1, 1, FAR, 9]])
    mask = jnp.array([[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1], [0, 1, 1, 0]])
    advantages = jnp.array([-1.0, -1.0, 1.0, -1.0])
    log_ratio = jnp.log(ratio)
    metrics = veto_metrics(log_ratio, advantages, mask, veto_mask(log_ratio, advantages, mask))
    assert metrics["negative_responses"] == 3
    assert metrics["triggered_responses"] == 2
    np.testing.assert_allclose(metrics["triggered/negative_responses"], 2 / 3, rtol=1e-6)
    np.testing.assert_allclose(metrics["vetoed/tokens"], 2 / 14, rtol=1e-6)
    # One of four tokens lies before the first trigger, and one of two.
    np.testing.assert_allclose(
        metrics["trigger_position/triggered_responses"], (1 / 4 + 1 / 2) / 2, rtol=1e-6
    )


def test_sequence_veto_ignores_the_sign():
    log_ratio = jnp.log(jnp.array([[1, FAR, 1], [1, 1, 1], [1, 1, FAR]]))
    mask = jnp.array([[1, 1, 1], [1, 1, 1], [1, 1, 0]])
    assert sequence_veto_mask(log_ratio, mask).tolist() == [[False] * 3, [True] * 3, [True, True, False]]
