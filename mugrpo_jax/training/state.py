"""Define the training state, a pytree of all arrays that an update changes, and make its first value."""

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
    """The training state. A checkpoint stores all of these fields.

    Attributes:
      params: the weights in float32.
      opt_state: the state of the optimizer.
      updates: int32, the number of updates so far, including skipped updates.
      skipped: int32, the number of updates that were skipped because the gradient was not finite.
      anchor: the weights at the start of the stage (behavior policy), or None if the drift is not tracked.
      previous: the last gradient, for the cosine of consecutive gradients; None if the drift is not tracked.
    """

    params: Any
    opt_state: Any
    updates: jax.Array
    skipped: jax.Array
    anchor: Any
    previous: Any


def init_state(params: Any, optimizer: optax.GradientTransformation, *, track_drift: bool) -> TrainState:
    """Return the state before the first update; `track_drift=True` adds `anchor` and `previous`."""
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
    """Return the shardings of a state. Moments are sharded like their parameters, scalars are replicated."""
    return param_sharding(mesh, model, state)
