"""Small models of every family, shared by the tests of the policy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from mugrpo_jax import models
from mugrpo_jax.models import ModelConfig, RopeScaling

LLAMA = ModelConfig(
    vocab_size=48,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=40,
    rope_scaling=RopeScaling(8.0, 1.0, 4.0, 16),
)
QWEN2 = dataclasses.replace(LLAMA, rope_scaling=None, qkv_bias=True, tie_embeddings=False)
QWEN3 = dataclasses.replace(LLAMA, rope_scaling=None, qk_norm=True, head_dim=16, num_kv_heads=4)
FAMILIES = {"llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3}


def make(config: ModelConfig, seed: int = 0):
    """A model with random weights, also in the stacked biases, which start at zero: every part matters."""
    model, params = models.create(config, seed=seed)
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
    noisy = [
        leaf + 0.05 * jax.random.normal(key, leaf.shape) if leaf.ndim > 1 else leaf
        for key, leaf in zip(keys, leaves)
    ]
    return model, jax.tree.unflatten(tree, noisy)


def tokens(rows: int = 4, length: int = 19, vocab: int = 48, seed: int = 0) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), (rows, length), 0, vocab)


def scaled_difference(a, b) -> float:
    """Largest difference of two trees, each leaf relative to its own largest entry."""
    a, b = jax.device_get(a), jax.device_get(b)
    differences = jax.tree.map(lambda x, y: np.abs(x - y).max() / max(np.abs(x).max(), 1e-6), a, b)
    return max(jax.tree.leaves(differences))


def weighted(model, tokens, *, entropy=True, **options):
    """A scalar of all log-probs (and entropies), to differentiate."""
    weights = jax.random.normal(jax.random.key(7), (2, *tokens.shape))

    def value(params):
        logp, ent = models.token_logprobs(model, params, tokens, entropy=entropy, **options)
        total = (logp * weights[0]).sum()
        return total + (ent * weights[1]).sum() if entropy else total

    return value


def full_logits_value(model, tokens, *, temperature=1.0):
    """The same scalar as `weighted`, from full logits and autodiff."""
    weights = jax.random.normal(jax.random.key(7), (2, *tokens.shape))

    def value(params):
        logp = jax.nn.log_softmax(models.logits(model, params, tokens) / temperature)[:, :-1]
        picked = jnp.take_along_axis(logp, tokens[:, 1:, None], axis=2)[..., 0]
        entropy = -(jnp.exp(logp) * logp).sum(-1)
        return (picked * weights[0, :, 1:]).sum() + (entropy * weights[1, :, 1:]).sum()

    return value
