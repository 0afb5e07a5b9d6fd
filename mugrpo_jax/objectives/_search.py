"""Order statistics without sorting: a sort of the batch is slow, and on a mesh it gathers all of it."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

_INFINITY = 0x7F800000  # the bits of float32 infinity


def largest_float(holds: Callable[[jax.Array], jax.Array], shape: tuple[int, ...] = ()) -> jax.Array:
    """The largest finite x ≥ 0 with `holds(x)`, a condition that is true from 0 up to some x and then false.

    Bisects the bit pattern, whose order is that of the non-negative floats: 31 steps, exact. With a shape, as
    many searches at once; `holds` maps arrays of that shape to booleans.
    """

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        true = holds(_float(middle))
        return jnp.where(true, middle, low), jnp.where(true, high, middle)

    bounds = jnp.zeros(shape, jnp.int32), jnp.full(shape, _INFINITY, jnp.int32)
    return _float(jax.lax.fori_loop(0, 31, halve, bounds)[0])


def _float(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
