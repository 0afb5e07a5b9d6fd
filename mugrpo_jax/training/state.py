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
      proximal: the weights of the proximal policy in the compute dtype; None if the objective needs none.
    """

    params: Any
    opt_state: Any
    updates: jax.Array
    skipped: jax.Array
    anchor: Any
    previous: Any
    proximal: Any = None


def init_state(
    params: Any, optimizer: optax.GradientTransformation, *, track_drift: bool, proximal: str | None = None
) -> TrainState:
    """Return the state before the first update.

    `track_drift=True` adds `anchor` and `previous`. If `proximal` is a dtype, the state also has the weights
    of a proximal policy in this dtype.
    """
    return TrainState(
        params=params,
        opt_state=optimizer.init(params),
        updates=jnp.zeros((), jnp.int32),
        skipped=jnp.zeros((), jnp.int32),
        anchor=jax.tree.map(jnp.copy, params) if track_drift else None,
        previous=jax.tree.map(jnp.zeros_like, params) if track_drift else None,
        proximal=None if proximal is None else _copied(params, proximal),
    )


def start_stage(state: TrainState) -> TrainState:
    """Copy the weights to `anchor` at the start of a stage, if the drift is tracked."""
    if state.anchor is None:
        return state
    return dataclasses.replace(state, anchor=jax.tree.map(jnp.copy, state.params))


def renew_proximal(state: TrainState) -> TrainState:
    """Make the current policy the proximal policy, if the state has one."""
    if state.proximal is None:
        return state
    return with_proximal(state, jax.tree.leaves(state.proximal)[0].dtype)


def with_proximal(state: TrainState, dtype: Any) -> TrainState:
    """Make the current policy the proximal policy, with weights in this dtype; None: no proximal policy."""
    return dataclasses.replace(state, proximal=None if dtype is None else _copied(state.params, dtype))


def _copied(params: Any, dtype: Any) -> Any:
    """Return a copy in another dtype. It shares no memory with `params`, which the update step donates."""
    return jax.tree.map(lambda weight: jnp.array(weight, jnp.dtype(dtype), copy=True), params)


def state_sharding(mesh: Mesh, model: Model, state: Any) -> Any:
    """Return the shardings of a state. Moments are sharded like their parameters, scalars are replicated."""
    return param_sharding(mesh, model, state)
