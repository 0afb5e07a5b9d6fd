"""Claims about the decoder: layouts, remat and padding change nothing; bad configs are refused by name."""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mugrpo_jax import models
from mugrpo_jax.models import decoder
from mugrpo_jax.models import model_config as configs
from mugrpo_jax.models.rope import rotation


@pytest.fixture(scope="module", params=cases.FAMILIES)
def family(request):
    config = cases.FAMILIES[request.param]
    model, params = cases.make(config)
    return config, model, params


def test_parameter_count_is_that_of_the_tree(family):
    config, _, params = family
    assert config.num_params == sum(leaf.size for leaf in jax.tree.leaves(params))


def test_abstract_parameters_have_the_shapes_of_real_ones(family):
    config, model, params = family
    static, abstract = models.abstract(config, dtype=jnp.bfloat16)
    assert static == model
    assert jax.tree.map(jnp.shape, abstract) == jax.tree.map(jnp.shape, params)
    assert {leaf.dtype for leaf in jax.tree.leaves(abstract)} == {jnp.dtype(jnp.bfloat16)}


@pytest.fixture(scope="module")
def scanned():
    model, params = cases.make(cases.QWEN2)
    tokens = cases.tokens()
    return model, params, tokens, jax.jit(jax.value_and_grad(cases.weighted(model, tokens)))(params)


@pytest.mark.parametrize("options", [{"scan": False}, {"remat": "dots"}, {"remat": "full"}], ids=str)
def test_layer_layout_and_remat_do_not_change_the_gradient(scanned, options):
    model, params, tokens, expected = scanned
    found = jax.jit(jax.value_and_grad(cases.weighted(model, tokens, **options)))(params)
    assert cases.scaled_difference(expected, found) < 2e-5


def test_fused_projections_give_the_plain_layer():
    config = cases.QWEN2
    _, params = cases.make(config)
    layer = decoder.unstack(params["layers"])[0]
    x = jax.random.normal(jax.random.key(0), (2, 5, config.hidden_size))
    rope = rotation(config, jnp.arange(5)[None])
    plain, fused = (
        decoder.apply_layer(config, w, x, rope, models.attention) for w in (layer, decoder.fuse(layer))
    )
    np.testing.assert_allclose(plain, fused, rtol=1e-5, atol=1e-5)


def test_padding_changes_nothing_for_the_rows_themselves(family):
    _, model, params = family
    tokens = cases.tokens(rows=3)
    lengths = [19, 7, 1]
    padded = jnp.stack([jnp.where(jnp.arange(19) < n, row, 0) for row, n in zip(tokens, lengths)])
    together = model.hidden(params, padded)
    for i, n in enumerate(lengths):
        alone = model.hidden(params, tokens[i : i + 1, :n])
        np.testing.assert_allclose(together[i, :n], alone[0], rtol=2e-4, atol=2e-5)


def test_later_tokens_do_not_reach_back(family):
    _, model, params = family
    tokens = cases.tokens(rows=1)
    changed = tokens.at[0, 10].set((tokens[0, 10] + 1) % 48)
    before, after = (model.hidden(params, t)[0] for t in (tokens, changed))
    np.testing.assert_array_equal(before[:10], after[:10])
    assert np.abs(before[10:] - after[10:]).max() > 1e-3


def test_an_unknown_remat_policy_is_refused():
    model, params = cases.make(cases.LLAMA)
    with pytest.raises(ValueError, match="remat: unknown policy 'some'; possible: none, dots, full"):
        model.hidden(params, cases.tokens(), remat="some")


HF = configs.to_hf(cases.LLAMA)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "architecture 'MixtralForCausalLM' is not supported"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "architecture 'Qwen3MoeForCausalLM' is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "rope type 'yarn' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4}}, "lacks the key 'low_freq_factor'"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True},
            "sliding-window attention is not supported",
        ),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias is not supported"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message) as error:
        configs.from_hf(HF | change)
    assert "\n" not in str(error.value)


def test_a_missing_key_is_named():
    broken = {name: value for name, value in HF.items() if name != "hidden_size"}
    with pytest.raises(ValueError, match="missing key 'hidden_size'"):
        configs.from_hf(broken)


@pytest.mark.parametrize("name", cases.FAMILIES)
def test_a_config_survives_the_way_through_its_hugging_face_form(name):
    assert configs.from_hf(configs.to_hf(cases.FAMILIES[name])) == cases.FAMILIES[name]
