"""Pack rows without padding, so that all layers except attention compute only real tokens.

Norms, projections, MLP and head compute each token on its own, so the tokens of many rows can be stored one
after the other in a few long rows. Only attention needs to know where a row starts. Queries, keys and values
are therefore copied to right-padded rows before attention, and the attention output is packed again. On TPUs
the attention kernel reads packed rows as they are, unless rows share their prompts.

    tokens of 3 rows [3, 4]        packed [1, 8]
    a b c .                        a b c d e f g .
    d e . .
    f g . .

Below, R padded rows of length T become P packed rows of length N, and R is a multiple of P. If the batch is
split over devices, each device packs its own rows, so that packing moves nothing between devices.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_Indices = tuple[jax.Array, jax.Array]


class Packing(NamedTuple):
    """Index arrays that copy tokens between right-padded rows `[R, T]` and packed rows `[P, N]`.

    Each packed row holds the tokens of R / P consecutive padded rows.

    Attributes:
      packed_from: `[P, N]` int32, the index `row * T + position` of each packed token among the R / P padded
        rows of its packed row. The end of a packed row has no tokens and the out-of-range index `R / P * T`.
      padded_from: `[R, T]` int32, the index of each token in its packed row. Padding has the index `N`.
    """

    packed_from: jax.Array | np.ndarray
    padded_from: jax.Array | np.ndarray

    @property
    def positions(self) -> jax.Array:
        """Return the position of each packed token in its padded row, `[P, N]`."""
        return jnp.asarray(self.packed_from) % self.padded_from.shape[1]

    @property
    def segments(self) -> jax.Array | None:
        """Return the number of the padded row of each packed token, `[P, N]`; None if rows share tokens."""
        return jnp.asarray(self.packed_from) // self.padded_from.shape[1]

    @property
    def lengths(self) -> jax.Array:
        """Return the number of tokens in each padded row, `[R]`."""
        return (jnp.asarray(self.padded_from) < self.packed_from.shape[1]).sum(1)

    def pack(self, x: jax.Array) -> jax.Array:
        """Copy padded rows `[R, T, ...]` to packed rows `[P, N, ...]`, with zeros where there is no token."""
        parts = len(self.packed_from)
        return _gather(x.reshape(parts, -1, *x.shape[2:]), self.packed_from, self._flat())

    def unpack(self, x: jax.Array) -> jax.Array:
        """Copy packed rows `[P, N, ...]` to padded rows `[R, T, ...]`, with zeros on padding."""
        rows, width = self.padded_from.shape
        return _gather(x, self._flat(), self.packed_from).reshape(rows, width, *x.shape[2:])

    def unpack_keys(self, x: jax.Array) -> jax.Array:
        """Unpack keys or values. `SharedPacking` overrides this method, because their gradients differ."""
        return self.unpack(x)

    def _flat(self) -> jax.Array:
        return jnp.asarray(self.padded_from).reshape(len(self.packed_from), -1)


class SharedPacking(Packing):
    """A packing that stores a common prefix of several rows once, such as the prompt of several responses.

    A prefix token then has one packed index and a copy in each of these rows; `packed_from` points to the
    copy in the first row. The attention output is the same for every copy, so `pack` takes the first copy.
    Each row attends to its own copy of the keys and values, so the gradients of all copies are summed.

        prompt a b c, responses d e and f        packed: a b c d e c f
        a b c d e                                (the last token of the prompt is stored once per row,
        a b c f .                                 because the first response token is predicted there)
    """

    @property
    def segments(self) -> None:
        """Return None: a shared token belongs to several rows."""
        return None

    def pack(self, x: jax.Array) -> jax.Array:
        """Copy `[R, T, ...]` to packed rows `[P, N, ...]`. A shared token gets its first copy's value."""
        parts = len(self.packed_from)
        flat, packed = self._flat(), jnp.asarray(self.packed_from)
        own = jnp.where(_first_copies(flat, packed) == jnp.arange(flat.shape[1]), flat, packed.shape[1])
        return _gather(x.reshape(parts, -1, *x.shape[2:]), packed, own)

    def unpack_keys(self, x: jax.Array) -> jax.Array:
        """Copy `[P, N, ...]` to `[R, T, ...]`. The gradient of a shared token is the sum over its copies."""
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
    parts: int = 1,
    shared: Sequence[int] | None = None,
) -> Packing:
    """Plan the packing of `R` rows with these lengths; `shape` is `(R, T)`.

    There are `parts` packed rows, each with room for `tokens` tokens. `shared[i]` is the number of first
    tokens that row `i` has in common with row `i - 1`. These tokens are packed once (`SharedPacking`).
    `shared[i]` must not be larger than `shared[i - 1]`, unless `shared[i - 1]` is 0.

    >>> packing = plan_packing([3, 2], (2, 4), tokens=6)
    >>> packing.packed_from.tolist(), packing.padded_from.tolist()
    ([[0, 1, 2, 4, 5, 8]], [[0, 1, 2, 6], [3, 4, 6, 6]])
    """
    rows, width = shape
    per_part = rows // parts
    packed = np.full((parts, tokens), per_part * width, np.int32)
    padded = np.full((rows, width), tokens, np.int32)
    filled = [0] * parts
    for row, length in enumerate(lengths):
        part, place = divmod(row, per_part)
        common = shared[row] if shared is not None and place else 0
        if shared is not None and common > (shared[row - 1] or common):
            raise ValueError(f"row {row}: shares {common} tokens with a row that shares {shared[row - 1]}")
        padded[row, :common] = padded[row - 1, :common]
        start = filled[part]
        end = filled[part] = start + length - common
        if end > tokens:
            raise ValueError(f"packed row {part}: {end} tokens or more, room for {tokens}")
        packed[part, start:end] = place * width + np.arange(common, length)
        padded[row, common:length] = np.arange(start, end)
    return (Packing if shared is None else SharedPacking)(packed, padded)


@functools.partial(jax.custom_vjp)
def _gather(x: jax.Array, there: jax.Array, back: jax.Array) -> jax.Array:
    """Gather `x[g, there[g]]` for each `g`; out-of-range indices give 0. The gradient gathers with `back`."""
    take = functools.partial(jnp.take, axis=0, mode="fill", fill_value=0)
    return jax.vmap(take)(x, jnp.asarray(there))


def _gather_forward(x: jax.Array, there: jax.Array, back: jax.Array) -> tuple[jax.Array, _Indices]:
    return _gather(x, there, back), (there, back)


def _gather_backward(indices: _Indices, gradient: jax.Array) -> tuple[jax.Array, None, None]:
    there, back = indices
    return _gather(gradient, back, there), None, None


_gather.defvjp(_gather_forward, _gather_backward)


def _first_copies(padded_from: jax.Array, packed_from: jax.Array) -> jax.Array:
    """For each padded index, return the index of its token's first copy; out of range on padding."""
    nowhere = padded_from.shape[1]
    return jax.vmap(lambda n, p: jnp.take(p, n, mode="fill", fill_value=nowhere))(padded_from, packed_from)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _gather_shared(x: jax.Array, padded_from: jax.Array, packed_from: jax.Array, width: int) -> jax.Array:
    return _gather(x, padded_from, packed_from)


def _gather_shared_forward(
    x: jax.Array, padded_from: jax.Array, packed_from: jax.Array, width: int
) -> tuple[jax.Array, _Indices]:
    return _gather_shared(x, padded_from, packed_from, width), (padded_from, packed_from)


def _gather_shared_backward(
    width: int, indices: _Indices, gradient: jax.Array
) -> tuple[jax.Array, None, None]:
    padded_from, packed_from = indices
    first_copy = _first_copies(padded_from, packed_from)
    copies = (first_copy != jnp.arange(first_copy.shape[1])) & (padded_from < packed_from.shape[1])
    # The sum goes to the first row with the prefix, which is the row of the first copy of token 0. We sum
    # with a matrix of zeros and ones, because scatter-add on a GPU has no fixed order.
    first = first_copy.reshape(len(first_copy), -1, width)[:, :, 0] // width
    rows = jnp.arange(first.shape[1])
    adds = (first[:, None, :] == rows[:, None]) & (rows[:, None] != rows)
    flat = gradient.reshape(*first_copy.shape, -1)
    copied = jnp.where(copies[..., None], flat, 0).reshape(*first.shape, -1)
    added = jnp.einsum("gab,gbx->gax", adds.astype(flat.dtype), copied, preferred_element_type=jnp.float32)
    summed = (flat + added.reshape(flat.shape)).astype(gradient.dtype).reshape(gradient.shape)
    return _gather(summed, packed_from, padded_from), None, None


_gather_shared.defvjp(_gather_shared_forward, _gather_shared_backward)
