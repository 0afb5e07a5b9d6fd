"""Claims about log-probs in chunks: equal to full logits in value and gradient, without their memory."""

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mugrpo_jax import models
from mugrpo_jax.models import logprobs


@pytest.mark.parametrize(("chunk", "temperature"), [(1000, 1.0), (13, 0.7)])
def test_chunks_give_the_value_and_gradient_of_full_logits(chunk, temperature):
    model, params = cases.make(cases.QWEN2)
    tokens = cases.tokens()
    chunked = cases.weighted(model, tokens, chunk=chunk, temperature=temperature)
    found = jax.jit(jax.value_and_grad(chunked))(params)
    exact = jax.jit(jax.value_and_grad(cases.full_logits_value(model, tokens, temperature=temperature)))(
        params
    )
    assert cases.scaled_difference(exact, found) < 3e-5


def test_an_entropy_that_is_only_measured_has_no_gradient():
    model, params = cases.make(cases.QWEN2)
    tokens = cases.tokens()
    settings = {"chunk": 13, "temperature": 0.7}
    without = jax.jit(jax.grad(cases.weighted(model, tokens, entropy=False, **settings)))
    measured = jax.jit(jax.grad(cases.weighted(model, tokens, entropy_gradient=False, **settings)))
    assert cases.scaled_difference(without(params), measured(params)) < 1e-6


def test_the_first_token_has_no_logprob_and_the_rest_are_aligned():
    model, params = cases.make(cases.LLAMA)
    tokens = cases.tokens(rows=2, length=5)
    logp, entropy = models.token_logprobs(model, params, tokens)
    full = jax.nn.log_softmax(models.logits(model, params, tokens))
    assert entropy is None
    assert logp.dtype == jnp.float32
    np.testing.assert_array_equal(logp[:, 0], 0)
    for b, t in ((0, 1), (1, 3), (1, 4)):
        np.testing.assert_allclose(logp[b, t], full[b, t - 1, tokens[b, t]], rtol=1e-5)


def test_bfloat16_hidden_states_give_float32_logprobs_of_the_same_products():
    key = jax.random.split(jax.random.key(0), 2)
    hidden = jax.random.normal(key[0], (2, 6, 16), jnp.bfloat16)
    head = jax.random.normal(key[1], (40, 16), jnp.bfloat16)
    targets = cases.tokens(2, 6, 40)
    logp, _ = models.logprobs_from_hidden(hidden, head, targets, chunk=5)
    wide = jnp.einsum("btd,vd->btv", hidden.astype(jnp.float32), head.astype(jnp.float32))
    exact = jnp.take_along_axis(jax.nn.log_softmax(wide), targets[..., None], axis=2)[..., 0]
    np.testing.assert_allclose(logp, exact, rtol=1e-5, atol=1e-5)


def loss_memory(rows: int, chunk: int, vocab: int = 152_000) -> int:
    """Bytes of temporaries in the gradient of the loss of a model with this vocabulary."""
    hidden = jax.ShapeDtypeStruct((rows, 512, 16), jnp.float32)
    head = jax.ShapeDtypeStruct((vocab, 16), jnp.float32)
    targets = jax.ShapeDtypeStruct((rows, 512), jnp.int32)

    def loss(hidden, head, targets):
        logp, entropy = models.logprobs_from_hidden(hidden, head, targets, chunk=chunk, entropy=True)
        return (logp + entropy).sum()

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(hidden, head, targets).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_memory_grows_with_the_chunk_and_not_with_tokens_times_vocabulary():
    few, many, wide = loss_memory(2, 128), loss_memory(8, 128), loss_memory(8, 256)
    all_logits = 8 * 512 * 152_000 * 4
    assert many < 1.1 * few
    assert wide > 1.5 * many
    assert wide < all_logits / 4


def test_reading_the_logits_once_gives_the_same_normaliser_as_reading_them_twice():
    z = 30 * jax.random.normal(jax.random.key(0), (64, 333))
    z = z.at[0].set(-1e4).at[1].set(88.0).at[2, 5].set(1e4)
    once = jax.jit(functools.partial(logprobs._max_and_sums_at_once, weighted=True))(z)
    twice = logprobs._max_and_sums(z, weighted=True)
    np.testing.assert_array_equal(once[0], twice[0])
    np.testing.assert_allclose(once[1], twice[1], rtol=1e-6)
    np.testing.assert_allclose(once[2], twice[2], rtol=1e-5)
    assert len(logprobs._max_and_sums_at_once(z, weighted=False)) == 2
