"""Every objective on one small batch, worked out by hand, and the published test vectors."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mugrpo_jax import objectives

# Two responses, of three tokens with advantage 1 and of two with advantage −1; the last cell is padding.
RATIO = np.array([[1.5, 1.0, 0.5], [1.5, 0.5, 9.0]])
BEHAVIOR_LOGP = np.full((2, 3), -2.0)
LOGP = np.log(RATIO) + BEHAVIOR_LOGP
ADVANTAGES = np.array([1.0, -1.0])
MASK = np.array([[1, 1, 1], [1, 1, 0]])

TOKENS = np.full((2, 3), 1 / 5)  # token_mean
RESPONSES = np.array([[1 / 6], [1 / 4]])  # seq_mean_token_mean: 1 / (2 · 3) and 1 / (2 · 2)
CONSTANT = np.full((2, 3), 1 / (2 * 3))  # constant, with T as the budget

up, zero, down = LOGP[0]  # log 1.5 − 2, −2, log 0.5 − 2


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def gate(ratio, tau):
    return 4 / tau * sigmoid(tau * (ratio - 1))


def gate_slope(ratio, tau):
    x = tau * (ratio - 1)
    return 4 * sigmoid(x) * sigmoid(-x) * ratio


S_LONG, S_SHORT = 0.75 ** (1 / 3), 0.75 ** (1 / 2)  # geometric means of the ratios of each response
E = 5.0**2 / (6.0 * 5)  # Σ ρ = 5, Σ ρ² = 6
# GMPO: log 1.5 = .405 is clipped at .4 where A > 0, log .5 at −.4 where A < 0.
G_LONG = math.exp((0.4 + math.log(0.5)) / 3)
G_SHORT = math.exp((math.log(1.5) - 0.4) / 2)
# VESPO: both responses have the ratio .75.
PHI_LONG, PHI_SHORT = 0.75**2 * math.exp(3 * 0.25), 0.75**3 * math.exp(2 * 0.25)
ROOT = math.sqrt(2)

# name, knobs, share of each token, objective of each token, its slope in log π. Padding is left out as 0.
CASES = [
    ("mu_grpo", {}, TOKENS, [[1.5, 1, 0.5], [-1.5, -0.5, 0]], [[1.5, 1, 0.5], [-1.5, -0.5, 0]]),
    ("mu_grpo", {"veto_ratio": 2.0}, TOKENS, [[1.5, 1, 0.5], [-1.5, 0, 0]], [[1.5, 1, 0.5], [-1.5, 0, 0]]),
    ("mu_grpo", {"clip_high": 1.4}, TOKENS, [[1.4, 1, 0.5], [-1.5, -0.5, 0]], [[0, 1, 0.5], [-1.5, -0.5, 0]]),
    ("grpo", {}, RESPONSES, [[1.2, 1, 0.5], [-1.5, -0.8, 0]], [[0, 1, 0.5], [-1.5, 0, 0]]),
    ("dr_grpo", {}, CONSTANT, [[1.2, 1, 0.5], [-1.5, -0.8, 0]], [[0, 1, 0.5], [-1.5, 0, 0]]),
    ("dapo", {}, TOKENS, [[1.28, 1, 0.5], [-1.5, -0.8, 0]], [[0, 1, 0.5], [-1.5, 0, 0]]),
    (
        "gspo",
        {},
        RESPONSES,
        [[S_LONG, S_LONG, S_LONG], [-0.9997, -0.9997, 0]],
        [[S_LONG, S_LONG, S_LONG], [0, 0, 0]],
    ),
    (
        "gspo",
        {"level": "token", "clip_low": 0.5},
        RESPONSES,
        [[S_LONG, S_LONG, S_LONG], [-S_SHORT, -S_SHORT, 0]],
        [[S_LONG, S_LONG, S_LONG], [-S_SHORT, -S_SHORT, 0]],
    ),
    (
        "cispo",
        {"clip_high": 1.25},
        TOKENS,
        [[1.25 * up, zero, 0.5 * down], [-1.25 * up, -0.5 * down, 0]],
        [[1.25, 1, 0.5], [-1.25, -0.5, 0]],
    ),
    # Harmful are 1.5 (A > 0) and 0.5 (A < 0): l² = .1644, .4805. Winsorised at the first: .3288 < 2 τ.
    (
        "m2po",
        {"threshold": 0.2},
        TOKENS,
        [[1.5, 1, 0.5], [-1.5, -1 / 1.5, 0]],
        [[1.5, 1, 0.5], [-1.5, 0, 0]],
    ),
    ("m2po", {}, TOKENS, [[1, 1, 0.5], [-1.5, -1, 0]], [[0, 1, 0.5], [-1.5, 0, 0]]),
    (
        "m2po",
        {"threshold": 0.2, "form": "mask"},
        TOKENS,
        [[1.5, 1, 0.5], [-1.5, 0, 0]],
        [[1.5, 1, 0.5], [-1.5, 0, 0]],
    ),
    # The objective includes −(1 − e) K with K = l + 1/ρ − 1.
    (
        "p3o",
        {},
        TOKENS,
        [
            [
                E * up - (1 - E) * (math.log(1.5) + 1 / 1.5 - 1),
                E * zero,
                0.5 * down - (1 - E) * (math.log(0.5) + 2 - 1),
            ],
            [
                -E * up - (1 - E) * (math.log(1.5) + 1 / 1.5 - 1),
                -0.5 * down - (1 - E) * (math.log(0.5) + 2 - 1),
                0,
            ],
        ],
        [
            [E - (1 - E) * (1 - 1 / 1.5), E, 0.5 - (1 - E) * (1 - 2)],
            [-E - (1 - E) * (1 - 1 / 1.5), -0.5 - (1 - E) * (1 - 2), 0],
        ],
    ),
    # Masses 1.2 + 1 + 0.5 = 2.7 and 1.5 + 0.6 = 2.1: the bounds of the start will do.
    ("bapo", {}, TOKENS, [[1.2, 1, 0.5], [-1.5, -0.6, 0]], [[0, 1, 0.5], [-1.5, 0, 0]]),
    # With c_l = 0.8 the negative mass is 2.3; even 1.4 + 1 + 0.5 misses 1.3 · 2.3 = 2.99: both go to the end.
    (
        "bapo",
        {"target": 1.3, "clip_high_max": 1.4},
        TOKENS,
        [[1.4, 1, 0.5], [-1.5, -0.8, 0]],
        [[0, 1, 0.5], [-1.5, 0, 0]],
    ),
    (
        "topr",
        {},
        RESPONSES,
        [[up, zero, down], [-0.75 * up, -0.75 * down, 0]],
        [[1, 1, 1], [-0.75, -0.75, 0]],
    ),
    (
        "topr",
        {"length_normalized": True},
        RESPONSES,
        [[up, zero, down], [-S_SHORT * up, -S_SHORT * down, 0]],
        [[1, 1, 1], [-S_SHORT, -S_SHORT, 0]],
    ),
    ("gppo", {}, TOKENS, [[1.28, 1, 0.5], [-1.5, -0.8, 0]], [[1.28, 1, 0.5], [-1.5, -0.8, 0]]),
    (
        "sapo",
        {},
        RESPONSES,
        [[gate(1.5, 1), 2, gate(0.5, 1)], [-gate(1.5, 1.05), -gate(0.5, 1.05), 0]],
        [[gate_slope(1.5, 1), 1, gate_slope(0.5, 1)], [-gate_slope(1.5, 1.05), -gate_slope(0.5, 1.05), 0]],
    ),
    ("pnpo", {}, TOKENS, [[1.2, 1.2, S_LONG], [-1.5, -S_SHORT, 0]], [[0, 0, S_LONG], [-1.5, -S_SHORT, 0]]),
    ("minpro", {}, TOKENS, [[1.5, 1.5, 0.5], [-1.5, -0.75, 0]], [[1.5, 1.5, 0.5], [-1.5, -0.75, 0]]),
    # The proximal policy is twice as likely as the behavior: u = ρ / 2, below 0.8 everywhere.
    (
        "decoupled_ppo",
        {"proximal_logp": BEHAVIOR_LOGP + math.log(2)},
        TOKENS,
        [[1.5, 1, 0.5], [-1.6, -1.6, 0]],
        [[1.5, 1, 0.5], [0, 0, 0]],
    ),
    (
        "gmpo",
        {},
        RESPONSES,
        [[G_LONG, G_LONG, G_LONG], [-G_SHORT, -G_SHORT, 0]],
        [[0, G_LONG, G_LONG], [-G_SHORT, 0, 0]],
    ),
    (
        "vespo",
        {},
        TOKENS,
        [[PHI_LONG * up, PHI_LONG * zero, PHI_LONG * down], [-PHI_SHORT * up, -PHI_SHORT * down, 0]],
        [[PHI_LONG] * 3, [-PHI_SHORT, -PHI_SHORT, 0]],
    ),
    # Products 1.5, 1.5, 0.75 and 1.5, 0.75; bounds exp(−0.025 √t) and exp(0.05 √t).
    (
        "ctpo",
        {},
        RESPONSES,
        [[math.exp(0.05), math.exp(0.05 * ROOT), 0.75], [-1.5, -math.exp(-0.025 * ROOT), 0]],
        [[0, 0, 0.75], [-1.5, 0, 0]],
    ),
    # b = e^−2 = 0.1353: a ratio of 1.5 or 0.5 moves the probability by 0.0677, within 0.15 and beyond 0.05.
    (
        "dppo",
        {"ratio_cap": 1.25},
        TOKENS,
        [[1.25 * up, zero, 0.5 * down], [-1.25 * up, -0.5 * down, 0]],
        [[1.25, 1, 0.5], [-1.25, -0.5, 0]],
    ),
    (
        "dppo",
        {"threshold": 0.05},
        TOKENS,
        [[0, zero, 0.5 * down], [-1.5 * up, 0, 0]],
        [[0, 1, 0.5], [-1.5, 0, 0]],
    ),
    # The binary KL is 0.0156 at a ratio of 1.5 and 0.0287 at 0.5.
    (
        "dppo",
        {"divergence": "kl", "threshold": 0.02},
        TOKENS,
        [[1.5 * up, zero, 0.5 * down], [-1.5 * up, 0, 0]],
        [[1.5, 1, 0.5], [-1.5, 0, 0]],
    ),
    ("grpo", {"dual_clip": 1.4}, RESPONSES, [[1.2, 1, 0.5], [-1.4, -0.8, 0]], [[0, 1, 0.5], [0, 0, 0]]),
    ("mu_grpo", {"dual_clip": 1.4}, TOKENS, [[1.5, 1, 0.5], [-1.4, -0.5, 0]], [[1.5, 1, 0.5], [0, -0.5, 0]]),
    ("gppo", {"dual_clip": 1.4}, TOKENS, [[1.28, 1, 0.5], [-1.4, -0.8, 0]], [[1.28, 1, 0.5], [0, -0.8, 0]]),
    (
        "m2po",
        {"threshold": 0.2, "form": "mask", "dual_clip": 1.4},
        TOKENS,
        [[1.5, 1, 0.5], [-1.4, 0, 0]],
        [[1.5, 1, 0.5], [0, 0, 0]],
    ),
]


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize(("name", "knobs", "share", "objective", "slope"), CASES)
def test_value_and_gradient(name, knobs, share, objective, slope, jitted):
    arrays = {key: jnp.asarray(knobs[key]) for key in ("proximal_logp",) if key in knobs}
    settings = {key: value for key, value in knobs.items() if key not in arrays}

    def loss_of(logp, **arrays):
        batch = (logp, jnp.asarray(BEHAVIOR_LOGP), jnp.asarray(ADVANTAGES), jnp.asarray(MASK))
        return getattr(objectives, name)(*batch, **settings, **arrays)

    program = jax.value_and_grad(loss_of, has_aux=True)
    (loss, metrics), gradient = (jax.jit(program) if jitted else program)(jnp.asarray(LOGP), **arrays)
    terms = share * np.array(objective)
    np.testing.assert_allclose(loss, -np.sum(terms), rtol=0, atol=1e-6 * np.sum(np.abs(terms)))
    np.testing.assert_allclose(gradient, -share * np.array(slope), rtol=1e-6, atol=1e-7)
    assert metrics["tokens"] == 5
    assert all(jnp.ndim(value) == 0 for value in metrics.values())


def token_row(ratio):
    log_ratio = jnp.log(jnp.asarray([ratio]))
    return log_ratio, jnp.ones_like(log_ratio)


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [((4, 1, 1, 1), 0.644737), ((1.1, 1, 0.9, 1), 0.995025), ((3, 1, 1, 1), 0.75)],
)
def test_effective_sample_size(ratio, expected):
    np.testing.assert_allclose(objectives.effective_sample_size(*token_row(ratio)), expected, atol=5e-7)


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [(1.0, [-0.378289, -0.526316, -0.644737, -1.128947]), (-1.0, [0.911184, 0.763158, 0.644737, -0.528947])],
)
def test_p3o_gradients(advantage, expected):
    log_ratio, mask = token_row([4, 1.5, 1, 0.3])
    gradient, _ = jax.jit(jax.grad(objectives.p3o, has_aux=True))(
        log_ratio, jnp.zeros_like(log_ratio), jnp.array([advantage]), mask, denominator=1, ess=0.6447368
    )
    np.testing.assert_allclose(gradient[0], expected, atol=1e-6)


def test_p3o_safe_kl_pulls_back_what_left_the_clamp():
    logp, rest = jnp.array([[-12.0, 12.0]]), (jnp.zeros((1, 2)), jnp.array([0.0]), jnp.ones((1, 2)))

    def slopes(safe_kl):
        knobs = {"denominator": 1, "ess": 0.5, "safe_kl": safe_kl}
        loss_of = functools.partial(objectives.p3o, **knobs)
        return jax.jit(jax.value_and_grad(loss_of, has_aux=True))(logp, *rest)

    (published_value, _), published = slopes(False)
    (safe_value, _), safe = slopes(True)
    assert published_value == safe_value
    np.testing.assert_allclose(published[0], [0.5, 0.5], rtol=1e-6)  # pushes −12 further down
    np.testing.assert_allclose(safe[0], [0.5 * (1 - math.exp(10)), 0.5 * (1 - math.exp(-10))], rtol=1e-6)


def test_m2po_bound():
    size = jnp.array([[0.05, 0.1, 0.1, 0.2, 0.3, 0.9]])
    rest = (jnp.array([1.0]), jnp.ones((1, 6)))
    np.testing.assert_allclose(objectives.m2po_bound(size, *rest), 0.2, rtol=1e-6)
    _, metrics = objectives.m2po(size, jnp.zeros((1, 6)), *rest)
    np.testing.assert_allclose(metrics["clip_low_max"], 0.8187, atol=5e-5)
    # Removing .9 leaves a mean of .1525 / 5 = .0305.
    np.testing.assert_allclose(objectives.m2po_bound(size, *rest, form="mask"), 0.3, rtol=1e-6)
    # The same sizes on the harmless side bound nothing.
    assert objectives.m2po_bound(-size, *rest) == np.inf
    assert objectives.m2po_bound(size, *rest, threshold=0.17) == np.inf


@pytest.mark.parametrize("form", objectives.M2PO_FORMS)
def test_m2po_keeps_the_token_that_gives_the_bound_in_every_program(form):
    """The program of a micro-batch may round the log-ratio of this token a little upwards."""
    size = jnp.array([[0.05, 0.1, 0.1, 0.2, 0.3, 0.9]])
    rest = (jnp.zeros((1, 6)), jnp.array([1.0]), jnp.ones((1, 6)))
    bound = objectives.m2po_bound(size, *rest[1:], form=form)
    gradient = jax.grad(functools.partial(objectives.m2po, form=form, denominator=1), has_aux=True)
    rounded = jnp.float32(1 + 1e-6) * size
    slopes = [
        -gradient(logp, *rest, **more)[0][0] for logp, more in ((size, {}), (rounded, {"log_bound": bound}))
    ]
    kept = size[0] <= bound
    for slope in slopes:
        np.testing.assert_allclose(slope, np.where(kept, np.exp(size[0]), 0), rtol=1e-5)


def test_m2po_mask_removes_ties_together():
    size = jnp.array([[0.1, 0.3, 0.3, 0.3]])
    bound = objectives.m2po_bound(size, jnp.array([1.0]), jnp.ones((1, 4)), threshold=0.06, form="mask")
    np.testing.assert_allclose(bound, 0.1, rtol=1e-6)  # one .3 could stay, which one would be arbitrary


def slopes_of(objective, ratio, **knobs):
    log_ratio, mask = token_row(ratio)
    gradient, _ = jax.jit(jax.grad(objective, has_aux=True))(
        log_ratio, jnp.zeros_like(log_ratio), jnp.ones(1), mask, denominator=1, **knobs
    )
    return -gradient[0]


def test_prefix_weights():
    ratio = [1, 1, 0.01, 1, 1]
    np.testing.assert_allclose(slopes_of(objectives.pnpo, ratio), [1, 1, 0.2154, 0.3162, 0.3981], atol=5e-5)
    np.testing.assert_allclose(slopes_of(objectives.minpro, ratio), [1, 1, 0.01, 0.01, 0.01], rtol=1e-6)
    np.testing.assert_array_equal(slopes_of(objectives.minpro, [1, 0, 1, 1]), [1, 0, 0, 0])


def test_sapo_gradient_weights():
    slopes = [float(slopes_of(objectives.sapo, [ratio])[0]) for ratio in (1.0, 2.0)]
    np.testing.assert_allclose(slopes, [1, 1.573], atol=5e-4)


def test_published_defaults():
    settings = {name: objectives.ObjectiveConfig(name).settings for name in objectives.OBJECTIVES}
    bounds = {name: (s["clip_low"], s["clip_high"]) for name, s in settings.items() if "clip_low" in s}
    assert bounds == {
        "mu_grpo": (0.0, 5.0),
        "grpo": (0.8, 1.2),
        "dr_grpo": (0.8, 1.2),
        "dapo": (0.8, 1.28),
        "gspo": (1 - 3e-4, 1 + 4e-4),
        "cispo": (0.0, 5.0),
        "bapo": (0.6, 1.2),
        "gppo": (0.8, 1.28),
        "pnpo": (0.8, 1.2),
        "decoupled_ppo": (0.8, 1.2),
        "gmpo": (math.exp(-0.4), math.exp(0.4)),
    }
    by_response = {name for name, s in settings.items() if s["aggregation"] == "seq_mean_token_mean"}
    assert by_response == {"grpo", "gspo", "topr", "sapo", "gmpo", "ctpo"}
    assert settings["dr_grpo"]["aggregation"] == "constant"
    assert (settings["mu_grpo"]["veto"], settings["mu_grpo"]["veto_ratio"]) == ("suffix", 1e-4)
    assert settings["m2po"]["threshold"] == 0.04
    assert all(s["dual_clip"] is None for s in settings.values() if "dual_clip" in s)
    assert [settings["vespo"][k] for k in ("k_positive", "lambda_positive")] == [2.0, 3.0]
    assert [settings["vespo"][k] for k in ("k_negative", "lambda_negative")] == [3.0, 2.0]
    assert [settings["ctpo"][k] for k in ("log_low", "log_high", "growth")] == [0.025, 0.05, 0.5]
    assert objectives.DIVERGENCES == {"tv": 0.15, "kl": 0.05} and settings["dppo"]["ratio_cap"] == 5.0
    assert (settings["sapo"]["temperature_positive"], settings["sapo"]["temperature_negative"]) == (1.0, 1.05)
    assert settings["decoupled_ppo"]["behavior_cap"] == 5.0
    assert (settings["bapo"]["clip_low_max"], settings["bapo"]["clip_high_max"]) == (0.8, 2.0)


def test_importance_weighted_k3_has_the_gradient_of_the_true_kl():
    """For samples of b, ρ k3 is an unbiased KL(π ‖ reference), and so is its gradient ρ x."""
    b, policy, reference = (jnp.log(jnp.array(p)) for p in ([0.5, 0.5], [0.8, 0.2], [0.3, 0.7]))

    def estimate(policy):
        tokens = objectives.kl_estimate(policy - reference, "weighted_k3", importance=policy - b)
        return (jnp.exp(b) * tokens).sum()

    exact = (jnp.exp(policy) * (policy - reference)).sum()
    np.testing.assert_allclose(estimate(policy), exact, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(estimate)(policy), jnp.exp(policy) * (policy - reference), rtol=1e-6)
    with pytest.raises(ValueError, match="importance is None; estimator 'weighted_k3' needs"):
        objectives.kl_estimate(policy - reference, "weighted_k3")


def test_geometric_level_of_weights_and_masks():
    log_ratio, mask = jnp.log(jnp.array([[8.0, 1.0, 1.0, 9.0], [0.1, 0.1, 9.0, 9.0]])), jnp.ones((2, 4))
    mask = mask.at[0, 3].set(0).at[1, 2:].set(0)
    weights = objectives.tis_weights(log_ratio, mask, cap=1.5, level="geometric")
    np.testing.assert_allclose(weights, [[1.5, 1.5, 1.5, 0], [0.1, 0.1, 0, 0]], rtol=1e-6)
    kept = objectives.mis_mask(log_ratio, mask, low=0.5, high=2.01, level="geometric")
    assert kept.astype(int).tolist() == [[1, 1, 1, 0], [0, 0, 0, 0]]
