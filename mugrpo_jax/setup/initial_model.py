"""Load the model that the config names: its shape, its tokenizer and its initial weights."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from mugrpo_jax import tasks
from mugrpo_jax.config import RunConfig
from mugrpo_jax.models import ModelConfig
from mugrpo_jax.models.io.loading import (
    LoadedModel,
    load_model,
    model_shape,
    model_tokenizer,
    tiny_model,
    tiny_shape,
)
from mugrpo_jax.models.tokenizer import CharTokenizer, Tokenizer


def run_model_shape(config: RunConfig) -> ModelConfig:
    """Return the shape of the run's model, without reading weights."""
    if config.model.source != "tiny":
        return model_shape(config.model.source)
    return tiny_shape(_tiny_tokenizer(), **_tiny(config))


def run_model_tokenizer(config: RunConfig) -> Tokenizer:
    """Return the run's tokenizer, without reading weights."""
    return _tiny_tokenizer() if config.model.source == "tiny" else model_tokenizer(config.model.source)


def initial_model(config: RunConfig, mesh: Mesh | None, dtype: Any = jnp.float32) -> LoadedModel:
    """Load the run's model with its initial weights, sharded over the mesh."""
    if config.model.source != "tiny":
        return load_model(config.model.source, dtype=dtype, mesh=mesh, seed=config.seed)
    return tiny_model(_tiny_tokenizer(), dtype=dtype, mesh=mesh, seed=config.seed, **_tiny(config))


def _tiny_tokenizer() -> CharTokenizer:
    return CharTokenizer(tasks.ARITHMETIC_ALPHABET)


def _tiny(config: RunConfig) -> dict[str, int]:
    tiny = config.model.tiny
    return dataclasses.asdict(tiny) | {"head_dim": tiny.hidden_size // tiny.num_heads}
