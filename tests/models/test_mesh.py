"""Claims about sharding: any mesh gives the numbers of one device; a mesh that does not divide is refused."""

import dataclasses

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mugrpo_jax import models

MESHES = [(8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 4, 2)]


@pytest.fixture(scope="module")
def single():
    model, params = cases.make(cases.QWEN2)
    tokens = cases.tokens(rows=8)
    return (
        model,
        params,
        tokens,
        jax.jit(jax.value_and_grad(cases.weighted(model, tokens, chunk=11)))(params),
    )


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_sharded_value_and_gradient_are_those_of_one_device(single, shape):
    model, params, tokens, expected = single
    data, fsdp, tensor = shape
    mesh = models.make_mesh(data=data, fsdp=fsdp, tensor=tensor)
    models.check_mesh(cases.QWEN2, mesh)
    sharded = jax.device_put(params, models.param_sharding(mesh, model, params))
    rows = jax.device_put(tokens, NamedSharding(mesh, P(("data", "fsdp"))))
    with jax.set_mesh(mesh):
        value = lambda params, rows: cases.weighted(model, rows, chunk=11)(params)  # noqa: E731
        found = jax.jit(jax.value_and_grad(value))(sharded, rows)
    assert cases.scaled_difference(expected, found) < 5e-5


def test_parameters_are_split_over_fsdp_and_tensor():
    mesh = models.make_mesh(data=1, fsdp=4, tensor=2)
    model, params = models.abstract(cases.LLAMA)
    shardings = models.param_sharding(mesh, model, params)
    shapes = jax.tree.map(lambda leaf, s: s.shard_shape(leaf.shape), params, shardings)
    assert shapes["layers"]["q"] == (2, 32 // 4, 32 // 2)
    assert shapes["layers"]["down"] == (2, 40 // 2, 32 // 4)
    assert shapes["embed"] == (48 // 2, 32 // 4)
    assert shapes["norm"] == (32,)


@pytest.mark.parametrize(
    ("change", "sizes", "message"),
    [
        ({}, {"fsdp": 1, "tensor": 8}, "tensor=8 does not divide the model's num_heads=4"),
        (
            {"num_kv_heads": 1},
            {"fsdp": 4, "tensor": 2},
            "tensor=2 does not divide the model's num_kv_heads=1",
        ),
        ({"vocab_size": 49}, {"fsdp": 4, "tensor": 2}, "tensor=2 does not divide the model's vocab_size=49"),
        ({"hidden_size": 36}, {"fsdp": 8, "tensor": 1}, "fsdp=8 does not divide the model's hidden_size=36"),
    ],
)
def test_a_mesh_that_does_not_divide_the_model_is_refused_with_the_numbers(change, sizes, message):
    with pytest.raises(ValueError, match=message):
        models.check_mesh(dataclasses.replace(cases.LLAMA, **change), models.make_mesh(data=1, **sizes))


def test_a_mesh_must_multiply_to_the_devices():
    with pytest.raises(ValueError, match="data=3 × fsdp=1 × tensor=1 does not multiply to the 8 devices"):
        models.make_mesh(data=3)
    with pytest.raises(ValueError, match="at most one -1"):
        models.make_mesh(data=-1, fsdp=-1)
    assert dict(models.make_mesh(fsdp=-1, tensor=2).shape) == {"data": 1, "fsdp": 4, "tensor": 2}


def test_attention_back_ends_are_refused_by_name():
    q = jnp.zeros((1, 4, 2, 8))
    with pytest.raises(ValueError, match="unknown backend 'flash'; possible: auto, xla, cudnn, splash"):
        models.attention(q, q, q, backend="flash")


def instructions(layers: int, scan: bool) -> int:
    """Of the compiled gradient: what the compiler has to do, without a clock."""
    model, params = models.abstract(dataclasses.replace(cases.LLAMA, num_layers=layers))
    tokens = np.zeros((2, 16), np.int32)
    program = jax.jit(jax.grad(cases.weighted(model, tokens, scan=scan))).lower(params).compile()
    return program.as_text().count(" = ")


def test_the_program_of_the_scanned_model_does_not_grow_with_depth():
    assert instructions(48, scan=True) < 1.02 * instructions(6, scan=True)
    assert instructions(6, scan=False) > 2 * instructions(2, scan=False)
