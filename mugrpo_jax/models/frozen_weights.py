"""The frozen weights of a LoRA run, in any dtype; also 8-bit integers with a scale for every column."""

from typing import Any

import jax
import jax.numpy as jnp

from mugrpo_jax.models.decoder import Decoder
from mugrpo_jax.models.eight_bits import eight_bit_weight, in_eight_bits
from mugrpo_jax.models.weights import Params, abstract_params

MATRICES = ("q", "k", "v", "o", "gate", "up", "down")  # of a layer; the names in the decoder


def base_weights(decoder: Decoder, dtype: str) -> Any:
    """Declare the frozen weights. With `int8`, the matrices of the layers have `values` and `scales`."""
    table = dict(decoder.weights())
    if dtype != "int8":
        return table
    layers: Any = table["layers"]
    matrices = {name: eight_bit_weight(layers[name]) for name in MATRICES}
    return {**table, "layers": layers | matrices}


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
        layers[name] = in_eight_bits(layers[name])
    return params
