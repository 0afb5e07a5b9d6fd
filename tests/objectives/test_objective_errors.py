"""Wrong arguments are refused when traced, in one line that names them; and the config."""

import copy
import dataclasses
import functools
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mugrpo_jax import objectives
from mugrpo_jax.objectives import OBJECTIVES, ObjectiveConfig

TOKENS = jax.ShapeDtypeStruct((4, 6), jnp.float32)
ROWS = jax.ShapeDtypeStruct((4,), jnp.float32)
WRONG = jax.ShapeDtypeStruct((4, 5), jnp.float32)


def refused(message, function, *arrays, **knobs):
    """The function raises a `ValueError` with this message while it is traced, before any value exists."""
    static = {key: value for key, value in knobs.items() if not isinstance(value, jax.ShapeDtypeStruct)}
    traced = {key: value for key, value in knobs.items() if key not in static}
    with pytest.raises(ValueError) as error:
        jax.eval_shape(functools.partial(function, **static), *arrays, **traced)
    assert str(error.value) == message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("message", "name", "knobs"),
    [
        ("denominator is -5; possible: a number not below 0", "grpo", {"denominator": -5}),
        ("denominator is nan; possible: a number not below 0", "grpo", {"denominator": float("nan")}),
        ("denominator is 'x'; possible: a number", "grpo", {"denominator": "x"}),
        ("denominator has shape (4, 1); possible: a single number", "grpo", {"denominator": np.ones((4, 1))}),
        ("ess is -1; possible: a number not below 0", "p3o", {"ess": -1}),
        ("log_bound is -1; possible: a number not below 0", "m2po", {"log_bound": -1}),
        ("bounds is (1, 2, 3); possible: a pair (c_l, c_h)", "bapo", {"bounds": (1, 2, 3)}),
        ("clip_high has shape (6,); possible: a single number", "grpo", {"clip_high": np.ones(6)}),
        (
            "clip_low=2.0, clip_high=1.0 are the wrong way round; "
            "possible: absolute ratios with 0 <= clip_low <= clip_high",
            "grpo",
            {"clip_low": np.float32(2.0), "clip_high": np.float32(1.0)},
        ),
        *(
            (
                f"clip_low={low}, clip_high={high} are both on one side of 1; "
                "possible: absolute ratios such as 0.8 and 1.28, not distances from 1 such as 0.2 and 0.28",
                name,
                {"clip_low": low, "clip_high": high},
            )
            for name in ("grpo", "mu_grpo", "gspo", "gmpo", "gppo", "pnpo")
            for low, high in ((0.2, 0.28), (1.1, 1.2))
        ),
    ],
)
def test_wrong_numbers(message, name, knobs):
    refused(message, OBJECTIVES[name], TOKENS, TOKENS, ROWS, TOKENS, **knobs)


def test_a_traced_coefficient_without_its_array():
    message = "reference_logp is None; kl_coef=a traced value needs an array (4, 6)"
    coefficient = jax.ShapeDtypeStruct((), jnp.float32)
    refused(message, objectives.grpo, TOKENS, TOKENS, ROWS, TOKENS, kl_coef=coefficient)


def test_concrete_arrays_count_as_numbers():
    with pytest.raises(ValueError, match="wrong way round"):
        objectives.grpo(*[jnp.zeros((1, 2))] * 4, clip_low=jnp.float32(2.0), clip_high=jnp.asarray(1.0))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_wrong_shapes(name):
    extra = {"proximal_logp": TOKENS} if name == "decoupled_ppo" else {}

    def check(message, *arrays, **knobs):
        refused(message, OBJECTIVES[name], *arrays, **extra, **knobs)

    check("behavior_logp has shape (4, 5); possible: (4, 6)", TOKENS, WRONG, ROWS, TOKENS)
    check("mask has shape (4,); possible: (4, 6)", TOKENS, TOKENS, ROWS, ROWS)
    check("advantages has shape (4, 5); possible: (4,) or (4, 6)", TOKENS, TOKENS, WRONG, TOKENS)
    check("weights has shape (4, 5); possible: (4, 6)", TOKENS, TOKENS, ROWS, TOKENS, weights=WRONG)
    check("entropy has shape (4,); possible: (4, 6)", TOKENS, TOKENS, ROWS, TOKENS, entropy=ROWS)


def test_logp_without_a_time_axis():
    refused("logp has shape (4,); possible: [B, T]", objectives.grpo, ROWS, ROWS, ROWS, ROWS)
    refused("log_ratio has shape (4,); possible: [B, T]", objectives.veto_mask, ROWS, ROWS, ROWS)


def test_a_proximal_policy_of_another_shape():
    message = "proximal_logp has shape (4, 5); possible: (4, 6)"
    refused(message, objectives.decoupled_ppo, TOKENS, TOKENS, ROWS, TOKENS, proximal_logp=WRONG)


@pytest.mark.parametrize(
    "name", [name for name in OBJECTIVES if "clip_low" in ObjectiveConfig(name).settings]
)
def test_clip_bounds_the_wrong_way_round(name):
    extra = {"proximal_logp": TOKENS} if name == "decoupled_ppo" else {}
    with pytest.raises(ValueError, match=r"clip_low.*wrong way round; possible: .* 0 <= clip_low"):
        jax.eval_shape(
            functools.partial(OBJECTIVES[name], clip_low=3.0, clip_high=0.5),
            TOKENS,
            TOKENS,
            ROWS,
            TOKENS,
            **extra,
        )


BATCH = (TOKENS, TOKENS, ROWS, TOKENS)


@pytest.mark.parametrize(
    ("message", "function", "arrays", "knobs"),
    [
        (
            "veto is 'tail'; possible: 'none', 'trigger', 'suffix', 'suffix_non_trigger', 'sequence'",
            objectives.mu_grpo,
            BATCH,
            {"veto": "tail"},
        ),
        (
            "aggregation is 'mean'; possible: "
            "'token_mean', 'seq_mean_token_mean', 'seq_mean_token_sum', 'constant'",
            objectives.grpo,
            BATCH,
            {"aggregation": "mean"},
        ),
        (
            "kl_estimator is 'k4'; possible: 'k1', 'k2', 'k3', 'weighted_k3'",
            objectives.grpo,
            BATCH,
            {"reference_logp": TOKENS, "kl_estimator": "k4"},
        ),
        (
            "kind is 'z'; possible: 'std', 'mean', 'rloo', 'batch_std'",
            objectives.group_advantages,
            (TOKENS,),
            {"kind": "z"},
        ),
        (
            "rewards has shape (4, 1); possible: [prompts, group] with a group of 2 or more",
            objectives.group_advantages,
            (jax.ShapeDtypeStruct((4, 1), jnp.float32),),
            {},
        ),
        ("rewards has shape (4,); possible: [prompts, group]", objectives.group_advantages, (ROWS,), {}),
        ("level is 'word'; possible: 'sequence', 'token'", objectives.gspo, BATCH, {"level": "word"}),
        (
            "level is 'word'; possible: 'token', 'sequence', 'geometric'",
            objectives.tis_weights,
            (TOKENS, TOKENS),
            {"level": "word"},
        ),
        ("form is 'cut'; possible: 'winsorize', 'mask'", objectives.m2po, BATCH, {"form": "cut"}),
        ("threshold is 0; possible: a number above 0", objectives.m2po, BATCH, {"threshold": 0}),
        (
            "scope is 'tail'; possible: 'none', 'trigger', 'suffix', 'suffix_non_trigger', 'sequence'",
            objectives.veto_mask,
            (TOKENS, ROWS, TOKENS),
            {"scope": "tail"},
        ),
        ("veto_ratio is nan; possible: a number above 0", objectives.mu_grpo, BATCH, {"veto_ratio": np.nan}),
        ("clip_low is -0.2; possible: a number not below 0", objectives.grpo, BATCH, {"clip_low": -0.2}),
        ("clip_high is '1.2'; possible: a number", objectives.grpo, BATCH, {"clip_high": "1.2"}),
        (
            "clip_low_max=1.5, clip_high=1.2 are the wrong way round; "
            "possible: absolute ratios with 0 <= clip_low_max <= clip_high",
            objectives.bapo,
            BATCH,
            {"clip_low_max": 1.5},
        ),
        (
            "reference_logp is None; kl_coef=0.1 needs an array (4, 6)",
            objectives.grpo,
            BATCH,
            {"kl_coef": 0.1},
        ),
        (
            "entropy is None; entropy_coef=0.1 needs an array (4, 6)",
            objectives.p3o,
            BATCH,
            {"entropy_coef": 0.1},
        ),
        ("safe_kl is 1; possible: True, False", objectives.p3o, BATCH, {"safe_kl": 1}),
        ("dual_clip is 1; possible: a number above 1", objectives.grpo, BATCH, {"dual_clip": 1}),
        ("dual_clip is 0.5; possible: a number above 1", objectives.gppo, BATCH, {"dual_clip": 0.5}),
        ("divergence is 'js'; possible: 'tv', 'kl'", objectives.dppo, BATCH, {"divergence": "js"}),
        ("threshold is 0; possible: a number above 0", objectives.dppo, BATCH, {"threshold": 0}),
        ("k_negative is -1; possible: a number not below 0", objectives.vespo, BATCH, {"k_negative": -1}),
        ("log_low is nan; possible: a number not below 0", objectives.ctpo, BATCH, {"log_low": np.nan}),
        (
            "length_normalized is 'no'; possible: True, False",
            objectives.topr,
            BATCH,
            {"length_normalized": "no"},
        ),
        ("max_length is 0; possible: a number above 0", objectives.dr_grpo, BATCH, {"max_length": 0}),
        (
            "max_length is None; aggregation 'constant' needs the generation budget in tokens",
            lambda mask: objectives.denominator(mask, "constant"),
            (TOKENS,),
            {},
        ),
        (
            "minpro has no knob 'clip_high'; possible: denominator, aggregation, weights, "
            "reference_logp, kl_coef, kl_estimator, entropy, entropy_coef, max_length",
            objectives.minpro,
            BATCH,
            {"clip_high": 2.0},
        ),
    ],
)
def test_wrong_values(message, function, arrays, knobs):
    refused(message, function, *arrays, **knobs)


@pytest.mark.parametrize(
    ("message", "name", "knobs"),
    [
        ("name is 'ppo'; possible: 'mu_grpo', 'grpo', ", "ppo", {}),
        (
            "mu_grpo has no knob 'clip'; possible: clip_low, clip_high, veto, ",
            "mu_grpo",
            {"clip": 1},
        ),
        (
            "knob 'weights' is an argument of each call; possible: clip_low, clip_high, ",
            "grpo",
            {"weights": 1.0},
        ),
        ("knob 'proximal_logp' is an argument of each call", "decoupled_ppo", {"proximal_logp": 0.0}),
        (
            "knob 'clip_low' is [0.8]; possible: a number, a string, a boolean or None",
            "grpo",
            {"clip_low": [0.8]},
        ),
        ("clip_low=2.0, clip_high=1.2 are the wrong way round", "grpo", {"clip_low": 2.0}),
        ("veto is 'all'; possible: 'none', ", "mu_grpo", {"veto": "all"}),
        ("aggregation is 'sum'; possible: ", "p3o", {"aggregation": "sum"}),
    ],
)
def test_config_is_validated_when_built(message, name, knobs):
    with pytest.raises(ValueError) as error:
        ObjectiveConfig(name, knobs)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_config_is_frozen_hashable_and_equal_by_content():
    knobs = {"clip_high": 4.0, "veto": "sequence"}
    config = ObjectiveConfig("mu_grpo", knobs)
    assert config == ObjectiveConfig("mu_grpo", dict(reversed(knobs.items())))
    assert hash(config) == hash(ObjectiveConfig("mu_grpo", dict(reversed(knobs.items()))))
    assert config != ObjectiveConfig("mu_grpo")
    knobs["clip_high"] = 9.0
    assert config.knobs["clip_high"] == 4.0
    with pytest.raises(AttributeError):
        config.name = "grpo"
    with pytest.raises(TypeError, match="fixed"):
        config.knobs["clip_high"] = 9.0
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
    assert dataclasses.asdict(config) == {
        "name": "mu_grpo",
        "knobs": {"clip_high": 4.0, "veto": "sequence"},
        "temperature": None,
    }
    assert config != dataclasses.replace(config, temperature=0.5)
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"temperature is {wrong}; possible: a positive number"):
            ObjectiveConfig("mu_grpo", temperature=wrong)


def test_config_adds_nothing():
    config = ObjectiveConfig(
        "mu_grpo", {"clip_high": 1.1, "aggregation": "constant", "max_length": 9, "kl_coef": 0.1}
    )
    batch = (jnp.log(jnp.array([[1.5, 1.0]])), jnp.zeros((1, 2)), jnp.ones(1), jnp.ones((1, 2)))
    built, _ = config.build()(*batch, reference_logp=batch[0])
    direct, _ = objectives.mu_grpo(*batch, reference_logp=batch[0], **config.knobs)
    assert built == direct
    assert config.settings["veto"] == "suffix"
    assert config.settings["clip_high"] == 1.1
    assert "reference_logp" not in config.settings


def test_the_flat_face_is_complete():
    assert set(OBJECTIVES) <= set(objectives.__all__)
    assert all(hasattr(objectives, name) for name in objectives.__all__)
    assert [OBJECTIVES[name].__name__ for name in OBJECTIVES] == list(OBJECTIVES)


def test_only_jax_and_numpy_are_imported():
    """A fresh interpreter that cannot import anything of the training stack can import the objectives."""
    code = (
        "import sys\n"
        "for name in ('flax', 'optax', 'orbax', 'grain', 'transformers', 'jaxtyping'):\n"
        "    sys.modules[name] = None\n"
        "import mugrpo_jax.objectives\n"
        "rooms = [m for m in sys.modules if m.startswith('mugrpo_jax.') and 'objectives' not in m]\n"
        "assert not rooms, rooms\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
