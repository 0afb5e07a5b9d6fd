"""Compute token log-probs from hidden states in chunks of positions, with a hand-written gradient.

The forward and the backward pass hold the logits of one chunk at a time, so no `[B, T, V]` array ever exists.
The result is log-probs and not a loss, so that every objective can use it. The mask `wanted` is True at the
positions whose log-prob is needed, for example at response tokens. The wanted positions are sorted to the
front, so that the last chunks have no wanted position and are not computed.

At one position, let `z = h W^T / temperature` be the logits, `p = softmax(z)`, `H` the entropy of `p`, and
`y` the target token. For each token `v` of the vocabulary:

    d log p_y / dz_v = 1[v = y] - p_v           d H / dz_v = -p_v (log p_v + H)

The backward pass computes the `p` of each chunk again, from the saved normaliser `log(sum_v exp(z_v))`. The
entropy is the normaliser minus the mean of `z` under `p`, so one pass over the logits gives both.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from mugrpo_jax.models.row_packing import Packing
from mugrpo_jax.models.sharding import RULES, current_mesh
from mugrpo_jax.models.weights import Model, Params

CHUNK_LOGITS = 1 << 28  # the maximum number of float32 logits in a chunk of the default size: 1 GiB
# With a mask, a chunk has one eighth of the positions, so that few unwanted positions are computed, but
# at least 2048 positions, because each chunk reads and writes the gradient of the whole head.
_SKIPPABLE_CHUNKS, _MIN_CHUNK = 8, 2048


def token_logprobs(
    model: Model,
    params: Params,
    tokens: jax.Array,
    *,
    packing: Packing | None = None,
    wanted: jax.Array | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    entropy_gradient: bool = True,
    chunk: int | None = None,
    **options: Any,
) -> tuple[jax.Array, jax.Array | None]:
    """Compute the log-prob of every token given the tokens before it.

    Args:
      tokens: right-padded rows `[B, T]`, or packed rows `[P, N]` if `packing` is given.
      packing: maps the packed rows to the padded rows `[B, T]` of the result.
      wanted: `[B, T]`, non-zero where the log-prob is needed, for example on response tokens. The result is
        undefined at all other positions. None means that every log-prob is needed.
      temperature: the logits are divided by it.
      entropy: whether to return also the entropy of the model's distribution at each position.
      entropy_gradient: False if the entropy is only measured. Then the backward pass ignores it.
      chunk: the number of positions whose logits exist at one time. None derives it from `CHUNK_LOGITS`.
      **options: `remat`, `scan` and `backend` of `Model.hidden`.

    Returns:
      `logp [B, T]` in float32, and the entropy `[B, T]` or None. `logp[:, 0]` is 0.
    """
    hidden = model.hidden(params, tokens, packing=packing, **options)
    if wanted is not None:
        wanted = (wanted if packing is None else packing.pack(jnp.asarray(wanted))) != 0
        # The log-prob of a token is computed at the position before the token.
        wanted = jnp.pad(wanted[:, 1:], ((0, 0), (0, 1)))
    logp, ent = logprobs_from_hidden(
        hidden,
        model.head_matrix(params),
        targets=jnp.roll(tokens, -1, axis=1),
        wanted=wanted,
        temperature=temperature,
        entropy=entropy,
        entropy_gradient=entropy_gradient,
        chunk=chunk,
    )
    return _align(logp, packing), None if ent is None else _align(ent, packing)


def logprobs_from_hidden(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    *,
    wanted: jax.Array | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    entropy_gradient: bool = True,
    chunk: int | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Compute the log-probs of `targets [B, T]` under `softmax(hidden @ head.T / temperature)`.

    Return also the entropy of the softmax, or None if `entropy` is False; with `entropy_gradient=False`, it
    has no gradient. `wanted [B, T]` is True where the result is needed; at other positions the result is
    undefined.

    >>> hidden, head = jnp.ones((1, 2, 3)), jnp.zeros((5, 3))
    >>> logp, ent = logprobs_from_hidden(hidden, head, jnp.zeros((1, 2), int), entropy=True)
    >>> round(float(logp[0, 1]), 4), round(float(ent[0, 1]), 4)
    (-1.6094, 1.6094)
    """
    tokens = hidden.shape[0] * hidden.shape[1] // _batch_devices()
    chunk = chunk or _default_chunk(tokens, head.shape[0], all_wanted=wanted is None)
    if chunk >= tokens:
        wanted = None  # a single chunk is always computed
    settings = _Settings(float(temperature), entropy, entropy and entropy_gradient, chunk)
    logp, ent = _logprobs(settings, hidden, head, targets, wanted)
    return logp, ent if entropy else None


def _default_chunk(tokens: int, vocab: int, *, all_wanted: bool) -> int:
    most = max(CHUNK_LOGITS // vocab, 1)
    return most if all_wanted else min(most, max(tokens // _SKIPPABLE_CHUNKS, _MIN_CHUNK))


def _batch_devices() -> int:
    mesh = current_mesh()
    return 1 if mesh is None else mesh.shape["data"] * mesh.shape["fsdp"]


def _align(x: jax.Array, packing: Packing | None) -> jax.Array:
    """Unpack `x` and move each value from the position before a token to the token itself."""
    x = jnp.pad(x[:, :-1], ((0, 0), (1, 0)))
    if packing is None:
        return x
    x = packing.unpack(x)
    # In a packed row, the first token of a row got its value from the row before, so we set it to 0.
    return jnp.where(jnp.arange(x.shape[1]) > 0, x, 0.0)


class _Settings(NamedTuple):
    temperature: float
    entropy: bool
    entropy_gradient: bool
    chunk: int


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _logprobs(
    settings: _Settings, hidden: jax.Array, head: jax.Array, targets: jax.Array, wanted: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    return _forward(settings, hidden, head, targets, wanted)[0]


def _forward(settings: _Settings, *inputs: Any) -> tuple[tuple[jax.Array, jax.Array], Any]:
    batch = P(RULES["batch"])
    logp, ent, normaliser = _over_mesh(
        functools.partial(_forward_local, **settings._asdict()),
        in_specs=(batch, P(RULES["vocab"]), batch, batch),
        out_specs=(batch, batch, batch),
    )(*inputs)
    return (logp, ent), (*inputs, normaliser, ent)


def _backward(
    settings: _Settings, residuals: Any, cotangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, None, None]:
    batch = P(RULES["batch"])
    d_hidden, d_head = _over_mesh(
        functools.partial(_backward_local, **settings._asdict()),
        in_specs=(batch, P(RULES["vocab"]), *[batch] * 6),
        out_specs=(batch, P(RULES["vocab"], RULES["embed"])),
    )(*residuals, *cotangents)
    return d_hidden, d_head, None, None


_logprobs.defvjp(_forward, _backward)


def _over_mesh(local: Any, *, in_specs: Any, out_specs: Any) -> Any:
    """Return a function that runs `local` on each device, with the device's rows and slice of the vocabulary.

    With `shard_map`, the gradient of the head is summed over devices once, after the last chunk. The
    automatic partitioner of XLA would sum the gradient in every chunk.
    """
    mesh = current_mesh()
    if mesh is None:
        return functools.partial(local, sharded=False)
    return jax.shard_map(
        functools.partial(local, sharded=True),
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,
    )


def _forward_local(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    wanted: jax.Array | None,
    *,
    temperature: float,
    entropy: bool,
    entropy_gradient: bool,
    chunk: int,
    sharded: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    del entropy_gradient  # only the backward pass needs it
    first = _first_token(head, sharded)
    chunks = _ChunkedPositions(targets.shape, wanted, chunk, sharded)
    h_chunks, target_chunks = chunks.split(hidden), chunks.split(targets)

    def one(i: jax.Array, out: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        h, target = h_chunks[i], target_chunks[i]
        z = _chunk_logits(h, head, temperature)
        mine_top, *sums = jax.lax.platform_dependent(
            z,
            cuda=functools.partial(_max_and_sums_at_once, weighted=entropy),
            default=functools.partial(_max_and_sums, weighted=entropy),
        )
        top = jax.lax.pmax(mine_top, "tensor") if sharded else mine_top
        total, *weighted = (_vocab_sum(part * jnp.exp(mine_top - top), sharded) for part in sums)
        normaliser = top + jnp.log(total)
        column = target - first
        mine = (column >= 0) & (column < head.shape[0])
        picked = jnp.take_along_axis(z, jnp.where(mine, column, 0)[:, None], axis=1)[:, 0]
        logp = _vocab_sum(jnp.where(mine, picked, 0.0), sharded) - normaliser
        ent = normaliser - weighted[0] / total if weighted else jnp.zeros_like(logp)
        return tuple(whole.at[i].set(part) for whole, part in zip(out, (logp, ent, normaliser)))

    logp, ent, normaliser = chunks.loop(one, (chunks.zeros(),) * 3)
    return chunks.merge(logp), chunks.merge(ent), chunks.merge(normaliser)


def _backward_local(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    wanted: jax.Array | None,
    normaliser: jax.Array,
    ent: jax.Array,
    d_logp: jax.Array,
    d_ent: jax.Array,
    *,
    temperature: float,
    entropy: bool,
    entropy_gradient: bool,
    chunk: int,
    sharded: bool,
) -> tuple[jax.Array, jax.Array]:
    del entropy  # only the forward pass needs it
    first = _first_token(head, sharded)
    chunks = _ChunkedPositions(targets.shape, wanted, chunk, sharded)
    rows = [chunks.split(x) for x in (hidden, targets, normaliser, ent, d_logp, d_ent)]

    def one(i: jax.Array, out: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        d_head, d_hidden = out
        h, target, norm, ent, g, e = (x[i] for x in rows)
        z = _chunk_logits(h, head, temperature)
        logp = z - norm[:, None]
        p = jnp.exp(logp)
        hit = jnp.arange(head.shape[0])[None] == (target - first)[:, None]
        d_z = jnp.where(hit, g[:, None], 0.0) - p * g[:, None]
        if entropy_gradient:
            d_z -= p * (logp + ent[:, None]) * e[:, None]
        d_z = (d_z / temperature).astype(h.dtype)
        d_head += jnp.einsum("nv,nd->vd", d_z, h, preferred_element_type=jnp.float32)
        d_h = jnp.einsum("nv,vd->nd", d_z, head, preferred_element_type=jnp.float32)
        return d_head, d_hidden.at[i].set(d_h.astype(h.dtype))

    start = jnp.zeros(head.shape, jnp.float32), jnp.zeros_like(rows[0])
    d_head, d_hidden = chunks.loop(one, start)
    if sharded:
        d_hidden = jax.lax.psum(d_hidden, "tensor")
        d_head = jax.lax.psum_scatter(d_head, "fsdp", scatter_dimension=1, tiled=True)
        d_head = jax.lax.psum(d_head, "data")
    return chunks.merge(d_hidden), d_head.astype(head.dtype)


class _ChunkedPositions:
    """Split the positions `[B, T]` of a device into chunks of equal size, with the wanted positions first."""

    def __init__(
        self, shape: tuple[int, ...], wanted: jax.Array | None, max_size: int, sharded: bool
    ) -> None:
        self.shape = shape
        tokens = math.prod(shape)
        self.count = -(-tokens // max_size)
        self.size = -(-tokens // self.count)
        self.steps: int | jax.Array = self.count
        self._order = self._rank = None
        if wanted is not None:
            flat = wanted.reshape(-1)
            needed = flat.sum()
            self._rank = jnp.where(flat, jnp.cumsum(flat) - 1, needed + jnp.cumsum(~flat) - 1)
            self._order = jnp.zeros_like(self._rank).at[self._rank].set(jnp.arange(tokens))
            # All devices compute equally many chunks, because each chunk has sums over `tensor`.
            needed = jax.lax.pmax(needed, RULES["batch"]) if sharded else needed
            self.steps = -(-needed // self.size)

    def split(self, x: jax.Array) -> jax.Array:
        """Reorder `x [B, T, ...]` into chunks `[count, size, ...]`; the last chunk is padded with zeros."""
        flat = x.reshape(-1, *x.shape[2:])
        flat = flat if self._order is None else flat[self._order]
        tail = self.count * self.size - len(flat)
        flat = jnp.pad(flat, ((0, tail),) + ((0, 0),) * (flat.ndim - 1))
        return flat.reshape(self.count, self.size, *x.shape[2:])

    def merge(self, x: jax.Array) -> jax.Array:
        """Reorder chunks `[count, size, ...]` back to `[B, T, ...]`."""
        flat = x.reshape(-1, *x.shape[2:])
        flat = flat[: math.prod(self.shape)] if self._rank is None else flat[self._rank]
        return flat.reshape(*self.shape, *x.shape[2:])

    def zeros(self) -> jax.Array:
        return jnp.zeros((self.count, self.size), jnp.float32)

    def loop(self, one: Callable[[jax.Array, Any], Any], carry: Any) -> Any:
        """Compute `carry = one(i, carry)` for each chunk `i` with a wanted position; return the carry."""
        # The second condition is redundant; `planning` reads the maximum number of iterations from it.
        return jax.lax.while_loop(
            lambda state: (state[0] < self.steps) & (state[0] < self.count),
            lambda state: (state[0] + 1, one(*state)),
            (jnp.int32(0), carry),
        )[1]


def _chunk_logits(h: jax.Array, head: jax.Array, temperature: float) -> jax.Array:
    z = jnp.einsum("nd,vd->nv", h, head, preferred_element_type=jnp.float32)
    return z if temperature == 1.0 else z / temperature


def _max_and_sums(z: jax.Array, *, weighted: bool) -> tuple[jax.Array, ...]:
    """Return the maximum of each row of `z`, and the sum of `exp(z - maximum)` over the row.

    If `weighted` is True, return also the sum of `exp(z - maximum) * z`, from which the entropy follows.
    """
    top = z.max(-1)
    share = jnp.exp(z - top[:, None])
    return (top, share.sum(-1), (share * z).sum(-1)) if weighted else (top, share.sum(-1))


def _max_and_sums_at_once(z: jax.Array, *, weighted: bool) -> tuple[jax.Array, ...]:
    """Return the same values as `_max_and_sums`, but read `z` only once."""

    def combine(a: Any, b: Any) -> tuple[jax.Array, ...]:
        top = jnp.maximum(a[0], b[0])
        left, right = jnp.exp(a[0] - top), jnp.exp(b[0] - top)
        return top, *(x * left + y * right for x, y in zip(a[1:], b[1:]))

    lowest, zero = jnp.asarray(jnp.finfo(z.dtype).min, z.dtype), jnp.zeros((), z.dtype)
    values = (z, jnp.ones_like(z), z)[: 3 if weighted else 2]
    # The start is not -inf, because -inf - -inf is NaN.
    return jax.lax.reduce(values, (lowest, zero, zero)[: len(values)], combine, (1,))


def _first_token(head: jax.Array, sharded: bool) -> jax.Array | int:
    """Return the token id of the first row of `head` on this device."""
    return jax.lax.axis_index("tensor") * head.shape[0] if sharded else 0


def _vocab_sum(x: jax.Array, sharded: bool) -> jax.Array:
    return jax.lax.psum(x, "tensor") if sharded else x
