"""A 7B model compiles for TPU topologies on a machine without one, with splash attention inside."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mugrpo_jax import models
from mugrpo_jax.models.io.known_shapes import KNOWN_SHAPES
from mugrpo_jax.models.sharding import placed

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu, which exists for x86-64 Linux"
)

QWEN_7B = KNOWN_SHAPES["Qwen/Qwen2.5-Math-7B"]


@pytest.fixture(scope="module", params=["v5e:4x4", pytest.param("v5p:2x2x2", marks=pytest.mark.slow)])
def mesh(request):
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(platform="tpu", topology_name=request.param).devices
    return models.make_mesh(fsdp=len(devices) // 2, tensor=2, devices=devices)


def test_forward_and_gradient_compile_with_splash_attention(mesh, hurried_tpu_compiler):
    model, params = models.abstract(QWEN_7B, dtype=jnp.bfloat16)
    shardings = models.param_sharding(mesh, model, params)
    rows = mesh.shape["data"] * mesh.shape["fsdp"]
    tokens = jax.ShapeDtypeStruct((rows, 1024), jnp.int32, sharding=NamedSharding(mesh, P(("data", "fsdp"))))

    def loss(params, tokens):
        return models.token_logprobs(model, params, tokens, remat="full")[0].sum()

    with jax.set_mesh(mesh), hurried_tpu_compiler():
        gradient = jax.jit(jax.value_and_grad(loss), out_shardings=(None, shardings))
        compiled = gradient.lower(placed(params, shardings), tokens).compile()
    memory = compiled.memory_analysis()
    weights = QWEN_7B.num_params * 2 / mesh.size
    assert "splash" in compiled.as_text()
    assert memory.argument_size_in_bytes < 1.1 * weights
    assert memory.temp_size_in_bytes < 8e9
    assert memory.output_size_in_bytes < 1.1 * weights


def test_decode_step_compiles(mesh, hurried_tpu_compiler):
    model, params = models.abstract(QWEN_7B, dtype=jnp.bfloat16)
    ready = jax.eval_shape(models.decode_params, params)
    # As the sampler holds them: split over `tensor` alone, so that no step gathers weights.
    whole = jax.tree.map(
        lambda s: NamedSharding(mesh, P(*(axis if axis == "tensor" else None for axis in s.spec))),
        models.param_sharding(mesh, model, params),
    )
    layer = {name: NamedSharding(mesh, P(*s.spec[1:])) for name, s in whole["layers"].items()}
    shardings = whole | {"layers": [layer] * QWEN_7B.num_layers}
    rows = 8 * mesh.shape["data"] * mesh.shape["fsdp"]
    cache = jax.eval_shape(lambda: models.empty_cache(QWEN_7B, rows, 2048))
    by_row = NamedSharding(mesh, P(("data", "fsdp")))
    by_head = NamedSharding(mesh, P(("data", "fsdp"), None, "tensor"))
    cache_shardings = jax.tree.map(lambda leaf: by_head if leaf.ndim == 4 else by_row, cache)
    with jax.set_mesh(mesh), hurried_tpu_compiler():
        step = jax.jit(
            lambda params, cache, tokens: models.decode_step(model, params, cache, tokens, read=1024),
            donate_argnums=1,
            out_shardings=(None, cache_shardings),
        )
        compiled = step.lower(
            placed(ready, shardings),
            placed(cache, cache_shardings),
            jax.ShapeDtypeStruct((rows,), jnp.int32, sharding=by_row),
        ).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= models.cache_bytes(QWEN_7B, rows, 2048) / mesh.size  # in place
    assert memory.temp_size_in_bytes < 4e9
