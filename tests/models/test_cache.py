"""Claims about prefill and decode: together they are the full forward pass."""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mugrpo_jax import models
from mugrpo_jax.models import cache_entries


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("name", cases.FAMILIES)
def test_prefill_and_decode_give_the_logits_of_the_full_forward_pass(name, fuse):
    config = cases.FAMILIES[name]
    model, params = cases.make(config)
    tokens = cases.tokens(rows=3, length=12)
    full = models.logits(model, params, tokens)
    ready = models.decode_params(params, fuse=fuse)
    lengths = jnp.array([5, 1, 8])
    found, prompts = jax.jit(models.prefill, static_argnums=0)(model, ready, tokens[:, :8], lengths)
    np.testing.assert_allclose(found, full[jnp.arange(3), lengths - 1], rtol=1e-3, atol=1e-4)

    cache = models.empty_cache(config, 3, 16, jnp.float32)
    cache = models.Cache(
        keys=tuple(a.at[:, :8].set(b) for a, b in zip(cache.keys, prompts.keys)),
        values=tuple(a.at[:, :8].set(b) for a, b in zip(cache.values, prompts.values)),
        lengths=prompts.lengths,
    )
    step = jax.jit(models.decode_step, static_argnums=0, static_argnames="read")
    for i in range(4):  # every row at its own position; what prefill left behind a row's end is overwritten
        at = lengths + i
        found, cache = step(model, ready, cache, tokens[jnp.arange(3), at], read=12)
        np.testing.assert_allclose(found, full[jnp.arange(3), at], rtol=1e-3, atol=1e-4)
    np.testing.assert_array_equal(cache.lengths, lengths + 4)


def test_cache_bytes_is_the_size_of_the_cache():
    cache = models.empty_cache(cases.QWEN3, 3, 10)
    size = sum(leaf.nbytes for leaf in (*cache.keys, *cache.values))
    assert models.cache_bytes(cases.QWEN3, 3, 10) == size


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(2, 1, 64), (6, 3, 16), (4, 4, 16)])
def test_on_a_cpu_a_row_of_a_long_cache_does_not_depend_on_longer_rows(heads, kv_heads, width, dtype):
    """Attention reads 600 entries in parts of 256, of which the last overlaps, and only as far as needed."""
    keys = jax.random.split(jax.random.key(0), 3)
    filled = jnp.array([1, 200, 256, 257, 500, 512, 513, 600])
    q = jax.random.normal(keys[0], (8, 1, heads, width), dtype)
    k, v = (jax.random.normal(key, (8, 600, kv_heads, width), dtype) for key in keys[1:])
    attend = jax.jit(cache_entries.attend)
    together = attend(q, k, v, filled)
    wide = (x.astype("float32") for x in (q, k, v))
    wanted = jax.nn.dot_product_attention(*wide, key_value_seq_lengths=filled, implementation="xla")
    np.testing.assert_allclose(together, wanted, atol=1e-6 if dtype == "float32" else 0.03)
    assert "while" in str(jax.make_jaxpr(cache_entries.attend)(q, k, v, filled))
    for row in range(7):
        shorter = jnp.where(jnp.arange(8) > row, filled[row], filled)
        np.testing.assert_array_equal(attend(q, k, v, shorter)[: row + 1], together[: row + 1])
    if kv_heads % 2 == 0:  # rows and heads on four devices
        mesh = models.make_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4])
        rows, heads = (NamedSharding(mesh, P(*axes)) for axes in [["fsdp"], ["fsdp", None, "tensor"]])
        placed = [*(jax.device_put(x, heads) for x in (q, k, v)), jax.device_put(filled, rows)]
        with jax.set_mesh(mesh):
            found = attend(*placed)
        assert found.sharding.is_equivalent_to(heads, 4)
        np.testing.assert_allclose(found, together, atol=1e-6 if dtype == "float32" else 0.01)
