"""Packed rows without padding: all layers except attention compute real tokens only.

Norms, projections, MLP and head compute each token on its own, so the tokens of many rows can be stored one
after the other in a few long rows. Only attention needs to know where a row starts. Queries, keys and values
are therefore copied to right-padded rows before attention, and its result is packed again.

    tokens of 3 rows [3, 4]        packed [1, 8]
    a b c .                        a b c d e f g .
    d e . .
    f g . .

If the batch is split over several devices, each device has its own packed rows, made of its own rows.
Packing then moves nothing between devices.
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
        packed row; `R / P * T`, which is out of range, where a packed row has no token.
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
        """`[R, T, ...]` to `[P, N, ...]`; zeros where a packed row has no token."""
        groups = len(self.packed_from)
        return _gather(x.reshape(groups, -1, *x.shape[2:]), self.packed_from, self._flat())

    def unpack(self, x: jax.Array) -> jax.Array:
        """`[P, N, ...]` to `[R, T, ...]`; zeros on padding."""
        rows, width = self.padded_from.shape
        return _gather(x, self._flat(), self.packed_from).reshape(rows, width, *x.shape[2:])

    def unpack_keys(self, x: jax.Array) -> jax.Array:
        """`unpack` for keys and values, which all queries of a row attend to."""
        return self.unpack(x)

    def _flat(self) -> jax.Array:
        return jnp.asarray(self.padded_from).reshape(len(self.packed_from), -1)


class SharedPacking(Packing):
    """Packing in which rows with a common prefix, the responses to one prompt, store the prefix once.

    `padded_from` then maps several rows (the *copies*) to one packed token, and `packed_from` maps this
    token to the first of these rows. The attention output of a prefix token is the same in every row, so
    only the first row's is used. All rows attend to its keys and values, so their gradients are summed.

        prompt a b c, responses d e and f        packed: a b c d e c f
        a b c d e                                (the last token of the prompt is stored once per row,
        a b c f .                                 because the first response token is predicted there)
    """

    def pack(self, x: jax.Array) -> jax.Array:
        """`[R, T, ...]` to `[P, N, ...]`; a shared token takes the value of its first row."""
        groups = len(self.packed_from)
        flat, packed = self._flat(), jnp.asarray(self.packed_from)
        own = jnp.where(_first_copies(flat, packed) == jnp.arange(flat.shape[1]), flat, packed.shape[1])
        return _gather(x.reshape(groups, -1, *x.shape[2:]), packed, own)

    def unpack_keys(self, x: jax.Array) -> jax.Array:
        """`[P, N, ...]` to `[R, T, ...]`; the gradient of a shared token is the sum over its copies."""
        rows, width = self.padded_from.shape
        flat = self._flat()
        return _gather_shared(x, flat, jnp.asarray(self.packed_from), width).reshape(
            rows, width, *x.shape[2:]
        )


def plan_packing(
    lengths: Sequence[int],
    shape: tuple[int, int],
    *,
    tokens: int,
    groups: int = 1,
    shared: Sequence[int] | None = None,
) -> Packing:
    """Pack rows of `shape = (R, T)` with these lengths into `groups` packed rows of `tokens` each.

    `shared` gives for each row how many of its first tokens equal those of the row before it; they are
    packed once (`SharedPacking`). A row cannot share more tokens than the row before it shares, unless that
    row shares none.

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
def _gather(x: jax.Array, there: jax.Array, back: jax.Array) -> jax.Array:
    """`x[g, there[g]]` with zeros out of range. `back` is the inverse, so the gradient is a gather too."""
    take = functools.partial(jnp.take, axis=0, mode="fill", fill_value=0)
    return jax.vmap(take)(x, jnp.asarray(there))


def _gather_forward(
    x: jax.Array, there: jax.Array, back: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _gather(x, there, back), (there, back)


def _gather_backward(
    indices: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, None, None]:
    there, back = indices
    return _gather(gradient, back, there), None, None


_gather.defvjp(_gather_forward, _gather_backward)


def _first_copies(padded_from: jax.Array, packed_from: jax.Array) -> jax.Array:
    """For each padded position, the first one with the same packed token; out of range on padding."""
    nowhere = padded_from.shape[1]
    return jax.vmap(lambda n, p: jnp.take(p, n, mode="fill", fill_value=nowhere))(padded_from, packed_from)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _gather_shared(x: jax.Array, padded_from: jax.Array, packed_from: jax.Array, width: int) -> jax.Array:
    return _gather(x, padded_from, packed_from)


def _gather_shared_forward(
    x: jax.Array, padded_from: jax.Array, packed_from: jax.Array, width: int
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _gather_shared(x, padded_from, packed_from, width), (padded_from, packed_from)


def _gather_shared_backward(
    width: int, indices: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, None, None]:
    padded_from, packed_from = indices
    first_copy = _first_copies(padded_from, packed_from)
    copies = (first_copy != jnp.arange(first_copy.shape[1])) & (padded_from < packed_from.shape[1])
    # Rows that share a prefix share token 0, so its first row is the one that receives the sum. We sum with a
    # matrix of zeros and ones, because scatter-add on a GPU has no fixed order.
    first = first_copy.reshape(len(first_copy), -1, width)[:, :, 0] // width
    rows = jnp.arange(first.shape[1])
    adds = (first[:, None, :] == rows[:, None]) & (rows[:, None] != rows)
    flat = gradient.reshape(*first_copy.shape, -1)
    copied = jnp.where(copies[..., None], flat, 0).reshape(*first.shape, -1)
    added = jnp.einsum("gab,gbx->gax", adds.astype(flat.dtype), copied, preferred_element_type=jnp.float32)
    summed = (flat + added.reshape(flat.shape)).astype(gradient.dtype).reshape(gradient.shape)
    return _gather(summed, packed_from, padded_from), None, None


_gather_shared.defvjp(_gather_shared_forward, _gather_shared_backward)
