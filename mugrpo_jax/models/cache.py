"""Prefill and decode as pure functions over an explicit key-value cache, which the sampler owns."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from mugrpo_jax.models import decoder
from mugrpo_jax.models.attention import Backend, attention
from mugrpo_jax.models.decoder import Decoder
from mugrpo_jax.models.model_config import ModelConfig
from mugrpo_jax.models.rope import rotation
from mugrpo_jax.models.sharding import constrain
from mugrpo_jax.models.weights import Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of every row so far.

    Attributes:
      keys: one array per layer, `[B, S, kv_heads, head_dim]`, rotated. The layers are separate arrays,
        because slicing a stacked cache in a decode loop would copy it.
      values: as `keys`.
      lengths: `[B]` int32, how many entries of each row are filled. Later entries are never read.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    lengths: jax.Array


def empty_cache(config: ModelConfig, rows: int, length: int, dtype: Any = jnp.bfloat16) -> Cache:
    """A cache of zeros with room for `length` tokens in each of `rows` rows."""
    shape = (rows, length, config.num_kv_heads, config.head_dim)
    layers = range(config.num_layers)
    return Cache(
        keys=tuple(jnp.zeros(shape, dtype) for _ in layers),
        values=tuple(jnp.zeros(shape, dtype) for _ in layers),
        lengths=jnp.zeros(rows, jnp.int32),
    )


def cache_bytes(config: ModelConfig, rows: int, length: int, dtype: Any = jnp.bfloat16) -> int:
    """Size of `empty_cache` with these arguments."""
    entry = config.num_kv_heads * config.head_dim * jnp.dtype(dtype).itemsize
    return 2 * config.num_layers * rows * length * entry


def decode_params(params: Params, *, fuse: bool = False) -> Params:
    """The same parameters with the layers as a list of trees, as `prefill` and `decode_step` need them.

    This is done once per generation phase, so that the decode loop does not slice stacked weights at every
    step. With `fuse`, matrices that multiply the same input are joined (`decoder.fuse`); a mesh with `tensor`
    cannot use that.
    """
    layers = decoder.unstack(params["layers"])
    return {**params, "layers": [decoder.fuse(layer) for layer in layers] if fuse else layers}


def decode_weights(model: Decoder, *, fuse: bool = False) -> Any:
    """The declaration of each weight that `decode_params` returns."""
    layer = decoder.layer_weights(model.config, fused=fuse)
    return {**model.weights(), "layers": [layer] * model.config.num_layers}


def prefill(
    model: Decoder, params: Params, tokens: jax.Array, lengths: jax.Array, *, backend: Backend = "auto"
) -> tuple[jax.Array, Cache]:
    """Run right-padded prompts through the model.

    Args:
      model: the decoder.
      params: from `decode_params`.
      tokens: prompts `[B, T]`.
      lengths: their lengths `[B]`, each at least 1.
      backend: attention back end.

    Returns:
      float32 logits `[B, V]` for the token after each prompt, and a cache with `S == T`.
    """
    config = model.config
    rope = rotation(config, jnp.arange(tokens.shape[1])[None])
    keys: list[jax.Array] = []
    values: list[jax.Array] = []

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        keys.append(k)
        values.append(v)
        return attention(q, k, v, backend=backend)

    x = decoder.embed_tokens(params["embed"], tokens)
    for weights in params["layers"]:
        x = decoder.apply_layer(config, weights, x, rope, attend)
    last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)
    return _head(model, params, last), Cache(tuple(keys), tuple(values), lengths.astype(jnp.int32))


def decode_step(
    model: Decoder,
    params: Params,
    cache: Cache,
    tokens: jax.Array,
    *,
    read: int | None = None,
    backend: Backend = "auto",
) -> tuple[jax.Array, Cache]:
    """Append one token to every row.

    Args:
      model: the decoder.
      params: from `decode_params`.
      cache: the rows so far; donate it, so that it is updated in place.
      tokens: the next token of each row `[B]`; its position is `cache.lengths`.
      read: attend to the first `read` cache entries only; later entries are not read from memory. The caller
        ensures `length < read` for every row whose result is used.
      backend: attention back end.

    Returns:
      float32 logits `[B, V]` for the token after it, and the cache with one more entry in every row.
    """
    config = model.config
    rows = jnp.arange(tokens.shape[0])
    at = cache.lengths
    rope = rotation(config, at[:, None])
    keys: list[jax.Array] = []
    values: list[jax.Array] = []

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        layer = len(keys)
        keys.append(cache.keys[layer].at[rows, at].set(k[:, 0], mode="drop"))
        values.append(cache.values[layer].at[rows, at].set(v[:, 0], mode="drop"))
        filled = jnp.minimum(at + 1, read or keys[-1].shape[1])
        return attention(q, keys[-1][:, :read], values[-1][:, :read], lengths=filled, backend=backend)

    x = decoder.embed_tokens(params["embed"], tokens[:, None])
    for weights in params["layers"]:
        x = decoder.apply_layer(config, weights, x, rope, attend)
    return _head(model, params, x), Cache(tuple(keys), tuple(values), at + 1)


def _head(model: Decoder, params: Params, x: jax.Array) -> jax.Array:
    h = decoder.rms_norm(x[:, 0], params["norm"], model.config.norm_eps)
    logits = jnp.einsum("bd,vd->bv", h, model.head_matrix(params), preferred_element_type=jnp.float32)
    return constrain(logits, "batch", "vocab")
