"""List the programs that make, change or move the whole model, so that the plan counts their memory too.

They run at the start of a run, at the start of a stage, and in `mugrpo export`. Each of them keeps the model
sharded. The exception is sampling: with `mesh.sampling_tensor=1`, every device gets all weights.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mugrpo_jax import training
from mugrpo_jax.models import LoraDecoder, param_sharding
from mugrpo_jax.models.eight_bits import in_eight_bits
from mugrpo_jax.models.io.huggingface_export import tensor_gatherer
from mugrpo_jax.models.lora import stack_merger
from mugrpo_jax.models.sharding import MESH_AXES, placed
from mugrpo_jax.models.weights import abstract_params, params_maker
from mugrpo_jax.planning.programs import Program, UpdatePrograms
from mugrpo_jax.planning.run_memory import abstract_reference, bytes_on_device
from mugrpo_jax.sampling import SamplerPlan
from mugrpo_jax.sampling.sampler_weights import sampler_shardings
from mugrpo_jax.setup.devices import layout_maker, loading_mesh, sender
from mugrpo_jax.setup.lora import loaded_dtype, merge_for_sampling


def model_programs(updates: UpdatePrograms, sampler: SamplerPlan | None) -> Iterator[Program]:
    """Yield the programs that touch the whole model: loading, state, stage, copy for sampling, export."""
    yield from _start_programs(updates)
    if sampler is not None:
        yield from _sampling_programs(updates, sampler)
    yield from _export_programs(updates)


def _start_programs(updates: UpdatePrograms) -> Iterator[Program]:
    config, mesh, model, state = updates.config, updates.mesh, updates.model, updates.state
    weights, program = bytes_on_device(state.params), functools.partial(Program, parts=updates.parts)
    base = bytes_on_device(updates.base)
    yield from _load_programs(updates)
    fields = {"state": {"track_drift": config.track_drift, "proximal": config.proximal_dtype}}
    if config.warm_start.updates and config.replay.run is None:
        fields["warm-start state"] = {"track_drift": False}
    for name, chosen in fields.items():
        make = training.state_maker(updates.optimizer, mesh, model, **chosen)
        yield program(name, base, functools.partial(make.lower, state.params))
    yield program("restore", base, None, made=state)
    if state.anchor is not None:
        copy = training.anchor_maker(state.params)
        rest = updates.state_bytes - weights - bytes_on_device(state.anchor)
        yield program("stage start", rest, functools.partial(copy.lower, state.params, state.anchor))
    if state.proximal is not None:
        renew = functools.partial(training.copy_weights.lower, state.params, config.proximal_dtype)
        yield program("proximal policy", updates.state_bytes - weights, renew)
    if config.uses_reference:
        yield program(
            "load reference", bytes_on_device(state) + base, None, made=abstract_reference(config, mesh)[1]
        )
    yield program("prepare update", updates.state_bytes - weights, updates.prepare)


def _load_programs(updates: UpdatePrograms) -> Iterator[Program]:
    """Yield how the first weights get to the devices; with LoRA these are the frozen weights."""
    config, mesh, decoder = updates.config, updates.mesh, updates.decoder
    dtype = loaded_dtype(config) if config.lora.rank else jnp.dtype(jnp.float32)
    program = functools.partial(Program, parts=updates.parts)
    if config.model.source == "tiny":
        make = params_maker(decoder, dtype=dtype, mesh=mesh)
        yield program("load random weights", 0, lambda: make.lower(np.uint32(0)))
        return
    params = abstract_params(decoder, dtype=dtype)
    loaded = placed(params, param_sharding(mesh, decoder, params))
    yield program("load files", 0, None, made=loaded)
    if config.lora.rank and config.lora.base_dtype == "int8":
        largest = max(jax.tree.leaves(loaded["layers"]), key=lambda leaf: leaf.size)
        rest = bytes_on_device(loaded) - bytes_on_device(largest)
        yield program("load in 8 bits", rest, functools.partial(in_eight_bits.lower, largest))


def _sampling_programs(updates: UpdatePrograms, plan: SamplerPlan) -> Iterator[Program]:
    """Yield the program that casts the weights, and the one that sends the largest array to the sampler."""
    mesh = updates.mesh
    if updates.base is not None and mesh.size == 1:
        yield _merge_program(updates, plan)
        return
    params = updates.state.params if updates.base is None else updates.state.params | {"base": updates.base}
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
    before = jax.tree.leaves(placed(shapes, sampler_shardings(plan, mesh)))
    # On several hosts the devices may have another order. It changes who sends to whom, but no size.
    tensor = updates.config.mesh.sampling_tensor
    rows = Mesh(mesh.devices.reshape(-1, 1, tensor), MESH_AXES, axis_types=(AxisType.Auto,) * 3)
    targets = sampler_shardings(plan, rows, only="tensor")
    after = jax.tree.leaves(placed(shapes, targets))
    largest = max(range(len(before)), key=lambda number: before[number].size)
    yield Program(
        "send for sampling",
        # Arrays that were sent are freed, so that the others and the sent ones are at most those of the end.
        updates.state_bytes + bytes_on_device(after) - bytes_on_device(after[largest]),
        functools.partial(sender(after[largest].sharding).lower, before[largest]),
        parts=tensor,
    )


def _merge_program(updates: UpdatePrograms, plan: SamplerPlan) -> Program:
    """Return the program that merges one layer on one device. The layers before it are merged already."""
    model = updates.model
    assert isinstance(model, LoraDecoder)
    place = NamedSharding(updates.mesh, P())

    def one_layer(stacked: Any) -> Any:
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=place), stacked["layers"]
        )

    layer, adapter = one_layer(updates.base), one_layer(updates.state.params)
    return Program(
        "cast for sampling",
        updates.sampling_bytes + plan.weight_bytes,
        functools.partial(merge_for_sampling.lower, model, layer, adapter, **plan.layout),
    )


def _export_programs(updates: UpdatePrograms) -> Iterator[Program]:
    """Yield the program that gathers the largest tensor, with all weights sharded as `export` has them.

    With LoRA, also yield the program that merges the weights of the largest matrix of all layers.
    """
    decoder, model = updates.decoder, updates.model
    mesh = loading_mesh(decoder.config, list(updates.mesh.devices.flat))
    adapted = isinstance(model, LoraDecoder)
    params = abstract_params(decoder, dtype=loaded_dtype(updates.config) if adapted else jnp.float32)
    weights = placed(params, param_sharding(mesh, decoder, params))
    leaves = jax.tree.leaves(weights)
    stacked = [weight.axes[0] == "layers" for weight in jax.tree.leaves(decoder.weights())]
    sizes = [leaf.size // (leaf.shape[0] if split else 1) for leaf, split in zip(leaves, stacked)]
    largest = int(np.argmax(sizes))
    leaf, layer = leaves[largest], 0 if stacked[largest] else None
    yield Program(
        "export of the largest tensor",
        bytes_on_device(leaves) - bytes_on_device(leaf),
        functools.partial(tensor_gatherer(leaf.sharding).lower, leaf, layer),
    )
    if isinstance(model, LoraDecoder):
        adapters = abstract_params(model)
        name = max(adapters["layers"], key=lambda name: weights["layers"][name].size)
        adapter = placed(adapters, param_sharding(mesh, model, adapters))["layers"][name]
        matrix = weights["layers"][name]
        merger = stack_merger(model, name, matrix, matrix.dtype)
        yield Program(
            "export of merged weights",
            bytes_on_device(leaves) - bytes_on_device(matrix),
            functools.partial(merger.lower, matrix, adapter),
        )
