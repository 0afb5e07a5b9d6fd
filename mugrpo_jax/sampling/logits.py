"""Draw tokens from logits with temperature, top-k and top-p, or greedily, and compute their log-probs.

The sampler draws from `softmax(transform_logits(...))`. The Gumbel-max trick first picks a block of 128
tokens by the total probability of the block, and then a token in this block. The distribution is exact, but
a row of V logits needs only about `V / 128 + 128` random numbers instead of V. The token of a row depends
only on the logits, parameters and PRNG key of this row, and not on other rows.
"""

import functools

import jax
import jax.numpy as jnp

from mugrpo_jax.objectives.bisection import largest_integer

_BLOCK = 128  # divides most vocabularies, so that nothing is padded
# Find the largest uint32 with a property in each row: 32 reductions are cheaper than sorting the row.
_cut = functools.partial(largest_integer, high=2**32 - 1, dtype=jnp.uint32)


def transform_logits(
    logits: jax.Array, temperature: jax.Array, top_k: jax.Array | None = None, top_p: jax.Array | None = None
) -> jax.Array:
    """Return unnormalised log-probs `[..., V]` after temperature, top-k and top-p; -inf for removed tokens.

    Temperature is applied first, then top-k, then top-p to the tokens that top-k kept. If several tokens are
    equally likely at the boundary, all of them are kept.

    Args:
      logits: `[..., V]` float32, where V is the size of the vocabulary.
      temperature: `[...]` float32. 0 means greedy and is treated as 1 here, because the true log-prob of a
        greedy token is always 0 and so carries no information.
      top_k: `[...]` int32, keep this many most likely tokens; 0 keeps all. None if no row uses top-k.
      top_p: `[...]` float32, keep the most likely tokens that together reach this probability; 1 keeps all.
        None if no row uses top-p.

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
    """Draw one token per row from `softmax(z)`; return tokens `[N]` int32 and their log-probs `[N]` float32.

    Args:
      keys: `[N]` typed PRNG keys.
      z: `[N, V]` unnormalised log-probs from `transform_logits`.
      greedy: `[N]` bool. True takes the most likely token of the row instead of a random token.
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
    """Fold token positions `[N]` into the raw PRNG keys `[N, 2]` of the samples; return typed keys `[N]`."""
    return jax.vmap(jax.random.fold_in)(
        jax.random.wrap_key_data(request_keys, impl="threefry2x32"), positions
    )


def _ordered(z: jax.Array) -> jax.Array:
    """Map float32 to uint32 so that integers compare as the floats do; +0 and -0 map to the same integer."""
    bits = jax.lax.bitcast_convert_type(jnp.where(z == 0, 0, z.astype(jnp.float32)), jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits >= sign, ~bits, bits | sign)
