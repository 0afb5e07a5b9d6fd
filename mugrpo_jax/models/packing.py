"""Rows without their padding: all layers but attention run on real tokens only.

Norms, projections, MLP and head look at one token at a time, so the tokens of many rows can stand one after
the other in a few long ones. Only attention needs to know where a row starts: before it, queries, keys and
values are spread out to right-padded rows, and behind it they are put together again.

    tokens of 3 rows [3, 4]        packed [1, 8]
    a b c .                        a b c d e f g .
    d e . .
    f g . .

With several devices along the batch there is one packed row (or more) for each, made of that device's own
rows, and nothing moves between devices.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Packing(NamedTuple):
    """Where tokens stand in `[R, T]` right-padded rows and in `[P, N]` packed ones; `R` is a multiple of `P`.

    Packed row `p` holds the tokens of rows `p * R / P` up to `(p + 1) * R / P`, in order.

    Attributes:
      packed_from: `[P, N]` int32, `row * T + position` of each packed token, with `row` counted within its
        packed row; `R / P * T`, which is out of range, where nothing stands.
      padded_from: `[R, T]` int32, the place of each token in its packed row; `N`, out of range, on padding.
    """

    packed_from: jax.Array | np.ndarray
    padded_from: jax.Array | np.ndarray

    @property
    def positions(self) -> jax.Array:
        """`[P, N]`: position of each packed token in its own row."""
        return jnp.asarray(self.packed_from) % self.padded_from.shape[1]

    @property
    def lengths(self) -> jax.Array:
        """`[R]`: tokens of each row."""
        return (jnp.asarray(self.padded_from) < self.packed_from.shape[1]).sum(1)

    def pack(self, x: jax.Array) -> jax.Array:
        """`[R, T, ...]` to `[P, N, ...]`; zeros where nothing stands."""
        groups, width = len(self.packed_from), self.padded_from.shape[1]
        return _move(x.reshape(groups, -1, *x.shape[2:]), self.packed_from, self._flat(width))

    def unpack(self, x: jax.Array) -> jax.Array:
        """`[P, N, ...]` to `[R, T, ...]`; zeros on padding."""
        rows, width = self.padded_from.shape
        return _move(x, self._flat(width), self.packed_from).reshape(rows, width, *x.shape[2:])

    def _flat(self, width: int) -> jax.Array:
        return jnp.asarray(self.padded_from).reshape(len(self.packed_from), -1)


def plan_packing(lengths: Sequence[int], shape: tuple[int, int], *, tokens: int, groups: int = 1) -> Packing:
    """Pack rows of these lengths, those of `shape = (R, T)`, into `groups` packed rows of `tokens` each.

    >>> packing = plan_packing([3, 2], (2, 4), tokens=6)
    >>> packing.packed_from.tolist(), packing.padded_from.tolist()
    ([[0, 1, 2, 4, 5, 8]], [[0, 1, 2, 6], [3, 4, 6, 6]])
    """
    rows, width = shape
    per_group = rows // groups
    packed = np.full((groups, tokens), per_group * width, np.int32)
    padded = np.full((rows, width), tokens, np.int32)
    filled = [0] * groups
    for row, length in enumerate(lengths):
        group, place = divmod(row, per_group)
        start = filled[group]
        end = filled[group] = start + length
        if end > tokens:
            raise ValueError(f"packed row {group}: {end} tokens or more, room for {tokens}")
        packed[group, start:end] = place * width + np.arange(length)
        padded[row, :length] = np.arange(start, end)
    return Packing(packed, padded)


@functools.partial(jax.custom_vjp)
def _move(x: jax.Array, there: jax.Array, back: jax.Array) -> jax.Array:
    """`x[g, there[g]]` with zeros out of range. `back` undoes it, so the gradient is a gather as well."""
    take = functools.partial(jnp.take, axis=0, mode="fill", fill_value=0)
    return jax.vmap(take)(x, jnp.asarray(there))


def _move_forward(
    x: jax.Array, there: jax.Array, back: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _move(x, there, back), (there, back)


def _move_backward(indices: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, None, None]:
    there, back = indices
    return _move(gradient, back, there), None, None


_move.defvjp(_move_forward, _move_backward)
