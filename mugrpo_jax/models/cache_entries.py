"""The keys or the values of one layer in a KV cache: an array, or values in 8 bits with their scales.

Both have the same operations here, so that `cache.py` and the sampler do not ask which of them a cache has.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from mugrpo_jax.models.attention import Backend, attention
from mugrpo_jax.models.eight_bits import in_eight_bits
from mugrpo_jax.models.sharding import current_mesh, spec


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
      read: load only the first `read` entries of each row.
    """
    keys, values = _first(keys, read), _first(values, read)
    if not isinstance(keys, Rounded):
        return attention(q, keys, values, lengths=lengths, backend=backend)
    seen = jnp.arange(length(keys)) < lengths[:, None]
    return attend_masked(q, keys, values, seen[:, None])


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
