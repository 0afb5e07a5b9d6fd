"""Token log-probabilities from hidden states, in chunks, with a gradient of their own.

Neither pass holds logits of more than one chunk, so peak memory has no `[B, T, V]` in it. What comes out
are log-probs, not a loss: every objective works on top.

For one position with logits `z = h W^T / temperature`, target `y` and cotangents `g` (of the log-prob) and
`e` (of the entropy `H`):

    d log p(y) / dz_v = 1[v = y] - p_v           d H / dz_v = -p_v (log p_v + H)

The backward pass recomputes each chunk's `p` from the saved log-normaliser.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from mugrpo_jax.models.decoder import Params
from mugrpo_jax.models.packing import Packing
from mugrpo_jax.models.sharding import RULES, current_mesh

CHUNK_LOGITS = 1 << 28  # float32 logits that exist at one time unless a chunk is given: 1 GiB


def token_logprobs(
    graphdef: Any,
    params: Params,
    tokens: jax.Array,
    *,
    packing: Packing | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    chunk: int | None = None,
    **options: Any,
) -> tuple[jax.Array, jax.Array | None]:
    """Log-prob of every token given those before it.

    Args:
      graphdef: static definition of a model with `hidden` and `head_matrix`.
      params: its parameters.
      tokens: right-padded rows `[B, T]`, or packed ones `[P, N]`.
      packing: where the tokens of packed rows stand in the rows `[B, T]` that come out.
      temperature: divides the logits, as it did when the tokens were sampled.
      entropy: also return the entropy of the distribution each token was drawn from.
      chunk: how many positions have logits at one time; None takes what `CHUNK_LOGITS` allows.
      **options: handed to `hidden` (`remat`, `scan`, `backend`).

    Returns:
      `logp [B, T]` in float32 and the entropy `[B, T]` or None. `logp[:, 0]` is 0: nothing precedes it.
    """
    model = nnx.merge(graphdef, params)
    if packing is not None:
        options["packing"] = packing  # a model that cannot be packed need not know of it
    hidden = model.hidden(tokens, **options)
    targets = jnp.roll(tokens, -1, axis=1)
    logp, ent = logprobs_from_hidden(
        hidden, model.head_matrix(), targets, temperature=temperature, entropy=entropy, chunk=chunk
    )
    return _align(logp, packing), None if ent is None else _align(ent, packing)


def logprobs_from_hidden(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    chunk: int | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Log-prob of `targets [B, T]` under `softmax(hidden @ head.T / temperature)`, and its entropy if asked.

    >>> hidden, head = jnp.ones((1, 2, 3)), jnp.zeros((5, 3))
    >>> logp, ent = logprobs_from_hidden(hidden, head, jnp.zeros((1, 2), int), entropy=True)
    >>> round(float(logp[0, 1]), 4), round(float(ent[0, 1]), 4)
    (-1.6094, 1.6094)
    """
    chunk = chunk or max(CHUNK_LOGITS // head.shape[0], 1)
    logp, ent = _logprobs(hidden, head, targets, float(temperature), entropy, chunk)
    return logp, ent if entropy else None


def _align(x: jax.Array, packing: Packing | None) -> jax.Array:
    """What was computed at the position before a token moves to the token itself."""
    x = jnp.pad(x[:, :-1], ((0, 0), (1, 0)))
    if packing is None:
        return x
    x = packing.unpack(x)
    return jnp.where(jnp.arange(x.shape[1]) > 0, x, 0.0)  # before a row's first token stands another row


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _logprobs(
    hidden: jax.Array, head: jax.Array, targets: jax.Array, temperature: float, entropy: bool, chunk: int
) -> tuple[jax.Array, jax.Array]:
    return _forward(hidden, head, targets, temperature, entropy, chunk)[0]


def _forward(
    hidden: jax.Array, head: jax.Array, targets: jax.Array, temperature: float, entropy: bool, chunk: int
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    batch = P(RULES["batch"])
    logp, ent, normaliser = _over_mesh(
        functools.partial(_forward_local, temperature=temperature, entropy=entropy, chunk=chunk),
        in_specs=(batch, P(RULES["vocab"]), batch),
        out_specs=(batch, batch, batch),
    )(hidden, head, targets)
    return (logp, ent), (hidden, head, targets, normaliser, ent)


def _backward(
    temperature: float, entropy: bool, chunk: int, residuals: Any, cotangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, None]:
    hidden, head, targets, normaliser, ent = residuals
    batch = P(RULES["batch"])
    d_hidden, d_head = _over_mesh(
        functools.partial(_backward_local, temperature=temperature, entropy=entropy, chunk=chunk),
        in_specs=(batch, P(RULES["vocab"]), *[batch] * 5),
        out_specs=(batch, P(RULES["vocab"], RULES["embed"])),
    )(hidden, head, targets, normaliser, ent, *cotangents)
    return d_hidden, d_head, None


_logprobs.defvjp(_forward, _backward)


def _over_mesh(local: Any, *, in_specs: Any, out_specs: Any) -> Any:
    """Run `local` per device on its own rows and its own slice of the vocabulary.

    By hand rather than by the partitioner, so that the head's gradient is summed over devices once, after
    the last chunk, and not once a chunk.
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
    *,
    temperature: float,
    entropy: bool,
    chunk: int,
    sharded: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    first = _first_token(head, sharded)

    def one(rows: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        h, target = rows
        z = _chunk_logits(h, head, temperature)
        mine_top, total = jax.lax.platform_dependent(z, cuda=_max_and_sum_at_once, default=_max_and_sum)
        top = jax.lax.pmax(mine_top, "tensor") if sharded else mine_top
        normaliser = top + jnp.log(_vocab_sum(total * jnp.exp(mine_top - top), sharded))
        column = target - first
        mine = (column >= 0) & (column < head.shape[0])
        picked = jnp.take_along_axis(z, jnp.where(mine, column, 0)[:, None], axis=1)[:, 0]
        logp = _vocab_sum(jnp.where(mine, picked, 0.0), sharded) - normaliser
        ent = jnp.zeros_like(logp)
        if entropy:
            expected = (jnp.exp(z - normaliser[:, None]) * z).sum(-1)
            ent = normaliser - _vocab_sum(expected, sharded)
        return logp, ent, normaliser

    outputs = jax.lax.map(one, (_chunks(hidden, chunk), _chunks(targets, chunk)))
    logp, ent, normaliser = (_unchunk(x, targets.shape) for x in outputs)
    return logp, ent, normaliser


def _backward_local(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    normaliser: jax.Array,
    ent: jax.Array,
    d_logp: jax.Array,
    d_ent: jax.Array,
    *,
    temperature: float,
    entropy: bool,
    chunk: int,
    sharded: bool,
) -> tuple[jax.Array, jax.Array]:
    first = _first_token(head, sharded)

    def one(d_head: jax.Array, rows: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        h, target, norm, ent, g, e = rows
        z = _chunk_logits(h, head, temperature)
        logp = z - norm[:, None]
        p = jnp.exp(logp)
        hit = jnp.arange(head.shape[0])[None] == (target - first)[:, None]
        d_z = jnp.where(hit, g[:, None], 0.0) - p * g[:, None]
        if entropy:
            d_z -= p * (logp + ent[:, None]) * e[:, None]
        d_z = (d_z / temperature).astype(h.dtype)
        d_head += jnp.einsum("nv,nd->vd", d_z, h, preferred_element_type=jnp.float32)
        return d_head, jnp.einsum("nv,vd->nd", d_z, head, preferred_element_type=jnp.float32).astype(h.dtype)

    rows = tuple(_chunks(x, chunk) for x in (hidden, targets, normaliser, ent, d_logp, d_ent))
    d_head, d_hidden = jax.lax.scan(one, jnp.zeros(head.shape, jnp.float32), rows)
    if sharded:
        d_hidden = jax.lax.psum(d_hidden, "tensor")
        d_head = jax.lax.psum_scatter(d_head, "fsdp", scatter_dimension=1, tiled=True)
        d_head = jax.lax.psum(d_head, "data")
    return _unchunk(d_hidden, hidden.shape), d_head.astype(head.dtype)


def _chunk_logits(h: jax.Array, head: jax.Array, temperature: float) -> jax.Array:
    z = jnp.einsum("nd,vd->nv", h, head, preferred_element_type=jnp.float32)
    return z if temperature == 1.0 else z / temperature


def _max_and_sum(z: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest logit of each row, and the sum of all as `exp(z - largest)`."""
    top = z.max(-1)
    return top, jnp.exp(z - top[:, None]).sum(-1)


def _max_and_sum_at_once(z: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same, reading the logits once: twice the exponentials, faster where memory is the limit."""

    def combine(
        a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        top = jnp.maximum(a[0], b[0])
        return top, a[1] * jnp.exp(a[0] - top) + b[1] * jnp.exp(b[0] - top)

    lowest = jnp.finfo(z.dtype).min  # not -inf: the difference of two must be a number
    start = (jnp.asarray(lowest, z.dtype), jnp.zeros((), z.dtype))
    return jax.lax.reduce((z, jnp.ones_like(z)), start, combine, (1,))


def _first_token(head: jax.Array, sharded: bool) -> jax.Array | int:
    """The token id of this device's first row of the head."""
    return jax.lax.axis_index("tensor") * head.shape[0] if sharded else 0


def _vocab_sum(x: jax.Array, sharded: bool) -> jax.Array:
    return jax.lax.psum(x, "tensor") if sharded else x


def _chunks(x: jax.Array, chunk: int) -> jax.Array:
    """`[B, T, ...]` as `[chunks, n, ...]` with `n <= chunk`, the tail padded with zeros."""
    tokens = x.shape[0] * x.shape[1]
    count = -(-tokens // chunk)
    size = -(-tokens // count)
    flat = x.reshape(tokens, *x.shape[2:])
    flat = jnp.pad(flat, ((0, count * size - tokens),) + ((0, 0),) * (flat.ndim - 1))
    return flat.reshape(count, size, *x.shape[2:])


def _unchunk(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    flat = x.reshape(-1, *x.shape[2:])
    return flat[: shape[0] * shape[1]].reshape(shape)
