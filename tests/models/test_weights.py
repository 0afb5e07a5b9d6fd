"""Claims about the table of weights: shapes, shardings, decay and first values all follow from it."""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from mugrpo_jax import models

# Partition over the mesh and whether weight decay applies, for every weight that any family has.
EXPECTED = {
    "embed": (P("tensor", "fsdp"), True),
    "head": (P("tensor", "fsdp"), True),
    "norm": (P(None), False),
    "layers/attn_norm": (P(None, None), False),
    "layers/mlp_norm": (P(None, None), False),
    "layers/q_norm": (P(None, None), False),
    "layers/k_norm": (P(None, None), False),
    "layers/q": (P(None, "fsdp", "tensor"), True),
    "layers/k": (P(None, "fsdp", "tensor"), True),
    "layers/v": (P(None, "fsdp", "tensor"), True),
    "layers/o": (P(None, "tensor", "fsdp"), True),
    "layers/q_bias": (P(None, "tensor"), False),
    "layers/k_bias": (P(None, "tensor"), False),
    "layers/v_bias": (P(None, "tensor"), False),
    "layers/gate": (P(None, "fsdp", "tensor"), True),
    "layers/up": (P(None, "fsdp", "tensor"), True),
    "layers/down": (P(None, "tensor", "fsdp"), True),
}


def by_name(tree):
    return {"/".join(entry.key for entry in path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


@pytest.fixture(scope="module")
def mesh():
    return models.make_mesh(data=2, fsdp=2, tensor=2)


def test_every_weight_is_split_and_decayed_as_listed(mesh):
    seen = set()
    for config in cases.FAMILIES.values():
        model, params = models.abstract(config)
        shardings, weights = by_name(models.param_sharding(mesh, model, params)), by_name(model.weights())
        assert shardings.keys() == weights.keys()
        assert {name: (shardings[name].spec, weights[name].decays) for name in weights} == {
            name: EXPECTED[name] for name in weights
        }
        seen |= weights.keys()
    assert seen == EXPECTED.keys()


def test_a_declaration_with_wrong_axes_is_refused():
    with pytest.raises(ValueError, match=r"shape \(3, 4\) needs one axis name per axis, got \('embed',\)"):
        models.Weight((3, 4), ("embed",), decays=True)
    with pytest.raises(ValueError, match="unknown axis 'width'; possible: batch, embed, heads"):
        models.Weight((3,), ("width",), decays=True)


def test_an_undeclared_parameter_is_refused_by_name(mesh):
    model, params = models.abstract(cases.LLAMA)
    params["layers"]["gate_bias"] = jax.ShapeDtypeStruct((2, 40), jnp.float32)
    with pytest.raises(ValueError, match=r"\['layers'\]\['gate_bias'\] is not among the weights"):
        models.param_sharding(mesh, model, params)


def test_a_declared_parameter_in_the_wrong_place_or_shape_is_refused(mesh):
    model, params = models.abstract(cases.LLAMA)
    with pytest.raises(ValueError, match=r"\['q'\] is not among the weights"):
        models.param_sharding(mesh, model, {"q": params["layers"]["q"]})
    with pytest.raises(ValueError, match=r"\['norm'\] has shape \(7,\), the model declares \(32,\)"):
        models.param_sharding(mesh, model, params | {"norm": jax.ShapeDtypeStruct((7,), jnp.float32)})


def test_optimizer_state_is_split_like_the_parameters_and_scalars_are_copied(mesh):
    model, params = models.abstract(cases.QWEN2)
    state = jax.eval_shape(optax.adamw(1e-3).init, params)
    shardings = models.param_sharding(mesh, model, state)
    expected = models.param_sharding(mesh, model, params)
    assert shardings[0].mu == shardings[0].nu == expected
    assert shardings[0].count.spec == P()
    with pytest.raises(ValueError, match=r"\[1\] is not among the weights"):
        models.param_sharding(mesh, model, (state, jax.ShapeDtypeStruct((3,), jnp.float32)))


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("name", cases.FAMILIES)
def test_the_table_for_decoding_has_the_shapes_of_the_parameters_for_decoding(name, fuse):
    model, params = models.abstract(cases.FAMILIES[name])
    ready = jax.eval_shape(lambda params: models.decode_params(params, fuse=fuse), params)
    declared = jax.tree.map(lambda weight: weight.shape, models.decode_weights(model, fuse=fuse))
    assert declared == jax.tree.map(lambda leaf: leaf.shape, ready)


def test_first_values_have_the_spread_of_their_fan_in_but_for_norms_and_biases():
    _, params = models.create(cases.QWEN2, seed=3)
    for name, leaf in by_name(params).items():
        if name.endswith("norm"):
            assert (leaf == 1).all()
        elif name.endswith("bias"):
            assert (leaf == 0).all()
        else:
            inputs = leaf.shape[-1] if name in ("embed", "head") else leaf.shape[-2]
            branches = 2 * 2 if name in ("layers/o", "layers/down") else 1
            np.testing.assert_allclose(np.std(leaf), (branches * inputs) ** -0.5, rtol=0.1)
            assert len(np.unique(leaf)) > 0.99 * leaf.size  # no two layers are the same


def test_first_values_stay_as_they_are():
    _, params = models.create(cases.QWEN2, seed=0)
    found = [params["embed"][0, 0], params["layers"]["q"][1, 0, 0], params["layers"]["down"][1, 0, 0]]
    found.append(params["head"][0, 0])
    expected = [0.17748632, -0.33177662, 0.047753323, 0.22903824]
    np.testing.assert_array_equal(np.array(found, np.float32), np.array(expected, np.float32))
