"""The jitted programs of the sampler, and the arrays that are their inputs and outputs.

`run_prompts` computes the KV cache of a batch of prompts (prefill). `insert` copies rows of this cache into
slots. `decode` samples a bounded number of tokens in all slots. The prefill samples no token. Instead, the
first decode step feeds the last prompt token to the model again and samples the first response token from
these logits. So prompts with one token and several samples of one prompt need no special case.

`keep_rows` drops the free slots when no samples wait, so that the last responses are decoded in fewer slots.

`extend` is only for responses of several turns: it puts the message of an environment behind what a slot's
KV cache holds, and lets the slot sample again.
"""

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mugrpo_jax.models import (
    Cache,
    Decoder,
    append_tokens,
    cache_entries,
    decode_step,
    prefill,
)
from mugrpo_jax.models.cache_entries import Entries
from mugrpo_jax.models.sharding import MESH_AXES, constrain, current_mesh, spec
from mugrpo_jax.sampling.logits import draw, token_keys, transform_logits
from mugrpo_jax.sampling.requests import MAX_STOPS
from mugrpo_jax.sampling.sampler_plan import SamplerPlan

# A device loop has at least this many steps, so that short responses do not interrupt the device too often.
_FEWEST_STEPS = 4
_MESSAGE_FACTS = 5  # numbers before the tokens in an entry of `extend`


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """The state of the sample in each of the N slots. The comment after each field describes its array."""

    lengths: Any  # [N] int32, filled entries in the KV cache; 0 in a free slot makes its attention cheap
    tokens: Any  # [N] int32, the token to feed to the model next
    left: Any  # [N] int32, how many more tokens may be sampled; 0 means that the slot is free
    keys: Any  # [N, 2] uint32, raw PRNG key of the sample
    temperature: Any  # [N] float32, 0 means greedy
    top_k: Any  # [N] int32, 0 means no top-k
    top_p: Any  # [N] float32, 1 means no top-p
    stops: Any  # [N, MAX_STOPS] int32, token ids that end the response, padded with -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
    """All arrays that the sampler keeps on the device, except the weights.

    `keys` and `values` are the KV cache: `Entries` of N rows per layer, see `models.Cache`.
    """

    keys: tuple[Any, ...]
    values: tuple[Any, ...]
    rows: Rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Emitted:
    """The output of one device loop, which is one call of `decode`.

    `tokens` `[steps, N]` int32 is -1 where a slot was free or the loop had already ended; `logprobs` has the
    same shape. `state` `[N + 1]` int32 is `Rows.left` after the loop, followed by the number of decode steps.
    It is one array, so that the host needs one transfer to know which slots are free.
    """

    tokens: Any
    logprobs: Any
    state: Any


@functools.partial(jax.jit, static_argnames="plan")
def free_slots(plan: SamplerPlan) -> Slots:
    """Return the slots of a plan, all of them free. It is jitted, so that one program makes all arrays."""
    slots = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract_slots(plan))
    return _pinned(dataclasses.replace(slots, rows=jax.tree.map(jnp.asarray, free_rows(plan.slots))))


@functools.partial(jax.jit, static_argnames=("model", "eight_bits"))
def run_prompts(
    model: Decoder, params: Any, tokens: jax.Array, lengths: jax.Array, *, eight_bits: bool
) -> Cache:
    """Return the KV cache of B right-padded prompts: `tokens` is `[B, T]`, `lengths` `[B]` their lengths."""
    return prefill(model, params, tokens, lengths, eight_bits=eight_bits)[1]


@functools.partial(jax.jit, donate_argnames="slots")
def insert(slots: Slots, prompts: Cache, entries: jax.Array) -> Slots:
    """Start samples in free slots; return the new slots, which reuse the memory of the donated `slots`.

    Args:
      prompts: the KV cache from `run_prompts`.
      entries: from `pack_entries`. Their slots must all be different. An entry whose slot number is beyond
        the last slot is ignored.
    """
    target, source, rows = _unpack_entries(entries)

    def put(cache: Entries, prompt: Entries) -> Entries:
        return cache_entries.insert(cache, target, jax.tree.map(lambda array: array[source], prompt))

    def replace(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[target].set(new, mode="drop", unique_indices=True)

    return _pinned(
        Slots(
            keys=tuple(map(put, slots.keys, prompts.keys)),
            values=tuple(map(put, slots.values, prompts.values)),
            rows=jax.tree.map(replace, slots.rows, rows),
        )
    )


@jax.jit
def keep_rows(layer: Entries, rows: jax.Array) -> Entries:
    """Return some slots of the keys or the values of one layer.

    Args:
      layer: the entries of N slots.
      rows: `[parts, M]` int32. The mesh divides the slots into parts of N / parts slots. Row p has the
        numbers of M slots of part p, counted from the part's first slot. So no data moves between devices.
    """

    def keep(layer: Entries, rows: jax.Array) -> Entries:
        return jax.tree.map(lambda array: array[rows[0]], layer)

    mesh = current_mesh()
    if mesh is None:
        return keep(layer, rows)
    specs = cache_entries.specs(layer)
    return jax.shard_map(keep, mesh=mesh, in_specs=(specs, spec("batch")), out_specs=specs)(layer, rows)


@functools.partial(jax.jit, static_argnames="model", donate_argnames="slots")
def extend(model: Decoder, params: Any, slots: Slots, entries: jax.Array) -> Slots:
    """Append a message to the KV cache of some slots, and let these slots sample again.

    Args:
      params: from `sampling_params`.
      slots: donated, so that the new slots reuse their memory.
      entries: `[M, 5 + T]` int32, one row from `pack_message` per message, as `no_messages` describes.
    """
    target, start, count, token, left = entries[:, :_MESSAGE_FACTS].T
    cache = Cache(slots.keys, slots.values, start)
    cache = append_tokens(model, params, cache, target, entries[:, _MESSAGE_FACTS:], count)

    def replace(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[target].set(new, mode="drop", unique_indices=True)

    rows = dataclasses.replace(
        slots.rows,
        lengths=replace(slots.rows.lengths, start + count),
        tokens=replace(slots.rows.tokens, token),
        left=replace(slots.rows.left, left),
    )
    return _pinned(Slots(cache.keys, cache.values, rows))


@functools.partial(
    jax.jit, static_argnames=("model", "steps", "read", "top_k", "top_p", "keep"), donate_argnames="slots"
)
def decode(
    model: Decoder,
    params: Any,
    slots: Slots,
    refill_at: jax.Array,
    *,
    steps: int,
    read: int,
    top_k: bool,
    top_p: bool,
    keep: bool,
) -> tuple[Slots, Emitted]:
    """Sample up to `steps` tokens in every busy slot; return the new slots and the sampled tokens.

    Args:
      params: from `sampling_params`.
      slots: donated, so that the new slots reuse their memory.
      refill_at: end early if this many slots are free. The loop always ends if all slots are free.
      steps: maximum number of decode steps.
      read: how many cache entries attention reads. No sequence may become longer than this in the loop.
      top_k: whether any request uses top-k; False leaves the top-k computation out of the program.
      top_p: the same for top-p.
      keep: whether the KV cache of a slot must stay whole after its turn, because another turn may follow. A
        step also writes an entry in slots that sample nothing: at their length, or without `keep` at place 0.
    """
    count = slots.rows.left.shape[0]

    def goes_on(carry: tuple[jax.Array, Slots, jax.Array, jax.Array]) -> jax.Array:
        step, slots, _, _ = carry
        free = (slots.rows.left == 0).sum()
        return (step < steps) & (free < count) & ((free < refill_at) | (step < _FEWEST_STEPS))

    def advance(carry: tuple[jax.Array, Slots, jax.Array, jax.Array]) -> tuple[Any, ...]:
        step, slots, tokens, logprobs = carry
        rows = slots.rows
        cache = Cache(slots.keys, slots.values, rows.lengths)
        logits, cache = decode_step(model, params, cache, rows.tokens, read=read)
        token, logp = _sample(logits, rows, top_k, top_p)
        busy = rows.left > 0
        stopped = (token[:, None] == rows.stops).any(-1)
        left = jnp.where(busy & ~stopped, rows.left - 1, 0)
        longer = rows.lengths + 1
        lengths = jnp.where(busy, longer, rows.lengths) if keep else jnp.where(left > 0, longer, 0)
        rows = dataclasses.replace(rows, lengths=lengths, tokens=token, left=left)
        slots = Slots(cache.keys, cache.values, rows)
        tokens = tokens.at[step].set(jnp.where(busy, token, -1))
        return step + 1, slots, tokens, logprobs.at[step].set(logp)

    empty = jnp.full((steps, count), -1, jnp.int32), jnp.zeros((steps, count), jnp.float32)
    step, slots, tokens, logprobs = jax.lax.while_loop(goes_on, advance, (jnp.int32(0), slots, *empty))
    state = constrain(jnp.append(slots.rows.left, step), None)
    return _pinned(slots), Emitted(tokens, logprobs, state)


def _sample(logits: jax.Array, rows: Rows, top_k: bool, top_p: bool) -> tuple[jax.Array, jax.Array]:
    if current_mesh() is not None:
        # Give each device whole rows of the logits, so that the draw needs no communication.
        logits = jax.lax.with_sharding_constraint(logits, P(MESH_AXES, None))
    z = transform_logits(
        logits, rows.temperature, rows.top_k if top_k else None, rows.top_p if top_p else None
    )
    token, logp = draw(token_keys(rows.keys, rows.lengths + 1), z, rows.temperature == 0)
    return constrain(token, "batch"), constrain(logp, "batch")


def _pinned(slots: Slots) -> Slots:
    """Keep the shardings of the slots, because the next program is compiled for these shardings."""
    keys, values = (tuple(map(cache_entries.pinned, layers)) for layers in (slots.keys, slots.values))
    return Slots(keys, values, jax.tree.map(lambda x: constrain(x, "batch"), slots.rows))


def free_rows(count: int) -> Rows:
    """Return the `Rows` of `count` free slots, as NumPy arrays."""
    return Rows(
        lengths=np.zeros(count, np.int32),
        tokens=np.zeros(count, np.int32),
        left=np.zeros(count, np.int32),
        keys=np.zeros((count, 2), np.uint32),
        temperature=np.ones(count, np.float32),
        top_k=np.zeros(count, np.int32),
        top_p=np.ones(count, np.float32),
        stops=np.full((count, MAX_STOPS), -1, np.int32),
    )


def pack_entries(target: np.ndarray, source: np.ndarray, rows: Rows) -> np.ndarray:
    """Pack M samples for `insert` into one int32 array `[M, columns]`, which needs only one transfer.

    Args:
      target: `[M]` int32, the slot of each sample; it becomes column 0.
      source: `[M]` int32, the row of the sample's prompt in the cache from `run_prompts`.
      rows: the initial state of the M samples.
    """
    columns = [leaf.reshape(len(leaf), -1).view(np.int32) for leaf in jax.tree.leaves((target, source, rows))]
    return np.concatenate(columns, axis=1)


def no_entries(plan: SamplerPlan) -> np.ndarray:
    """Return entries for `insert` that it ignores, because their slots are beyond the last slot."""
    beyond = np.arange(plan.slots, plan.slots + plan.inserts, dtype=np.int32)
    return pack_entries(beyond, np.zeros(plan.inserts, np.int32), free_rows(plan.inserts))


def pack_message(size: int, slot: int, start: int, tokens: np.ndarray, left: int) -> np.ndarray:
    """Return an entry of `extend`: append `tokens` except the last, which the next decode step feeds.

    Args:
      size: T, the number of tokens that an entry has room for.
      start: the number of filled cache entries.
      left: how many tokens may be sampled afterwards.
    """
    count = len(tokens) - 1
    entry = np.zeros(_MESSAGE_FACTS + size, np.int32)
    entry[:_MESSAGE_FACTS] = slot, start, count, tokens[-1], left
    entry[_MESSAGE_FACTS : _MESSAGE_FACTS + count] = tokens[:-1]
    return entry


def no_messages(plan: SamplerPlan) -> np.ndarray:
    """Return entries for `extend` that it ignores, because their slots are beyond the last slot.

    The columns are the slot, its filled cache entries, the number of tokens to append, the token to feed
    next, the number of tokens that may be sampled, and the appended tokens.
    """
    entries = np.zeros((plan.message_rows, _MESSAGE_FACTS + plan.message_tokens), np.int32)
    entries[:, 0] = np.arange(plan.slots, plan.slots + plan.message_rows)
    return entries


def _unpack_entries(entries: jax.Array) -> tuple[jax.Array, jax.Array, Rows]:
    count = len(entries)
    like, tree = jax.tree.flatten((np.zeros(count, np.int32), np.zeros(count, np.int32), free_rows(count)))
    ends = np.cumsum([leaf.size // count for leaf in like])
    columns = jnp.split(entries, ends[:-1], axis=1)
    leaves = [
        jax.lax.bitcast_convert_type(column, leaf.dtype).reshape(leaf.shape)
        for column, leaf in zip(columns, like)
    ]
    return jax.tree.unflatten(tree, leaves)


def abstract_slots(plan: SamplerPlan) -> Slots:
    """Return the `Slots` of a plan as `jax.ShapeDtypeStruct`s with shardings."""
    config = plan.config
    shape = plan.slots, plan.cache_length, config.num_kv_heads, config.head_dim
    layer = jax.eval_shape(lambda: cache_entries.empty(*shape, plan.cache_dtype))

    def placed(x: Any, spec: P) -> jax.ShapeDtypeStruct:
        sharding = None if plan.mesh is None else NamedSharding(plan.mesh, spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    layers = (jax.tree.map(placed, layer, cache_entries.specs(layer)),) * config.num_layers
    rows = jax.tree.map(lambda x: placed(x, spec("batch")), free_rows(plan.slots))
    return Slots(layers, layers, rows)


def mesh_of(plan: SamplerPlan) -> Any:
    """Return the context manager in which the programs of a plan must be traced and called."""
    return contextlib.nullcontext() if plan.mesh is None else jax.set_mesh(plan.mesh)
