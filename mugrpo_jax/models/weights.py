"""The interface of a model, and functions that make parameters and shardings from its declared weights."""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Mapping
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from mugrpo_jax.models.attention import Backend
from mugrpo_jax.models.row_packing import Packing
from mugrpo_jax.models.sharding import RULES, spec

Params = dict[str, Any]
Remat = Literal["none", "dots", "full"]


@dataclasses.dataclass(frozen=True)
class Weight:
    """The declaration of one weight: its shape, sharding, weight decay and initial values.

    Attributes:
      shape: the size of each axis.
      axes: the logical name of each axis, a key of `sharding.RULES`. An axis with the name None is never
        split. If the first axis is `layers`, the array stacks this weight of all layers.
      decays: True if the optimizer applies weight decay to this weight.
      mean: mean of the random initial values.
      std: standard deviation of the initial values. With 0 all values are `mean`.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    decays: bool
    mean: float = 0.0
    std: float = 0.0

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.shape):
            raise ValueError(f"Weight: shape {self.shape} needs one axis name per axis, got {self.axes}")
        for axis in self.axes:
            if axis not in RULES:
                names = ", ".join(name for name in RULES if name)
                raise ValueError(f"Weight: unknown axis {axis!r}; possible: {names} or None")


Weights = Mapping[str, "Weight | Weights"]


class Model(Protocol):
    """A language model that can be trained here: a hashable object with the three methods below.

    The object holds no arrays, because it is a static argument of compiled programs. The parameters are a
    separate nested dict. `Decoder` is such a model. To train another model, write a frozen dataclass with the
    same methods. To train a Flax NNX module, keep its graph definition in the dataclass, and call
    `nnx.merge(self.graphdef, params)` in `hidden` and `head_matrix`.
    """

    def weights(self) -> Weights:
        """Return a `Weight` for each parameter, in nested dicts with the keys of the parameters.

        The shardings and the optimizer's weight decay follow from these declarations, so every parameter
        must be declared.
        """
        ...

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
        """Return the final hidden states `[B, T, D]` of `tokens [B, T]`, where D is the model width.

        Args:
          tokens: right-padded rows, or packed rows if `packing` is given.
          packing: maps packed rows to padded rows, for attention. Training uses packed rows.
          remat: which activations the backward pass computes again: `none`, `full` (all), or `dots` (all
            except the results of matrix products).
          scan: True scans over the layers, so that one layer is compiled. False unrolls the layers.
          backend: the implementation of attention.
        """
        ...

    def head_matrix(self, params: Params) -> jax.Array:
        """Return the output embedding `[V, D]`, with which logits are `hidden @ head_matrix.T`."""
        ...


def random_params(
    model: Model, *, seed: int = 0, dtype: Any = jnp.float32, mesh: Mesh | None = None
) -> Params:
    """Draw random parameters with the mean and standard deviation that the model declares.

    With a mesh, every device draws only its own shard. The values do not depend on the mesh.
    """
    # `jax.random.key` uses 32 bits of a seed too. A NumPy value may be the input on any number of hosts.
    return params_maker(model, dtype=dtype, mesh=mesh)(np.uint32(seed & 0xFFFFFFFF))


def params_maker(model: Model, *, dtype: Any = jnp.float32, mesh: Mesh | None = None) -> Any:
    """Return the jitted program of `random_params`, a function of the seed, for the planner to compile."""

    def make(seed: jax.Array) -> Params:
        return cast(_random(model.weights(), jax.random.key(seed)), dtype)

    shardings = None if mesh is None else param_sharding(mesh, model, abstract_params(model))
    return jax.jit(make, out_shardings=shardings)


def _random(weights: Weights, key: jax.Array) -> Params:
    """Draw parameters for a table of weights. Entry `n`, not counting constants, folds `n` into `key`."""
    number = itertools.count()
    params: Params = {}
    for name, entry in weights.items():
        if not isinstance(entry, Weight):
            params[name] = _random(entry, jax.random.fold_in(key, next(number)))
        elif entry.std:
            params[name] = _normal(entry, key, next(number))
        else:
            params[name] = jnp.full(entry.shape, entry.mean, jnp.float32)
    return params


def _normal(weight: Weight, key: jax.Array, number: int) -> jax.Array:
    def draw(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return weight.mean + weight.std * jax.random.normal(jax.random.fold_in(key, number), shape)

    if weight.axes[0] != "layers":
        return draw(key, weight.shape)
    layers, *shape = weight.shape
    return jax.vmap(lambda key: draw(key, tuple(shape)))(jax.random.split(key, layers))


def abstract_params(model: Model, *, dtype: Any = jnp.float32) -> Params:
    """Return the parameters as `jax.ShapeDtypeStruct`, so that nothing is allocated."""
    return jax.tree.map(lambda weight: jax.ShapeDtypeStruct(weight.shape, dtype), model.weights())


def cast(params: Params, dtype: Any) -> Params:
    """Convert parameters to `dtype`. A parameter that already has this dtype is not copied."""
    return jax.tree.map(lambda leaf: leaf if leaf.dtype == dtype else leaf.astype(dtype), params)


def param_sharding(mesh: Mesh, model: Model, params: Any) -> Any:
    """Return the sharding of each leaf of `params`, which can be parameters or an optimizer state.

    A leaf whose path ends with the path of a weight is sharded like this weight; the moments in an optimizer
    state have such paths. Scalars are copied to every device. Any other leaf raises ValueError. Leaves may be
    abstract.
    """
    declared = {_names(path): weight for path, weight in jax.tree.leaves_with_path(model.weights())}

    def one(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        if not leaf.shape:
            return NamedSharding(mesh, spec())
        names = _names(path)
        endings = (names[start:] for start in range(len(names)))
        weight = next((declared[ending] for ending in endings if ending in declared), None)
        if weight is None:
            raise ValueError(f"sharding: {jax.tree_util.keystr(path)} is not among the weights of the model")
        if weight.shape != leaf.shape:
            raise ValueError(
                f"sharding: {jax.tree_util.keystr(path)} has shape {leaf.shape}, "
                f"the model declares {weight.shape}"
            )
        return NamedSharding(mesh, spec(*weight.axes))

    return jax.tree.map_with_path(one, params)


def weight_sharding(mesh: Mesh, weights: Weights) -> Any:
    """Return the sharding of each weight in a table of declarations."""
    return jax.tree.map(lambda weight: NamedSharding(mesh, spec(*weight.axes)), weights)


def _names(path: tuple[Any, ...]) -> tuple[str, ...]:
    """Return the dict keys of a path, and "" for each entry that is not a dict key."""
    return tuple(getattr(entry, "key", "") for entry in path)


def weights_fingerprint(params: Any) -> str:
    """Return a hash of weights. Only one number per tensor leaves the devices."""
    sums = jax.device_get(jax.jit(lambda tree: jax.tree.map(_weighted_sum, tree))(params))
    named = [[jax.tree_util.keystr(path), int(value)] for path, value in jax.tree.leaves_with_path(sums)]
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()


def _weighted_sum(leaf: jax.Array) -> jax.Array:
    """Sum the bits of all elements as integers, each times an odd number that depends on its place."""
    bits = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")).astype(np.uint32)
    for axis in range(leaf.ndim):
        place = jax.lax.broadcasted_iota(np.uint32, leaf.shape, axis)
        bits = bits * (place * np.uint32(2_654_435_761 * (2 * axis + 1) % 2**32) | np.uint32(1))
    return bits.sum(dtype=np.uint32)
