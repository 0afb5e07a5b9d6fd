"""List the programs that make, change or move the whole model, so that the plan counts their memory too.

They run at the start of a run, at the start of a stage, and in `mugrpo export`. Each of them keeps the model
sharded. The exception is sampling: with `mesh.sampling_tensor=1`, every device gets all weights.
"""

import functools
from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from mugrpo_jax import training
from mugrpo_jax.models import param_sharding
from mugrpo_jax.models.io.huggingface_export import tensor_gatherer
from mugrpo_jax.models.sharding import MESH_AXES, placed
from mugrpo_jax.models.weights import abstract_params, params_maker
from mugrpo_jax.planning.programs import Program, UpdatePrograms
from mugrpo_jax.planning.run_plan import abstract_reference, bytes_on_device
from mugrpo_jax.sampling import SamplerPlan
from mugrpo_jax.sampling.programs import sampler_shardings
from mugrpo_jax.setup.devices import layout_maker, loading_mesh, sender


def model_programs(updates: UpdatePrograms, sampler: SamplerPlan | None) -> Iterator[Program]:
    """Yield the programs that touch the whole model: loading, state, stage, copy for sampling, export."""
    yield from _start_programs(updates)
    if sampler is not None:
        yield from _sampling_programs(updates, sampler)
    yield _export_program(updates)


def _start_programs(updates: UpdatePrograms) -> Iterator[Program]:
    config, mesh, model, state = updates.config, updates.mesh, updates.model, updates.state
    weights, program = bytes_on_device(state.params), functools.partial(Program, parts=updates.parts)
    if config.model.source == "tiny":
        yield program("load random weights", 0, lambda: params_maker(model, mesh=mesh).lower(np.uint32(0)))
    else:
        yield program("load files", 0, None, made=state.params)
    fields = {"state": {"track_drift": config.track_drift, "proximal": config.proximal_dtype}}
    if config.warm_start.updates and config.replay.run is None:
        fields["warm-start state"] = {"track_drift": False}
    for name, chosen in fields.items():
        make = training.state_maker(updates.optimizer, mesh, model, **chosen)
        yield program(name, 0, functools.partial(make.lower, state.params))
    yield program("restore", 0, None, made=state)
    if state.anchor is not None:
        copy = training.anchor_maker(state.params)
        rest = updates.state_bytes - weights - bytes_on_device(state.anchor)
        yield program("stage start", rest, functools.partial(copy.lower, state.params, state.anchor))
    if state.proximal is not None:
        renew = functools.partial(training.proximal_maker.lower, state.params, config.proximal_dtype)
        yield program("proximal policy", updates.state_bytes - weights, renew)
    if config.uses_reference:
        yield program(
            "load reference", bytes_on_device(state), None, made=abstract_reference(config, mesh)[1]
        )
    yield program("prepare update", updates.state_bytes - weights, updates.prepare)


def _sampling_programs(updates: UpdatePrograms, plan: SamplerPlan) -> Iterator[Program]:
    """Yield the program that casts the weights, and the one that sends the largest array to the sampler."""
    params, mesh = updates.state.params, updates.mesh
    change = layout_maker(updates.model, plan, mesh)
    yield Program(
        "cast for sampling",
        updates.state_bytes - bytes_on_device(params),
        functools.partial(change.lower, params),
        parts=mesh.shape["fsdp"] if plan.fuse else updates.parts,  # `tensor` does not split joined matrices
    )
    if mesh.size == 1:
        return
    shapes = jax.eval_shape(change, params)
    before = jax.tree.leaves(placed(shapes, sampler_shardings(updates.model, plan.fuse, mesh)))
    # On several hosts the devices may have another order. It changes who sends to whom, but no size.
    tensor = updates.config.mesh.sampling_tensor
    rows = Mesh(mesh.devices.reshape(-1, 1, tensor), MESH_AXES, axis_types=(AxisType.Auto,) * 3)
    targets = sampler_shardings(updates.model, plan.fuse, rows, only="tensor")
    after = jax.tree.leaves(placed(shapes, targets))
    largest = max(range(len(before)), key=lambda number: before[number].size)
    yield Program(
        "send for sampling",
        # Arrays that were sent are freed, so that the others and the sent ones are at most those of the end.
        updates.state_bytes + bytes_on_device(after) - bytes_on_device(after[largest]),
        functools.partial(sender(after[largest].sharding).lower, before[largest]),
        parts=tensor,
    )


def _export_program(updates: UpdatePrograms) -> Program:
    """Return the program that gathers the largest tensor, with all weights sharded as `export` has them."""
    model = updates.model
    mesh = loading_mesh(model.config, list(updates.mesh.devices.flat))
    params = abstract_params(model)
    leaves = jax.tree.leaves(placed(params, param_sharding(mesh, model, params)))
    stacked = [weight.axes[0] == "layers" for weight in jax.tree.leaves(model.weights())]
    sizes = [leaf.size // (leaf.shape[0] if split else 1) for leaf, split in zip(leaves, stacked)]
    largest = int(np.argmax(sizes))
    leaf, layer = leaves[largest], 0 if stacked[largest] else None
    return Program(
        "export of the largest tensor",
        bytes_on_device(leaves) - bytes_on_device(leaf),
        functools.partial(tensor_gatherer(leaf.sharding).lower, leaf, layer),
    )
