"""Prefill and decode as pure functions: they receive parameters and a KV cache, and return a new KV cache."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from mugrpo_jax.models import cache_entries, decoder
from mugrpo_jax.models.attention import Backend, attention
from mugrpo_jax.models.cache_entries import Entries
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
      keys: one array `[B, S, kv_heads, head_dim]` per layer, with RoPE applied, or `Rounded` entries. The
        layers are separate, because slicing a stacked cache in a decode loop would copy the cache.
      values: likewise, with the shape of the keys.
      lengths: `[B]` int32, the number of filled entries in each row. Attention ignores all later entries.
    """

    keys: tuple[Entries, ...]
    values: tuple[Entries, ...]
    lengths: jax.Array


def empty_cache(config: ModelConfig, rows: int, length: int, dtype: Any = jnp.bfloat16) -> Cache:
    """Return a KV cache of zeros with room for `length` tokens in each of `rows` rows.

    With the dtype int8, its entries are rounded to 8 bits; see `cache_entries.Rounded`.
    """

    def layers() -> tuple[Entries, ...]:
        shape = rows, length, config.num_kv_heads, config.head_dim
        return tuple(cache_entries.empty(*shape, dtype) for _ in range(config.num_layers))

    return Cache(layers(), layers(), lengths=jnp.zeros(rows, jnp.int32))


def cache_bytes(config: ModelConfig, rows: int, length: int, dtype: Any = jnp.bfloat16) -> int:
    """Return how many bytes the keys and values of `empty_cache` take with these arguments."""
    scale = 4 if jnp.dtype(dtype) == jnp.int8 else 0
    entry = config.num_kv_heads * (config.head_dim * jnp.dtype(dtype).itemsize + scale)
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
    model: Decoder,
    params: Params,
    tokens: jax.Array,
    lengths: jax.Array,
    *,
    eight_bits: bool = False,
    backend: Backend = "auto",
) -> tuple[jax.Array, Cache]:
    """Run right-padded prompts `tokens [B, T]` through the model.

    `params` come from `decode_params`, and `lengths [B]` are the lengths of the prompts, each at least 1.
    With `eight_bits`, keys and values are rounded to 8 bits before attention reads them, as in decoding.
    Return float32 logits `[B, V]` for the token after each prompt, and a KV cache with `S == T`.
    """
    config = model.config
    rope = rotation(config, jnp.arange(tokens.shape[1])[None])
    keys: list[Entries] = []
    values: list[Entries] = []

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        keys.append(cache_entries.rounded(k) if eight_bits else k)
        values.append(cache_entries.rounded(v) if eight_bits else v)
        k, v = (cache_entries.widened(entries[-1], q.dtype) for entries in (keys, values))
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
    at = cache.lengths
    rope = rotation(config, at[:, None])
    filled = jnp.minimum(at + 1, read or cache_entries.length(cache.keys[0]))
    keys: list[Entries] = []
    values: list[Entries] = []

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        layer = len(keys)
        keys.append(cache_entries.append(cache.keys[layer], at, k[:, 0]))
        values.append(cache_entries.append(cache.values[layer], at, v[:, 0]))
        return cache_entries.attend(q, keys[-1], values[-1], filled, read=read, backend=backend)

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
    starts, size = cache.lengths, cache_entries.length(cache.keys[0])
    places = starts[:, None] + jnp.arange(tokens.shape[1])
    rope = rotation(config, places)
    written = jnp.where(jnp.arange(tokens.shape[1]) < counts[:, None], places, size)  # padding is dropped
    seen = jnp.arange(size) <= places[..., None]
    keys: list[Entries] = []
    values: list[Entries] = []

    def chosen(entries: Entries) -> Entries:
        return jax.tree.map(lambda array: array.at[rows].get(mode="clip"), entries)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        layer = len(keys)
        keys.append(cache_entries.write(cache.keys[layer], rows[:, None], written, k))
        values.append(cache_entries.write(cache.values[layer], rows[:, None], written, v))
        return cache_entries.attend_masked(q, chosen(keys[-1]), chosen(values[-1]), seen)

    x = decoder.embed_tokens(params["embed"], tokens)
    for weights in params["layers"]:
        x = decoder.apply_layer(config, weights, x, rope, attend)
    return Cache(tuple(keys), tuple(values), starts + counts)


def _head(model: Decoder, params: Params, x: jax.Array) -> jax.Array:
    h = decoder.rms_norm(x[:, 0], params["norm"], model.config.norm_eps)
    logits = jnp.einsum("bd,vd->bv", h, model.head_matrix(params), preferred_element_type=jnp.float32)
    return constrain(logits, "batch", "vocab")
