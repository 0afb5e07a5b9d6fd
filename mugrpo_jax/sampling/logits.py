"""From logits to a token: temperature, top-k, top-p, greedy, and the log-prob of what was drawn.

The sampler draws from `softmax(transform_logits(...))`. The draw is exact and needs few random numbers: the
Gumbel trick picks a block of the vocabulary by its total mass, then a token inside the block. A row costs
about `V / 128 + 128` random numbers instead of `V`, and sums stay short enough for float32. The rows are
independent: the token of a row depends only on its own logits, parameters and key.
"""

import functools

import jax
import jax.numpy as jnp

from mugrpo_jax.objectives.bisection import largest_integer

_BLOCK = 128  # divides most vocabularies, so that nothing is padded
# The largest key with a property, per row: 32 reductions over the vocabulary are cheaper than sorting it.
_cut = functools.partial(largest_integer, high=2**32 - 1, dtype=jnp.uint32)


def transform_logits(
    logits: jax.Array, temperature: jax.Array, top_k: jax.Array | None = None, top_p: jax.Array | None = None
) -> jax.Array:
    """Unnormalised log-probs of the distribution sampled from.

    Temperature comes first, then top-k, then top-p on the tokens that top-k kept. Tokens that tie at the
    boundary are all kept.

    Args:
      logits: `[..., V]` float32.
      temperature: `[...]`. 0 means greedy; its log-probs are those at temperature 1, because the log-prob 0
        of a sure choice would carry no information.
      top_k: `[...]` int, 0 keeps everything; None when no row truncates.
      top_p: `[...]`, 1 keeps everything; None when no row truncates.

    Returns:
      `[..., V]`, -inf for tokens that are not kept.

    >>> z = jnp.log(jnp.array([[0.1, 0.5, 0.3, 0.1]]))
    >>> kept = transform_logits(z, jnp.ones(1), top_p=jnp.array([0.7]))
    >>> print((1000 * jax.nn.softmax(kept)).round())
    [[  0. 625. 375.   0.]]
    """
    z = logits / jnp.where(temperature == 0, 1, temperature)[..., None]
    if top_k is None and top_p is None:
        return z
    keys = _ordered(z)
    cut = jnp.zeros(z.shape[:-1], jnp.uint32)
    if top_k is not None:
        kth = _cut(lambda t: (keys >= t[..., None]).sum(-1) >= top_k, cut.shape)
        cut = jnp.where(top_k > 0, kth, cut)
    if top_p is not None:
        peak = z.max(-1, keepdims=True)
        weights = jnp.where(keys >= cut[..., None], jnp.exp(z - peak), 0)
        target = top_p * weights.sum(-1)
        edge = _cut(lambda t: jnp.where(keys >= t[..., None], weights, 0).sum(-1) >= target, cut.shape)
        cut = jnp.where(top_p < 1, jnp.maximum(edge, cut), cut)
    return jnp.where(keys >= cut[..., None], z, -jnp.inf)


def draw(keys: jax.Array, z: jax.Array, greedy: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One token a row from `softmax(z)`, or the most likely one, and its log-prob.

    Args:
      keys: typed random keys `[N]`.
      z: unnormalised log-probs `[N, V]`, from `transform_logits`.
      greedy: `[N]` bool.

    Returns:
      tokens `[N]` int32 and log-probs `[N]` float32.
    """
    rows, vocab = z.shape
    blocks = -(-vocab // _BLOCK)
    tail = ((0, 0), (0, blocks * _BLOCK - vocab))
    tiles = jnp.pad(z, tail, constant_values=-jnp.inf).reshape(rows, blocks, _BLOCK)
    peak, mass = tiles.max(-1), jax.nn.logsumexp(tiles, axis=-1)
    # Rare tokens need the tail of the Gumbel distribution, which only mode "high" resolves.
    noise = jax.vmap(lambda key: jax.random.gumbel(key, (blocks + _BLOCK,), mode="high"))(keys)
    greedy = greedy[:, None]
    block = jnp.where(greedy, peak, mass + noise[:, :blocks]).argmax(-1)
    columns = block[:, None] * _BLOCK + jnp.arange(_BLOCK)
    tile = jnp.take_along_axis(z, jnp.minimum(columns, vocab - 1), axis=1)
    tile = jnp.where(columns < vocab, tile, -jnp.inf)
    chosen = jnp.where(greedy, tile, tile + noise[:, blocks:]).argmax(-1, keepdims=True)
    logp = jnp.take_along_axis(tile, chosen, axis=1)[:, 0] - jax.nn.logsumexp(mass, axis=-1)
    return jnp.take_along_axis(columns, chosen, axis=1)[:, 0].astype(jnp.int32), logp


def token_keys(request_keys: jax.Array, positions: jax.Array) -> jax.Array:
    """`fold_in(request key, position)` per row, from raw request keys `[N, 2]` and token positions `[N]`."""
    return jax.vmap(jax.random.fold_in)(
        jax.random.wrap_key_data(request_keys, impl="threefry2x32"), positions
    )


def _ordered(z: jax.Array) -> jax.Array:
    """Float32 as uint32 in the same order; +0 and -0 become equal."""
    bits = jax.lax.bitcast_convert_type(jnp.where(z == 0, 0, z.astype(jnp.float32)), jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits >= sign, ~bits, bits | sign)
