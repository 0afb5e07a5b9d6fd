"""Define the training state, a pytree of all arrays that an update changes, and make its first value."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from mugrpo_jax.models import Model, param_sharding
from mugrpo_jax.models.sharding import placed
from mugrpo_jax.models.weights import abstract_params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The training state. A checkpoint stores all of these fields.

    Attributes:
      params: the weights that are trained, in float32. With LoRA, these are the adapters alone.
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


def make_state(
    params: Any, optimizer: optax.GradientTransformation, mesh: Mesh, model: Model, **fields: Any
) -> TrainState:
    """Return the state before the first update, made sharded: no device ever holds more than its shard.

    `params` are donated: the state reuses their memory.

    Args:
      fields: `track_drift=True` adds `anchor` and `previous`. `proximal` is None, or the dtype in which the
        state also has the weights of a proximal policy.
    """
    return state_maker(optimizer, mesh, model, **fields)(params)


def state_maker(optimizer: optax.GradientTransformation, mesh: Mesh, model: Model, **fields: Any) -> Any:
    """Return the jitted program of `make_state`, a function of the weights, for the planner to compile."""
    shardings = state_sharding(mesh, model, _abstract(optimizer, model, **fields))
    return jax.jit(
        functools.partial(_init_state, optimizer, **fields),
        donate_argnums=0,
        in_shardings=(shardings.params,),
        out_shardings=shardings,
    )


def abstract_state(
    optimizer: optax.GradientTransformation, mesh: Mesh, model: Model, **fields: Any
) -> TrainState:
    """Return the state as abstract arrays with shardings, to restore a checkpoint or to compile programs."""
    shapes = _abstract(optimizer, model, **fields)
    return placed(shapes, state_sharding(mesh, model, shapes))


def _abstract(optimizer: optax.GradientTransformation, model: Model, **fields: Any) -> TrainState:
    return jax.eval_shape(functools.partial(_init_state, optimizer, **fields), abstract_params(model))


def _init_state(
    optimizer: optax.GradientTransformation, params: Any, *, track_drift: bool, proximal: Any = None
) -> TrainState:
    return TrainState(
        params=params,
        opt_state=optimizer.init(params),
        updates=jnp.zeros((), jnp.int32),
        skipped=jnp.zeros((), jnp.int32),
        anchor=jax.tree.map(jnp.copy, params) if track_drift else None,
        previous=jax.tree.map(jnp.zeros_like, params) if track_drift else None,
        proximal=None if proximal is None else copy_weights(params, proximal),
    )


def start_stage(state: TrainState) -> TrainState:
    """Copy the weights to `anchor` at the start of a stage, if the drift is tracked.

    The old `anchor` is donated: the copy reuses its memory.
    """
    if state.anchor is None:
        return state
    return dataclasses.replace(state, anchor=anchor_maker(state.params)(state.params, state.anchor))


def anchor_maker(params: Any) -> Any:
    """Return the jitted program of `start_stage`, which copies `params` (may be abstract) over an anchor."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, params)
    # `keep_unused`: the program does not read the old anchor, it only takes its memory.
    return jax.jit(_copy_over, donate_argnums=1, keep_unused=True, out_shardings=shardings)


def _copy_over(params: Any, old: Any) -> Any:
    return jax.tree.map(jnp.copy, params)


def renew_proximal(state: TrainState) -> TrainState:
    """Make the current policy the proximal policy, if the state has one."""
    if state.proximal is None:
        return state
    return with_proximal(state, jax.tree.leaves(state.proximal)[0].dtype)


def with_proximal(state: TrainState, dtype: Any) -> TrainState:
    """Make the current policy the proximal policy, with weights in this dtype; None: no proximal policy."""
    return dataclasses.replace(state, proximal=None if dtype is None else copy_weights(state.params, dtype))


@functools.partial(jax.jit, static_argnames="dtype")
def copy_weights(params: Any, dtype: Any) -> Any:
    """Return a copy of the weights in a dtype. It shares no memory with `params`, which updates donate."""
    return jax.tree.map(lambda weight: jnp.array(weight, jnp.dtype(dtype), copy=True), params)


def state_sharding(mesh: Mesh, model: Model, state: Any) -> Any:
    """Return the shardings of a state. Moments are sharded like their parameters, scalars are replicated."""
    return param_sharding(mesh, model, state)
