"""Claims about prefill and decode: together they are the full forward pass."""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mugrpo_jax import models


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
