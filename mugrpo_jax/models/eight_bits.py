"""Matrices in 8 bits with a scale for every column: frozen weights of LoRA, and weights of the sampler.

The sampler's KV cache uses the same rounding (`cache_entries.py`).

A column is the weights of one output. Its scale is applied after the product, so that the product itself is
one of the 8-bit values, which bfloat16 holds exactly.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from mugrpo_jax.models.weights import Params, Weight, cast

# Name in a config -> dtype of the values, which takes one byte.
EIGHT_BITS: dict[str, Any] = {"int8": jnp.dtype(jnp.int8), "fp8": jnp.dtype(jnp.float8_e4m3fn)}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StoredMatrix:
    """A matrix in any dtype that `x @ matrix` converts to the dtype of `x`, when it is used.

    So no copy of all layers in the compute dtype exists. `scales` is None unless `values` have 8 bits.
    """

    values: Any
    scales: Any = None

    def __rmatmul__(self, x: jax.Array) -> jax.Array:
        product = x @ self.values.astype(x.dtype)
        return product if self.scales is None else (product * self.scales[0]).astype(x.dtype)


@functools.partial(jax.jit, static_argnames=("dtype", "axis"))
def in_eight_bits(
    matrix: jax.Array, dtype: Any = EIGHT_BITS["int8"], *, axis: int = -2
) -> dict[str, jax.Array]:
    """Round the columns of a matrix; the largest magnitude of a column becomes the largest value of `dtype`.

    Return `values` and `scales`. `int8` has 255 equal steps in every column. The numbers along `axis` are a
    column, and `scales` has the size 1 there.
    """
    wide = matrix.astype(jnp.float32)
    integers = jnp.issubdtype(dtype, jnp.integer)
    largest = jnp.iinfo(dtype).max if integers else float(jnp.finfo(dtype).max)
    scales = jnp.maximum(jnp.abs(wide).max(axis=axis, keepdims=True), 1e-30) / largest  # no 0 / 0
    steps = wide / scales
    return {"values": (jnp.round(steps) if integers else steps).astype(dtype), "scales": scales}


def eight_bit_weight(matrix: Weight) -> dict[str, Weight]:
    """Declare the arrays that `in_eight_bits` returns for a matrix, or for the stacked matrices of layers."""
    *stacked, _, columns = matrix.shape
    *axes, _, column_axis = matrix.axes
    return {
        "values": matrix,
        "scales": Weight((*stacked, 1, columns), (*axes, None, column_axis), decays=False),
    }


def dequantised(weight: Any) -> jax.Array:
    """Return a weight in float32; a matrix in 8 bits is a dict with `values` and `scales`."""
    if isinstance(weight, dict):
        return weight["values"].astype(jnp.float32) * weight["scales"]
    return weight.astype(jnp.float32)


def stored_layer(layer: Params, dtype: Any, matrices: Any) -> Params:
    """Return the weights of one layer in `dtype`, with its matrices in the 8-bit dtype `matrices`.

    If `matrices` is None, they are in `dtype` too. Norms and biases are no matrices.
    """
    if matrices is None:
        return cast(layer, dtype)
    return {
        name: StoredMatrix(**in_eight_bits(leaf, matrices)) if leaf.ndim == 2 else leaf.astype(dtype)
        for name, leaf in layer.items()
    }
