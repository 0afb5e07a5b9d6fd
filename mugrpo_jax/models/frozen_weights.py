"""The frozen weights of a LoRA run, in any dtype; also 8-bit integers with a scale for every column."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from mugrpo_jax.models.decoder import Decoder
from mugrpo_jax.models.weights import Params, Weight, abstract_params

MATRICES = ("q", "k", "v", "o", "gate", "up", "down")  # of a layer; the names in the decoder


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FrozenMatrix:
    """A matrix in any dtype that `x @ matrix` converts to the dtype of `x`, inside the scan over the layers.

    So no copy of all layers in the compute dtype exists. `scales` is None unless `values` are 8-bit integers.
    """

    values: Any
    scales: Any = None

    def __rmatmul__(self, x: jax.Array) -> jax.Array:
        product = x @ self.values.astype(x.dtype)
        return product if self.scales is None else (product * self.scales[0]).astype(x.dtype)


def base_weights(decoder: Decoder, dtype: str) -> Any:
    """Declare the frozen weights. With `int8`, the matrices of the layers have `values` and `scales`."""
    table = dict(decoder.weights())
    if dtype != "int8":
        return table
    layers: Any = table["layers"]
    return {**table, "layers": {name: _quantised_weight(name, weight) for name, weight in layers.items()}}


def _quantised_weight(name: str, weight: Weight) -> Any:
    if name not in MATRICES:
        return weight
    layers, _, columns = weight.shape
    scales = Weight((layers, 1, columns), ("layers", None, weight.axes[2]), decays=False)
    return {"values": weight, "scales": scales}


def abstract_base(decoder: Decoder, dtype: str) -> Params:
    """Return the frozen weights as `jax.ShapeDtypeStruct`, so that nothing is allocated."""
    plain = abstract_params(decoder, dtype=jnp.bfloat16 if dtype == "int8" else jnp.dtype(dtype))
    return jax.eval_shape(quantised, plain) if dtype == "int8" else plain


def quantised(params: Params) -> Params:
    """Store the matrices of the layers in 8 bits. Embedding, head, norms and biases keep their dtype.

    One matrix is converted after the other, and a concrete `params` loses each matrix that is converted, so
    that the memory never holds the whole model twice.
    """
    layers = params["layers"]
    for name in MATRICES:
        layers[name] = to_int8(layers[name])
    return params


@jax.jit
def to_int8(matrix: jax.Array) -> dict[str, jax.Array]:
    """Round each column to 255 levels; the largest magnitude of a column becomes 127."""
    wide = matrix.astype(jnp.float32)
    scales = jnp.maximum(jnp.abs(wide).max(axis=-2, keepdims=True), 1e-30) / 127  # no 0 / 0
    return {"values": jnp.round(wide / scales).astype(jnp.int8), "scales": scales}


def dequantised(weight: Any) -> jax.Array:
    """Return a frozen weight in float32."""
    if isinstance(weight, dict):
        return weight["values"].astype(jnp.float32) * weight["scales"]
    return weight.astype(jnp.float32)
