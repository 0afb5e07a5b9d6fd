"""Lower the programs of an update step for abstract arrays, and compile them before the first update."""

import functools
from collections.abc import Iterable
from typing import Any

import jax

from mugrpo_jax.compiling.compiled_programs import CompiledPrograms
from mugrpo_jax.models.sharding import batch_sharding
from mugrpo_jax.rollouts import Buckets, Shape, abstract_micro_batch, abstract_update
from mugrpo_jax.training.state import TrainState
from mugrpo_jax.training.update_step import UpdateStep, accumulate_name, frozen_weights


def compile_step_ahead(
    step: UpdateStep,
    programs: CompiledPrograms,
    state: TrainState,
    buckets: Buckets,
    shapes: Iterable[Shape],
    *,
    reference: bool,
    behaviors: bool = False,
    base: Any = None,
) -> None:
    """Start to compile the programs of `step` for some shapes of `buckets`; `state` is abstract.

    `programs` are those of `step`. `reference` says whether micro-batches have reference log-probs, and
    `behaviors` whether they tell the behavior of each response. `base` are the frozen weights of LoRA, also
    abstract.
    """
    names = step.metric_names(state, abstract_update(buckets, reference=reference, behaviors=behaviors), base)
    programs.ahead("prepare", functools.partial(lower_prepare, step, state, names))
    statistics = {} if step.statistics is None else step.statistics.abstract()
    for shape in shapes:
        batch = abstract_batch(step, shape, buckets.parts, reference=reference, behaviors=behaviors)
        programs.ahead(
            accumulate_name(batch, statistics), functools.partial(lower_accumulate, step, state, batch, base)
        )
    programs.ahead("optimizer", functools.partial(lower_apply, step, state))


def lower_prepare(step: UpdateStep, state: TrainState, names: tuple[str, ...]) -> Any:
    """Lower `UpdateStep.prepare`; `names` are from `UpdateStep.metric_names`."""
    with jax.set_mesh(step.mesh):
        return step.prepare.lower(state.params, names=names)


def lower_accumulate(step: UpdateStep, state: TrainState, batch: dict[str, Any], base: Any = None) -> Any:
    """Lower `UpdateStep.accumulate` for a micro-batch from `abstract_batch`."""
    batch = batch | frozen_weights(state, base)
    return step.lower_accumulate(abstract_compute(step, state), state.params, batch)


def lower_apply(step: UpdateStep, state: TrainState) -> Any:
    """Lower `UpdateStep.apply`."""
    with jax.set_mesh(step.mesh):
        return step.apply.lower(state, state.params)


def abstract_batch(
    step: UpdateStep, shape: Shape, parts: int, *, reference: bool, behaviors: bool = False
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the arrays of a micro-batch as abstract arrays that are split over the devices."""
    split = batch_sharding(step.mesh)
    return {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=split)
        for name, leaf in abstract_micro_batch(shape, parts, reference=reference, behaviors=behaviors).items()
    }


def abstract_compute(step: UpdateStep, state: TrainState) -> Any:
    """Return the abstract weights in the compute dtype."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, step.compute_dtype, sharding=leaf.sharding),
        state.params,
    )
