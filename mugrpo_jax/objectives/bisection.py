"""Order statistics without sorting: a sort of the batch is slow, and on a mesh it gathers the whole batch."""

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
    """The largest i in [0, high) with `holds(i)`. The condition must be true up to some i and false above it.

    Bisection. With a shape it runs as many searches at once; `holds` maps arrays of that shape to booleans.
    """

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        true = holds(middle)
        return jnp.where(true, middle, low), jnp.where(true, high, middle)

    bounds = jnp.zeros(shape, dtype), jnp.full(shape, high, dtype)
    return jax.lax.fori_loop(0, high.bit_length(), halve, bounds)[0]


def largest_float(holds: Callable[[jax.Array], jax.Array], shape: tuple[int, ...] = ()) -> jax.Array:
    """The largest finite float32 x ≥ 0 with `holds(x)`, exactly.

    The bit patterns of non-negative floats have the order of the floats, so the search is over integers.
    """
    return _float(largest_integer(lambda bits: holds(_float(bits)), shape, high=_INFINITY))


def _float(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
