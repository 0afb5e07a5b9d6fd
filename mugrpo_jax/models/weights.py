"""What a model must offer to train here, and everything that follows from the table of its weights."""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from mugrpo_jax.models.attention import Backend
from mugrpo_jax.models.row_packing import Packing
from mugrpo_jax.models.sharding import RULES, spec

Params = dict[str, Any]
Remat = Literal["none", "dots", "full"]


@dataclasses.dataclass(frozen=True)
class Weight:
    """One weight of a model: its size, how it is split over devices, its first values, its weight decay.

    Attributes:
      shape: sizes of its axes.
      axes: the logical name of each axis, a key of `sharding.RULES`; an axis named None is never split. A
        weight whose first axis is `layers` holds the values of all layers, one layer after the other.
      decays: whether the optimizer's weight decay applies to it.
      mean: of its random first values.
      std: their standard deviation; with 0 all values are `mean`.
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
    """A language model that can train here: a hashable object with these three methods.

    The object holds no arrays. It is a static argument of the compiled programs, and its parameters are a
    nested dict that every method receives. `Decoder` is such a model. To train another one, write a frozen
    dataclass with the same methods. An NNX module fits as well: keep its graph definition in the dataclass,
    and call `nnx.merge(self.graphdef, params)` in `hidden` and `head_matrix`.
    """

    def weights(self) -> Weights:
        """A `Weight` for each parameter, in nested dicts with the names of the parameters.

        Shardings of parameters and optimizer state, and the optimizer's weight decay, are read from here. A
        parameter that is not declared here is refused.
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
        """Final hidden states `[B, T, D]` of `tokens [B, T]`.

        Args:
          params: the parameters.
          tokens: right-padded rows, or packed rows if `packing` is given.
          packing: where the tokens of packed rows stand in the padded rows. Training packs its rows.
          remat: which activations the backward pass computes again: none, all but matrix products, all.
          scan: whether to scan over the layers (one compiled layer) or to unroll them.
          backend: attention back end.
        """
        ...

    def head_matrix(self, params: Params) -> jax.Array:
        """The output embedding `[V, D]`: logits are `hidden @ head_matrix.T`."""
        ...


def random_params(model: Model, *, seed: int = 0, dtype: Any = jnp.float32) -> Params:
    """Random parameters, as the table of weights declares them."""
    return cast(_random(model.weights(), jax.random.key(seed)), dtype)


def _random(weights: Weights, key: jax.Array) -> Params:
    """Parameters for a table. Its entries get keys in their order; constant weights use no key."""
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
    """The shapes of a model's parameters; nothing is allocated."""
    return jax.tree.map(lambda weight: jax.ShapeDtypeStruct(weight.shape, dtype), model.weights())


def cast(params: Params, dtype: Any) -> Params:
    """Parameters in another dtype; those that have it already are returned as they are."""
    return jax.tree.map(lambda leaf: leaf if leaf.dtype == dtype else leaf.astype(dtype), params)


def param_sharding(mesh: Mesh, model: Model, params: Any) -> Any:
    """Shardings of a (possibly abstract) tree of parameters, or of a tree that contains such trees.

    An optimizer state contains such trees: its moments have the names of the parameters. A leaf whose path
    ends with the path of a weight is split like the weight. Scalars are copied to every device. Any other
    leaf is an error.
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


def _names(path: tuple[Any, ...]) -> tuple[str, ...]:
    """The dict keys of a path; the fields and indices of an optimizer state have none."""
    return tuple(getattr(entry, "key", "") for entry in path)
