"""Claims about sharding: any mesh gives the numbers of one device; a mesh that does not divide is refused."""

import dataclasses
import importlib
import types

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mugrpo_jax import models
from mugrpo_jax.models.sharding import device_grid

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
    with pytest.raises(ValueError, match=r"data=-1 × fsdp=3 .* fit: 3 does not divide the 8 devices"):
        models.make_mesh(data=-1, fsdp=3)
    assert dict(models.make_mesh(data=-1, fsdp=4).shape) == {"data": 2, "fsdp": 4, "tensor": 1}
    with pytest.raises(ValueError, match="at most one -1"):
        models.make_mesh(data=-1, fsdp=-1)
    assert dict(models.make_mesh(fsdp=-1, tensor=2).shape) == {"data": 1, "fsdp": 4, "tensor": 2}


def slices(count):
    """Stand-ins for the chips of several v5e slices of 4 × 4."""
    return [
        types.SimpleNamespace(
            platform="tpu",
            device_kind="TPU v5 lite",
            slice_index=number,
            coords=(x, y, 0),
            core_on_chip=0,
            process_index=4 * number + x // 2 * 2 + y // 2,
            id=16 * number + 4 * x + y,
        )
        for number in range(count)
        for x in range(4)
        for y in range(4)
    ]


@pytest.mark.parametrize("sizes", [(2, 16, 1), (2, 8, 2), (4, 4, 2), (8, 1, 4)])
def test_only_data_goes_across_slices(sizes):
    grid = device_grid(sizes, slices(2))
    assert grid.shape == sizes and len({device.id for device in grid.flat}) == 32
    assert all(len({device.slice_index for device in row.flat}) == 1 for row in grid)
    assert device_grid((1, 16, 1), slices(1)).shape == (1, 16, 1)


def test_a_mesh_that_would_split_a_copy_between_slices_is_refused():
    message = r"mesh: data=3 × .* 2 slices of 16 devices: .* so data must be a multiple of 2"
    with pytest.raises(ValueError, match=message):
        device_grid((3, 16, 1), slices(2))
    with pytest.raises(ValueError, match="data=1 × fsdp=32 × tensor=1 does not fit 2 slices"):
        models.make_mesh(fsdp=-1, devices=slices(2))


def test_attention_back_ends_are_refused_by_name():
    q = jnp.zeros((1, 4, 2, 8))
    with pytest.raises(ValueError, match="unknown backend 'flash'; possible: auto, xla, cudnn, splash"):
        models.attention(q, q, q, backend="flash")


def test_splash_attention_with_grouped_heads_is_plain_attention(monkeypatch):
    keys = jax.random.split(jax.random.key(0), 4)
    q, weights = (jax.random.normal(key, (2, 40, 4, 24)) for key in keys[:2])
    k, v = (jax.random.normal(key, (2, 40, 2, 24)) for key in keys[2:])

    def total(backend):
        value = lambda *inputs: (models.attention(*inputs, backend=backend) * weights).sum()  # noqa: E731
        return jax.jit(jax.value_and_grad(value, argnums=(0, 1, 2)))(q, k, v)

    expected = total("xla")
    with jax.set_mesh(models.make_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4])):
        assert cases.scaled_difference(expected, total("splash")) < 1e-5
    attention = importlib.import_module("mugrpo_jax.models.attention")  # `models.attention` is its function
    given, right = [], attention._splash_kernel

    def noted(*arguments):
        kernel = right(*arguments)
        return lambda *inputs: given.append([x.shape for x in inputs]) or kernel(*inputs)

    monkeypatch.setattr(attention, "_splash_kernel", noted)
    assert cases.scaled_difference(expected, total("splash")) < 1e-5
    # The kernel gets as many keys and values as the model has, not one copy per query head.
    assert given == [[(4, 128, 128), (2, 128, 128), (2, 128, 128)]]


def instructions(layers: int, scan: bool) -> int:
    """Of the compiled gradient: what the compiler has to do, without a clock."""
    model, params = models.abstract(dataclasses.replace(cases.LLAMA, num_layers=layers))
    tokens = np.zeros((2, 16), np.int32)
    program = jax.jit(jax.grad(cases.weighted(model, tokens, scan=scan))).lower(params).compile()
    return program.as_text().count(" = ")


def test_the_program_of_the_scanned_model_does_not_grow_with_depth():
    assert instructions(48, scan=True) < 1.02 * instructions(6, scan=True)
    assert instructions(6, scan=False) > 2 * instructions(2, scan=False)
