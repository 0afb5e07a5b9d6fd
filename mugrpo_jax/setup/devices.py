"""Make the device meshes of a run: one mesh for the updates, and one mesh per host for sampling."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from mugrpo_jax.config import ConfigError, RunConfig
from mugrpo_jax.models import Decoder, LoraDecoder, ModelConfig, make_mesh
from mugrpo_jax.models.sharding import MESH_AXES
from mugrpo_jax.sampling import SamplerPlan
from mugrpo_jax.sampling.sampler_weights import params_sharding, sampler_shardings, sampling_params
from mugrpo_jax.setup.lora import merged_params


def run_mesh(config: RunConfig) -> Mesh:
    """Return a mesh of all devices that train, with the shape that the config gives."""
    sizes: dict[str, Any] = {axis: getattr(config.mesh, axis) for axis in MESH_AXES}
    if config.mesh.sampling_devices:
        sizes["devices"] = training_devices(config, jax.devices())
    mesh = make_mesh(**sizes)
    _check_attention(config, mesh)
    return mesh


def sampling_only_mesh(config: RunConfig, model: ModelConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """Return a mesh of the devices that only sample (`mesh.sampling_devices`): the last ones."""
    devices = jax.devices() if devices is None else devices
    return loading_mesh(model, devices[-config.mesh.sampling_devices :])


def training_devices(config: RunConfig, devices: Sequence[Any]) -> Sequence[Any]:
    """Return the devices that train: all but the last ones, if those only sample."""
    count = config.mesh.sampling_devices
    if not count:
        return devices
    if len({device.process_index for device in devices}) > 1:
        raise ConfigError(
            "mesh.sampling_devices: only on one host; on several, start mugrpo sample on its own"
        )
    if count >= len(devices):
        remedy = f"use at most {len(devices) - 1}" if len(devices) > 1 else "leave this key out"
        raise ConfigError(
            f"mesh.sampling_devices: {count} of the {len(devices)} devices here leave none to train; {remedy}"
        )
    return devices[:-count]


def _check_attention(config: RunConfig, mesh: Mesh) -> None:
    """Raise an error if the devices do not have the implementation of attention that the config names."""
    platform, wanted = mesh.devices.flat[0].platform, config.model.attention
    needed = {"cudnn": ("gpu", "cuda", "rocm"), "splash": ("tpu",)}.get(wanted, (platform,))
    if platform not in needed:
        raise ConfigError(
            f"model.attention: {wanted} needs a {needed[0].upper()}, this machine has a {platform.upper()}; "
            "use auto"
        )


def local_device(mesh: Mesh) -> Any:
    """Return the first device of this host. Only a host's own devices tell how much memory is free."""
    devices = list(mesh.devices.flat)
    return next((d for d in devices if d.process_index == jax.process_index()), devices[0])


def sampling_mesh(mesh: Mesh, tensor: int) -> Mesh | None:
    """Return a mesh of this host's devices, `tensor` of them per copy of the weights; None for one device."""
    local = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    if len(local) % tensor:
        raise ConfigError(
            f"mesh.sampling_tensor: {tensor} does not divide the {len(local)} devices of a host"
        )
    if jax.process_count() == 1:  # in the order of `mesh`, so that one program can copy weights between them
        return None if len(local) == 1 else _rows_of(local, tensor)
    return _rows_of(sorted(local, key=lambda device: device.id), tensor)


def _on_all_hosts(mesh: Mesh) -> Mesh:
    """Extend this host's sampling mesh to one mesh over the devices of all hosts."""
    if jax.process_count() == 1:
        return mesh
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    return _rows_of(devices, mesh.shape["tensor"])


def _rows_of(devices: Sequence[jax.Device], tensor: int) -> Mesh:
    return Mesh(np.asarray(devices).reshape(-1, 1, tensor), MESH_AXES, axis_types=(AxisType.Auto,) * 3)


def copy_on_host(model: Decoder | LoraDecoder, params: Any, plan: SamplerPlan, mesh: Mesh) -> Any:
    """Copy weights from all devices, `mesh`, to those of this host's sampler, in the sampler's layout.

    With LoRA, `params` are the adapters with the frozen weights under the key `base`, and the copy is merged.

    The first program casts and splits the weights into layers, so that the other programs send few bytes and
    one array at a time. A device holds more than its own shard of one array only.
    """
    assert plan.mesh is not None
    everywhere = params_sharding(dataclasses.replace(plan, mesh=_on_all_hosts(plan.mesh)))
    leaves, tree = jax.tree.flatten(layout_maker(model, plan, mesh)(params))
    targets = zip(jax.tree.leaves(everywhere), jax.tree.leaves(params_sharding(plan)), strict=True)
    for number, (spread, local) in enumerate(targets):
        sent = jax.block_until_ready(_sent(leaves[number], spread))  # so that its source is free by then
        leaves[number] = _local_part(sent, local)
    return jax.tree.unflatten(tree, leaves)


@functools.cache  # so that every stage calls the same compiled program
def layout_maker(model: Decoder | LoraDecoder, plan: SamplerPlan, mesh: Mesh) -> Any:
    """Return the program that changes weights to the sampler's dtype and layout, sharded over `mesh`."""
    shardings = sampler_shardings(plan, mesh)
    change: Any = sampling_params
    if isinstance(model, LoraDecoder):
        change = functools.partial(merged_params, model)
    return jax.jit(functools.partial(change, **plan.layout), out_shardings=shardings)


def sender(sharding: NamedSharding) -> Any:
    """Return the program that sends an array to another sharding over the same devices."""
    return jax.jit(_unchanged, out_shardings=sharding)


def _unchanged(array: jax.Array) -> jax.Array:
    return array


def _sent(leaf: jax.Array, sharding: NamedSharding) -> jax.Array:
    if sharding.is_fully_addressable:
        return sender(sharding)(leaf)
    return jax.device_put(leaf, sharding)  # calls the same program, also if the order of the devices differs


def _local_part(leaf: jax.Array, sharding: NamedSharding) -> jax.Array:
    shards = [shard.data for shard in leaf.addressable_shards]
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards)


def loading_mesh(model: ModelConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """Return a mesh of all devices that splits the weights as far as the width of the model allows."""
    devices = jax.devices() if devices is None else devices
    fsdp = math.gcd(model.hidden_size, len(devices))
    return make_mesh(data=-1, fsdp=fsdp, devices=devices)
