"""LoRA (arXiv 2106.09685): train two thin matrices A and B beside each frozen weight matrix W of a decoder.

The model computes `x·W + (alpha / rank)·(x·A)·B`. B starts as zeros, so that training starts at the frozen
weights. Only A and B have gradients, optimizer state and checkpoints; they are the weights that
`LoraDecoder` declares. The frozen weights W come with them under the key `base` of the parameters.

Updates keep W and A·B apart, for three reasons. The gradient of W, a third of the FLOPs, is never computed.
The sum W + A·B need not be rounded to bfloat16. W may be stored in 8 bits. The sampler uses the sum, which
`merge_layer` computes once per stage, because decoding reads all weights for every token.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from mugrpo_jax.models.attention import Backend
from mugrpo_jax.models.decoder import Decoder
from mugrpo_jax.models.eight_bits import StoredMatrix, dequantised
from mugrpo_jax.models.frozen_weights import MATRICES
from mugrpo_jax.models.row_packing import Packing
from mugrpo_jax.models.weights import Params, Remat, Weight, Weights

# Name of a matrix in Hugging Face folders and in PEFT -> its name in the decoder.
TARGETS = {f"{name}_proj": name for name in MATRICES}


@dataclasses.dataclass(frozen=True)
class LoraDecoder:
    """A decoder of which only the adapters A and B of some matrices are trained.

    Attributes:
      decoder: the decoder with the frozen weights.
      rank: number of columns of A and of rows of B.
      alpha: A·B is multiplied by alpha / rank.
      targets: which matrices have adapters, keys of `TARGETS`.
    """

    decoder: Decoder
    rank: int
    alpha: float
    targets: tuple[str, ...]

    def __post_init__(self) -> None:
        layers: Any = self.decoder.weights()["layers"]
        for target in self.targets:
            if target not in TARGETS:
                raise ValueError(f"unknown target {target!r}; possible: {', '.join(TARGETS)}")
            _, rows, columns = layers[TARGETS[target]].shape
            if not 1 <= self.rank <= min(rows, columns):
                raise ValueError(
                    f"rank {self.rank} does not fit {target}, a matrix of {rows} × {columns}; "
                    f"at most {min(rows, columns)} is possible"
                )

    @property
    def scale(self) -> float:
        """The factor of A·B."""
        return self.alpha / self.rank

    def weights(self) -> Weights:
        """Declare A and B of every target. Their sharding follows from the axes of the frozen matrix."""
        layers: Any = self.decoder.weights()["layers"]
        names = (TARGETS[target] for target in self.targets)
        return {"layers": {name: _adapter(layers[name], self.rank) for name in names}}

    def hidden(
        self,
        params: Params,
        tokens: jax.Array,
        *,
        packing: Packing | None = None,
        remat: Remat = "none",
        scan: bool = True,
        backend: Backend = "auto",
    ) -> jax.Array:
        """Return the final hidden states `[B, T, D]` of `tokens [B, T]`; see `Model.hidden`.

        `params` are the adapters, and `params["base"]` the frozen weights of any dtype. The dtype of the
        adapters is that of the computation.
        """
        options: dict[str, Any] = {"packing": packing, "remat": remat, "scan": scan, "backend": backend}
        return self.decoder.hidden(self._joined(params), tokens, **options)

    def head_matrix(self, params: Params) -> jax.Array:
        """Return the output embedding `[V, D]`, which is frozen, in the dtype of the adapters."""
        return self.decoder.head_matrix(params["base"]).astype(_dtype(params))

    def _joined(self, params: Params) -> Params:
        """Return parameters for the decoder in which `AdaptedMatrix` takes the place of every target."""
        base, adapters, dtype = params["base"], params["layers"], _dtype(params)

        def joined(name: str, weight: Any) -> Any:
            if name not in MATRICES:
                return weight.astype(dtype)  # norms and biases
            matrix = StoredMatrix(**weight) if isinstance(weight, dict) else StoredMatrix(weight)
            return AdaptedMatrix(matrix, **adapters[name], scale=self.scale) if name in adapters else matrix

        layers = {name: joined(name, weight) for name, weight in base["layers"].items()}
        rest = {name: leaf.astype(dtype) for name, leaf in base.items() if name != "layers"}
        return {**rest, "layers": layers}

    def merge_layer(self, layer: Params, adapters: Params, dtype: Any) -> Params:
        """Return the weights of one layer with W + (alpha / rank)·A·B, computed in float32, in `dtype`."""
        merged = {}
        for name, weight in layer.items():
            wide = dequantised(weight)
            if name in adapters:
                a, b = (adapters[name][part].astype(jnp.float32) for part in ("a", "b"))
                wide = wide + self.scale * jnp.matmul(a, b, precision="highest")
            merged[name] = wide.astype(dtype)
        return merged


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdaptedMatrix:
    """A frozen matrix with an adapter: `x @ matrix` is x·W + scale·(x·A)·B."""

    matrix: StoredMatrix
    a: Any
    b: Any
    scale: float = dataclasses.field(metadata={"static": True})

    def __rmatmul__(self, x: jax.Array) -> jax.Array:
        return x @ self.matrix + (self.scale * (x @ self.a)) @ self.b


def _adapter(matrix: Weight, rank: int) -> dict[str, Weight]:
    layers, rows, columns = matrix.shape
    _, row_axis, column_axis = matrix.axes
    # The standard deviation is that of PEFT's default, a uniform distribution up to rows**-0.5.
    a = Weight((layers, rows, rank), ("layers", row_axis, None), decays=True, std=(3 * rows) ** -0.5)
    b = Weight((layers, rank, columns), ("layers", None, column_axis), decays=True)
    return {"a": a, "b": b}


def _dtype(params: Params) -> Any:
    return jax.tree.leaves(params["layers"])[0].dtype


def merge(model: LoraDecoder, base: Params, adapters: Params, dtype: Any) -> Params:
    """Return the weights of the decoder with all adapters added to them.

    One weight is merged after the other, and `base` loses each weight that is merged, so that the memory
    never holds the whole model twice.
    """
    layers = base.pop("layers")
    merged: Params = {name: _merged(model, name, base.pop(name), None, dtype) for name in list(base)}
    merged["layers"] = {
        name: _merged(model, name, layers.pop(name), adapters["layers"].get(name), dtype)
        for name in list(layers)
    }
    return merged


def _merged(model: LoraDecoder, name: str, weight: Any, adapter: Any, dtype: Any) -> jax.Array:
    if adapter is None and getattr(weight, "dtype", None) == dtype:
        return weight
    return stack_merger(model, name, weight, dtype)(weight, adapter)


def stack_merger(model: LoraDecoder, name: str, weight: Any, dtype: Any) -> Any:
    """Return the program that merges one weight of all layers; `weight` may be abstract."""
    sharding = jax.tree.leaves(weight)[-1].sharding  # of the values, if the weight is stored in 8 bits
    return jax.jit(functools.partial(_merge_stack, model, name, dtype), out_shardings=sharding)


def _merge_stack(model: LoraDecoder, name: str, dtype: Any, weight: Any, adapter: Any) -> jax.Array:
    """Merge one weight of all layers, one layer after the other, so that float32 arrays stay small."""
    if adapter is None and not isinstance(weight, dict):
        return weight.astype(dtype)

    def one(layer: tuple[Any, Any]) -> jax.Array:
        adapters = {} if layer[1] is None else {name: layer[1]}
        return model.merge_layer({name: layer[0]}, adapters, dtype)[name]

    return jax.lax.map(one, (weight, adapter))
