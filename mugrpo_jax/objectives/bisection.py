"""Find order statistics by bisection, because sorting is slow and gathers the whole batch on a mesh."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

_INFINITY = 0x7F800000  # the bits of float32 infinity


def largest_integer(
    holds: Callable[[jax.Array], jax.Array],
    shape: tuple[int, ...] = (),
    *,
    high: int,
    dtype: Any = jnp.int32,
) -> jax.Array:
    """Return the largest i in [0, high) with `holds(i)`, which must be True up to some i and False above it.

    `shape` is the shape of the result. `holds` maps integers of this shape to booleans of this shape.
    """

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        true = holds(middle)
        return jnp.where(true, middle, low), jnp.where(true, high, middle)

    # One step outside the loop: inside `jax.shard_map` the bounds vary over the devices as `holds` does.
    bounds = halve(0, (jnp.zeros(shape, dtype), jnp.full(shape, high, dtype)))
    return jax.lax.fori_loop(1, high.bit_length(), halve, bounds)[0]


def largest_float(holds: Callable[[jax.Array], jax.Array], shape: tuple[int, ...] = ()) -> jax.Array:
    """Return the largest finite float32 x ≥ 0 with `holds(x)`; `holds` and `shape` as in `largest_integer`.

    The search is over bit patterns, because non-negative floats have the same order as their bit patterns.
    """
    return _float(largest_integer(lambda bits: holds(_float(bits)), shape, high=_INFINITY))


def _float(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
