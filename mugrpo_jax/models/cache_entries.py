"""The keys or the values of one layer in a KV cache: an array, or values in 8 bits with their scales.

Both have the same operations here, so that `cache.py` and the sampler do not ask which of them a cache has.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from mugrpo_jax.models.attention import Backend, attention, on_cpu, resolve_backend
from mugrpo_jax.models.eight_bits import in_eight_bits
from mugrpo_jax.models.sharding import current_mesh, spec

PART = 256  # entries in a part of `_attend_in_parts`


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rounded:
    """Entries in 8 bits. What an entry stands for is its value times its scale.

    Attributes:
      values: `[B, S, kv_heads, head_dim]` int8.
      scales: `[B, kv_heads, S]` float32, one for every token and head. The tokens come last, because a TPU
        pads the last axis to 128.
    """

    values: Any
    scales: Any


Entries = Any  # an array `[B, S, kv_heads, head_dim]`, or `Rounded`


def empty(rows: int, length: int, kv_heads: int, head_dim: int, dtype: Any) -> Entries:
    """Return entries of zeros; with the dtype int8 they are `Rounded`."""
    values = jnp.zeros((rows, length, kv_heads, head_dim), dtype)
    if values.dtype != jnp.int8:
        return values
    return Rounded(values, jnp.zeros((rows, kv_heads, length), jnp.float32))


def rounded(entries: jax.Array) -> Rounded:
    """Round entries `[B, T, kv_heads, head_dim]` to 8 bits."""
    parts = in_eight_bits(entries, axis=-1)
    return Rounded(parts["values"], parts["scales"][..., 0].swapaxes(1, 2))


def widened(entries: Entries, dtype: Any) -> jax.Array:
    """Return what entries stand for, as an array of this dtype."""
    if not isinstance(entries, Rounded):
        return entries.astype(dtype)
    return (entries.values * entries.scales.swapaxes(1, 2)[..., None]).astype(dtype)


def length(entries: Entries) -> int:
    """Return S, the room for tokens in each row."""
    return int((entries.values if isinstance(entries, Rounded) else entries).shape[1])


def write(entries: Entries, rows: jax.Array, places: jax.Array, new: jax.Array) -> Entries:
    """Put `new` `[..., kv_heads, head_dim]` at these rows and places, two arrays that broadcast to `[...]`.

    Rows and places beyond the last are ignored.
    """
    if not isinstance(entries, Rounded):
        return entries.at[rows, places].set(new, mode="drop")
    parts = in_eight_bits(new, axis=-1)
    return Rounded(
        entries.values.at[rows, places].set(parts["values"], mode="drop"),
        entries.scales.at[rows, :, places].set(parts["scales"][..., 0], mode="drop"),
    )


def append(entries: Entries, places: jax.Array, new: jax.Array) -> Entries:
    """Put `new` `[B, kv_heads, head_dim]` at `places` `[B]`, one in each row. Ignore those beyond the last.

    This is `write` for all rows. On a TPU, writing a few scales would move the short axis `kv_heads` to the
    end, where it is padded. So all scales are written, which are few bytes beside the values.
    """
    rows = jnp.arange(len(places))
    if not isinstance(entries, Rounded):
        return write(entries, rows, places, new)
    parts = in_eight_bits(new, axis=-1)
    here = jnp.arange(length(entries)) == places[:, None, None]
    values = entries.values.at[rows, places].set(parts["values"], mode="drop")
    return Rounded(values, jnp.where(here, parts["scales"], entries.scales))


def insert(entries: Entries, rows: jax.Array, prompts: Entries) -> Entries:
    """Put whole prompts, one for each of `rows` `[M]`, at the first places. Ignore rows beyond the last."""
    first = slice(length(prompts))

    def put(old: jax.Array, at: Any, new: jax.Array) -> jax.Array:
        return old.at[at].set(new, mode="drop", unique_indices=True)

    if not isinstance(entries, Rounded):
        return put(entries, (rows, first), prompts)
    values = put(entries.values, (rows, first), prompts.values)
    return Rounded(values, put(entries.scales, (rows, slice(None), first), prompts.scales))


def attend(
    q: jax.Array,
    keys: Entries,
    values: Entries,
    lengths: jax.Array,
    *,
    read: int | None = None,
    backend: Backend = "auto",
) -> jax.Array:
    """Compute attention of one query `q` `[B, 1, heads, head_dim]` per row to the filled entries of the row.

    Args:
      lengths: `[B]`, the number of filled entries.
      read: load only the first `read` entries of each row. On a CPU, arrays are loaded as far as needed.
    """
    if not isinstance(keys, Rounded):
        backend = resolve_backend(backend, q.dtype, decode=True)
        if backend == "xla" and on_cpu() and length(keys) > PART:
            return _attend_in_parts(q, keys, values, lengths)
        return attention(q, _first(keys, read), _first(values, read), lengths=lengths, backend=backend)
    keys, values = _first(keys, read), _first(values, read)
    seen = jnp.arange(length(keys)) < lengths[:, None]
    return attend_masked(q, keys, values, seen[:, None])


def _attend_in_parts(q: jax.Array, keys: jax.Array, values: jax.Array, lengths: jax.Array) -> jax.Array:
    """Compute `attend` in a loop over parts of the entries that ends behind the longest row.

    A CPU rounds a sum differently if it has more terms, even if these are 0. Here a part without entries of a
    row changes nothing in this row, so its result does not depend on other rows, not in a single bit.
    """
    room, scale = keys.shape[1], q.shape[-1] ** -0.5
    groups = q.reshape(q.shape[0], keys.shape[2], -1, q.shape[-1])
    State = tuple[jax.Array, jax.Array, jax.Array, jax.Array]

    def any_left(state: State) -> jax.Array:
        return state[0] < lengths.max()

    def add_part(state: State) -> State:
        done, largest, total, sums = state
        start = jnp.minimum(done, room - PART)  # the last part may begin among entries that are done
        k, v = (jax.lax.dynamic_slice_in_dim(entries, start, PART, axis=1) for entries in (keys, values))
        places = start + jnp.arange(PART)
        seen = (places >= done) & (places < lengths[:, None])
        scores = jnp.einsum("bkgd,bskd->bkgs", groups, k, preferred_element_type=jnp.float32) * scale
        scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
        new = jnp.maximum(largest, scores.max(-1, keepdims=True))
        weights, kept = jnp.exp(scores - new), jnp.exp(largest - new)
        weighted = jnp.einsum(
            "bkgs,bskd->bkgd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
        )
        return done + PART, new, total * kept + weights.sum(-1, keepdims=True), sums * kept + weighted

    lowest = jnp.full((*groups.shape[:-1], 1), jnp.finfo(jnp.float32).min)
    empty = jnp.int32(0), lowest, jnp.zeros_like(lowest), jnp.zeros(groups.shape, jnp.float32)
    _, _, total, sums = jax.lax.while_loop(any_left, add_part, empty)
    return (sums / total).astype(q.dtype).reshape(q.shape)


def attend_masked(q: jax.Array, keys: Entries, values: Entries, seen: jax.Array) -> jax.Array:
    """Compute attention of `q` `[B, T, heads, head_dim]` to the entries that `seen` `[B, T, S]` marks.

    The scales multiply the scores and the weights, not the entries. So no wide copy of the entries is made.
    """
    if not isinstance(keys, Rounded):
        return jax.nn.dot_product_attention(q, keys, values, mask=seen[:, None], implementation="xla")
    batch, tokens, heads, width = q.shape
    kv_heads = keys.scales.shape[1]
    groups = q.reshape(batch, tokens, kv_heads, heads // kv_heads, width)

    def scaled(scores: jax.Array, scales: jax.Array) -> jax.Array:
        return scores * scales[:, :, None, None]

    wide_keys, wide_values = (entries.values.astype(q.dtype) for entries in (keys, values))
    scores = jnp.einsum("btkgd,bskd->bkgts", groups, wide_keys, preferred_element_type=jnp.float32)
    scores = jnp.where(seen[:, None, None], scaled(scores, keys.scales) * width**-0.5, -jnp.inf)
    weights = scaled(jax.nn.softmax(scores), values.scales).astype(q.dtype)
    return jnp.einsum("bkgts,bskd->btkgd", weights, wide_values).reshape(q.shape)


def pinned(entries: Entries) -> Entries:
    """Keep the sharding of entries."""
    if current_mesh() is None:
        return entries
    return jax.tree.map(jax.lax.with_sharding_constraint, entries, specs(entries))


def specs(entries: Any) -> Any:
    """Return the `PartitionSpec` of each array of entries: the mesh splits the rows and the heads."""
    values = spec("batch", None, "kv_heads")
    return Rounded(values, spec("batch", "kv_heads")) if isinstance(entries, Rounded) else values


def _first(entries: Entries, count: int | None) -> Entries:
    if not isinstance(entries, Rounded):
        return entries[:, :count]
    return Rounded(entries.values[:, :count], entries.scales[..., :count])
