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
        groups = len(self.packed_from)
        return _move(x.reshape(groups, -1, *x.shape[2:]), self.packed_from, self._flat())

    def unpack(self, x: jax.Array) -> jax.Array:
        """`[P, N, ...]` to `[R, T, ...]`; zeros on padding."""
        rows, width = self.padded_from.shape
        return _move(x, self._flat(), self.packed_from).reshape(rows, width, *x.shape[2:])

    def unpack_keys(self, x: jax.Array) -> jax.Array:
        """The same for keys and values, which all queries of a row look at."""
        return self.unpack(x)

    def _flat(self) -> jax.Array:
        return jnp.asarray(self.padded_from).reshape(len(self.packed_from), -1)


class SharedPacking(Packing):
    """Rows that begin alike, the responses to one prompt, have that beginning in the packed row only once.

    `padded_from` then names one packed token for several rows, its *copies*; `packed_from` names the first
    row's. What a query of the beginning finds is the same in every row, so one is kept and the others go
    unused. Its keys and values are looked at by all rows, so their gradients are summed.

        prompt a b c, responses d e and f        packed: a b c d e c f
        a b c d e                                (the last token of the prompt stands in each row,
        a b c f .                                 because what follows it is predicted from there)
    """

    def pack(self, x: jax.Array) -> jax.Array:
        """`[R, T, ...]` to `[P, N, ...]`, from the first row of those that share a token."""
        groups = len(self.packed_from)
        flat, packed = self._flat(), jnp.asarray(self.packed_from)
        own = jnp.where(_owners(flat, packed) == jnp.arange(flat.shape[1]), flat, packed.shape[1])
        return _move(x.reshape(groups, -1, *x.shape[2:]), packed, own)

    def unpack_keys(self, x: jax.Array) -> jax.Array:
        """`[P, N, ...]` to `[R, T, ...]`; the gradient of a shared token is that of all its copies."""
        rows, width = self.padded_from.shape
        flat = self._flat()
        return _copy(x, flat, jnp.asarray(self.packed_from), width).reshape(rows, width, *x.shape[2:])


def plan_packing(
    lengths: Sequence[int],
    shape: tuple[int, int],
    *,
    tokens: int,
    groups: int = 1,
    shared: Sequence[int] | None = None,
) -> Packing:
    """Pack rows of these lengths, those of `shape = (R, T)`, into `groups` packed rows of `tokens` each.

    `shared` says how many of its first tokens a row has in common with the row before it; they are packed
    once (`SharedPacking`). A row can share no more than the one before it did, unless that one shared none.

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
        common = shared[row] if shared is not None and place else 0
        if shared is not None and common > (shared[row - 1] or common):
            raise ValueError(f"row {row}: shares {common} tokens with a row that shares {shared[row - 1]}")
        padded[row, :common] = padded[row - 1, :common]
        start = filled[group]
        end = filled[group] = start + length - common
        if end > tokens:
            raise ValueError(f"packed row {group}: {end} tokens or more, room for {tokens}")
        packed[group, start:end] = place * width + np.arange(common, length)
        padded[row, common:length] = np.arange(start, end)
    return (Packing if shared is None else SharedPacking)(packed, padded)


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


def _owners(padded_from: jax.Array, packed_from: jax.Array) -> jax.Array:
    """The first place of each place's token, in its packed row's rows; out of range on padding."""
    nowhere = padded_from.shape[1]
    return jax.vmap(lambda n, p: jnp.take(p, n, mode="fill", fill_value=nowhere))(padded_from, packed_from)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _copy(x: jax.Array, padded_from: jax.Array, packed_from: jax.Array, width: int) -> jax.Array:
    return _move(x, padded_from, packed_from)


def _copy_forward(
    x: jax.Array, padded_from: jax.Array, packed_from: jax.Array, width: int
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _copy(x, padded_from, packed_from, width), (padded_from, packed_from)


def _copy_backward(
    width: int, indices: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, None, None]:
    padded_from, packed_from = indices
    owners = _owners(padded_from, packed_from)
    copies = (owners != jnp.arange(owners.shape[1])) & (padded_from < packed_from.shape[1])
    # Whoever shares tokens shares the first one: its owner is the row that the copies are added to. Added by
    # a product with zeros and ones, because sums of scattered numbers have no fixed order on a GPU.
    first = owners.reshape(len(owners), -1, width)[:, :, 0] // width
    rows = jnp.arange(first.shape[1])
    adds = (first[:, None, :] == rows[:, None]) & (rows[:, None] != rows)
    flat = gradient.reshape(*owners.shape, -1)
    copied = jnp.where(copies[..., None], flat, 0).reshape(*first.shape, -1)
    added = jnp.einsum("gab,gbx->gax", adds.astype(flat.dtype), copied, preferred_element_type=jnp.float32)
    summed = (flat + added.reshape(flat.shape)).astype(gradient.dtype).reshape(gradient.shape)
    return _move(summed, packed_from, padded_from), None, None


_copy.defvjp(_copy_forward, _copy_backward)
