"""The training state: everything that an update changes, as one pytree."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from mugrpo_jax.models import Model, param_sharding


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The training state, all of which is stored in a checkpoint.

    Attributes:
      params: float32 master weights.
      opt_state: state of the optimizer; its moments have the shapes of `params`.
      updates: int32, updates so far, including skipped ones.
      skipped: int32, updates that were skipped because the gradient was not finite.
      anchor: the weights at the start of the stage (the behavior policy), from which the drift is measured;
        None if the drift is not tracked.
      previous: the last gradient, for the cosine of consecutive gradients; None if the drift is not tracked.
    """

    params: Any
    opt_state: Any
    updates: jax.Array
    skipped: jax.Array
    anchor: Any
    previous: Any


def init_state(params: Any, optimizer: optax.GradientTransformation, *, track_drift: bool) -> TrainState:
    """Return the state before the first update."""
    return TrainState(
        params=params,
        opt_state=optimizer.init(params),
        updates=jnp.zeros((), jnp.int32),
        skipped=jnp.zeros((), jnp.int32),
        anchor=jax.tree.map(jnp.copy, params) if track_drift else None,
        previous=jax.tree.map(jnp.zeros_like, params) if track_drift else None,
    )


def start_stage(state: TrainState) -> TrainState:
    """Copy the weights to `anchor` at the start of a stage, if the drift is tracked."""
    if state.anchor is None:
        return state
    return dataclasses.replace(state, anchor=jax.tree.map(jnp.copy, state.params))


def state_sharding(mesh: Mesh, model: Model, state: Any) -> Any:
    """Return the shardings of a state: moments like their parameters, scalars on every device."""
    return param_sharding(mesh, model, state)
