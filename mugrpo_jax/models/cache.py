"""Prefill and decode as pure functions: they receive parameters and a KV cache, and return a new KV cache."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from mugrpo_jax.models import decoder
from mugrpo_jax.models.attention import Backend, attention
from mugrpo_jax.models.decoder import Decoder
from mugrpo_jax.models.eight_bits import StoredMatrix, eight_bit_weight
from mugrpo_jax.models.model_config import ModelConfig
from mugrpo_jax.models.rope import rotation
from mugrpo_jax.models.sharding import constrain
from mugrpo_jax.models.weights import Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """A KV cache for B rows with room for S tokens each.

    Attributes:
      keys: one array `[B, S, kv_heads, head_dim]` per layer, with RoPE applied. The layers are separate
        arrays, because slicing a stacked cache in a decode loop would copy the cache.
      values: one array per layer, with the shape of the keys.
      lengths: `[B]` int32, the number of filled entries in each row. Attention ignores all later entries.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    lengths: jax.Array


def empty_cache(config: ModelConfig, rows: int, length: int, dtype: Any = jnp.bfloat16) -> Cache:
    """Return a KV cache of zeros with room for `length` tokens in each of `rows` rows."""
    shape = (rows, length, config.num_kv_heads, config.head_dim)
    keys, values = (tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers)) for _ in range(2))
    return Cache(keys, values, lengths=jnp.zeros(rows, jnp.int32))


def cache_bytes(config: ModelConfig, rows: int, length: int, dtype: Any = jnp.bfloat16) -> int:
    """Return how many bytes the keys and values of `empty_cache` take with these arguments."""
    entry = config.num_kv_heads * config.head_dim * jnp.dtype(dtype).itemsize
    return 2 * config.num_layers * rows * length * entry


def weight_bytes(config: ModelConfig, dtype: Any, matrices: Any = None) -> int:
    """Return how many bytes the weights take in `dtype`, with the layers' matrices in the dtype `matrices`.

    `matrices` None means that they are in `dtype` too. Otherwise every column has a scale in float32.
    """
    size = jnp.dtype(dtype).itemsize
    total = config.num_params * size
    if matrices is None:
        return total
    shapes = [w.shape for w in decoder.layer_weights(config).values() if len(w.shape) == 2]
    saved = size - jnp.dtype(matrices).itemsize
    return total - config.num_layers * sum(rows * columns * saved - 4 * columns for rows, columns in shapes)


def decode_params(params: Params, *, fuse: bool = False) -> Params:
    """Convert parameters for `prefill` and `decode_step`: the stacked layers become a list of trees.

    Call this function once per generation phase, so that the decode loop does not slice stacked weights in
    every step. `fuse=True` also joins matrices with `decoder.fuse`, which needs a mesh with `tensor=1`.
    """
    layers = decoder.unstack(params["layers"])
    return {**params, "layers": [decoder.fuse(layer) for layer in layers] if fuse else layers}


def decode_weights(model: Decoder, *, fuse: bool = False, eight_bits: bool = False) -> Any:
    """Return the `Weight` of each parameter that `decode_params` returns, in a tree with the same keys.

    With `eight_bits`, every matrix of a layer is a `StoredMatrix`, as `stored_layer` makes it.
    """
    layer: Params = dict(decoder.layer_weights(model.config, fused=fuse))
    if eight_bits:
        for name, weight in layer.items():
            layer[name] = StoredMatrix(**eight_bit_weight(weight)) if len(weight.shape) == 2 else weight
    return {**model.weights(), "layers": [layer] * model.config.num_layers}


def prefill(
    model: Decoder, params: Params, tokens: jax.Array, lengths: jax.Array, *, backend: Backend = "auto"
) -> tuple[jax.Array, Cache]:
    """Run right-padded prompts `tokens [B, T]` through the model.

    `params` come from `decode_params`, and `lengths [B]` are the lengths of the prompts, each at least 1.
    Return float32 logits `[B, V]` for the token after each prompt, and a KV cache with `S == T`.
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
    """Append one token to every row of the KV cache and compute the logits for the token after it.

    `params` come from `decode_params`. `tokens [B]` are the appended tokens, at positions `cache.lengths`.
    Donate `cache` to `jax.jit`, so that it is updated in place. With `read`, attention loads only the first
    `read` entries of each row from memory. The caller then ensures that `cache.lengths` is less than `read`
    in every row whose result is used. Return float32 logits `[B, V]` and the new KV cache.
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


def append_tokens(
    model: Decoder,
    params: Params,
    cache: Cache,
    rows: jax.Array,
    tokens: jax.Array,
    counts: jax.Array,
) -> Cache:
    """Append several tokens to some rows of the KV cache; what these rows hold already is only read.

    Args:
      params: from `decode_params`.
      cache: the whole cache; `cache.lengths [M]` are the filled entries of the M chosen rows alone.
      rows: `[M]` int32, the numbers of the chosen rows, all different. Numbers beyond the last are ignored.
      tokens: `[M, T]` int32, the appended tokens, right-padded.
      counts: `[M]` int32, how many of the T tokens to append.
    """
    config = model.config
    starts, size = cache.lengths, cache.keys[0].shape[1]
    places = starts[:, None] + jnp.arange(tokens.shape[1])
    rope = rotation(config, places)
    written = jnp.where(jnp.arange(tokens.shape[1]) < counts[:, None], places, size)  # padding is dropped
    seen = jnp.arange(size) <= places[..., None]
    keys: list[jax.Array] = []
    values: list[jax.Array] = []

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        layer = len(keys)
        keys.append(cache.keys[layer].at[rows[:, None], written].set(k, mode="drop"))
        values.append(cache.values[layer].at[rows[:, None], written].set(v, mode="drop"))
        k, v = (array.at[rows].get(mode="clip") for array in (keys[-1], values[-1]))
        return jax.nn.dot_product_attention(q, k, v, mask=seen[:, None], implementation="xla")

    x = decoder.embed_tokens(params["embed"], tokens)
    for weights in params["layers"]:
        x = decoder.apply_layer(config, weights, x, rope, attend)
    return Cache(tuple(keys), tuple(values), starts + counts)


def _head(model: Decoder, params: Params, x: jax.Array) -> jax.Array:
    h = decoder.rms_norm(x[:, 0], params["norm"], model.config.norm_eps)
    logits = jnp.einsum("bd,vd->bv", h, model.head_matrix(params), preferred_element_type=jnp.float32)
    return constrain(logits, "batch", "vocab")
