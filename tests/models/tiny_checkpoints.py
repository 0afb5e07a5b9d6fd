"""Random tiny checkpoints of every family, for tests that need one on disk."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mugrpo_jax.models import ModelConfig, RopeScaling, decoder
from mugrpo_jax.models.io import huggingface_export as hf_export
from mugrpo_jax.models.tokenizer import CharTokenizer, Tokenizer

_BASE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "max_positions": 128,
}
FAMILIES = {
    "llama-tied": ModelConfig(**_BASE, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 32)),
    "llama-untied": ModelConfig(**_BASE, tie_embeddings=False),
    "qwen2-tied": ModelConfig(**_BASE, qkv_bias=True),
    "qwen2-untied": ModelConfig(**_BASE, qkv_bias=True, tie_embeddings=False),
    "qwen3-tied": ModelConfig(**(_BASE | {"head_dim": 16}), qk_norm=True),
    "qwen3-untied": ModelConfig(**(_BASE | {"head_dim": 16}), qk_norm=True, tie_embeddings=False),
}
TOKENIZER = CharTokenizer("0123456789+-*/=() \nabcdefghijklmnopqrstuvwxyz")


def random_params(config: ModelConfig, *, seed: int = 0, dtype: Any = jnp.float32) -> tuple[Any, Any]:
    """Every weight random: norms are not ones and biases not zeros, so that none can be left out unseen."""
    model, shapes = decoder.abstract(config)
    rng = np.random.default_rng(seed)

    def draw(path: tuple[Any, ...], leaf: Any) -> jax.Array:
        centre = 1.0 if "norm" in path[-1].key else 0.0
        return jnp.asarray(centre + 0.2 * rng.standard_normal(leaf.shape, np.float32), dtype)

    return model, jax.tree.map_with_path(draw, shapes)


def write(
    folder: Path,
    config: ModelConfig,
    *,
    seed: int = 0,
    dtype: Any = jnp.bfloat16,
    tokenizer: Tokenizer | None = TOKENIZER,
    **options: Any,
) -> tuple[Any, Any]:
    """Save a random checkpoint and return its `(model, params)`."""
    model, params = random_params(config, seed=seed, dtype=dtype)
    hf_export.save_huggingface(params, folder, config=config, tokenizer=tokenizer, **options)
    return model, params
