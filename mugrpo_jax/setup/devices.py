"""Make the device meshes of a run: one mesh for the updates, and one mesh per host for sampling."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from mugrpo_jax.config import ConfigError, RunConfig
from mugrpo_jax.models import Decoder, cast, make_mesh, param_sharding
from mugrpo_jax.models.sharding import MESH_AXES


def run_mesh(config: RunConfig) -> Mesh:
    """Return a mesh of all devices, with the shape that the config gives."""
    mesh = make_mesh(data=config.mesh.data, fsdp=config.mesh.fsdp, tensor=config.mesh.tensor)
    _check_attention(config, mesh)
    return mesh


def _check_attention(config: RunConfig, mesh: Mesh) -> None:
    """Raise an error if the devices do not have the implementation of attention that the config names."""
    platform, wanted = mesh.devices.flat[0].platform, config.model.attention
    needed = {"cudnn": ("gpu", "cuda", "rocm"), "splash": ("tpu",)}.get(wanted, (platform,))
    if platform not in needed:
        raise ConfigError(
            f"model.attention: {wanted} needs a {needed[0].upper()}, this machine has a {platform.upper()}; "
            "use auto"
        )


def sampling_mesh(mesh: Mesh, tensor: int) -> Mesh | None:
    """Return a mesh of this host's devices, `tensor` of them per copy of the weights; None for one device."""
    local = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    if len(local) % tensor:
        raise ConfigError(
            f"mesh.sampling_tensor: {tensor} does not divide the {len(local)} devices of a host"
        )
    if jax.process_count() == 1:
        return None if len(local) == 1 else make_mesh(data=-1, tensor=tensor, devices=local)
    return _rows_of(sorted(local, key=lambda device: device.id), tensor)


def _on_all_hosts(mesh: Mesh) -> Mesh:
    """Extend this host's sampling mesh to one mesh over the devices of all hosts."""
    if jax.process_count() == 1:
        return mesh
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    return _rows_of(devices, mesh.shape["tensor"])


def _rows_of(devices: Sequence[jax.Device], tensor: int) -> Mesh:
    return Mesh(np.asarray(devices).reshape(-1, 1, tensor), MESH_AXES, axis_types=(AxisType.Auto,) * 3)


_cast = jax.jit(cast, static_argnames="dtype")


def copy_on_host(model: Decoder, params: Any, mesh: Mesh, dtype: Any) -> Any:
    """Return a copy of the weights on this host's devices, split over the `tensor` axis of its sampling mesh.

    The weights are cast first, so that fewer bytes are sent. No device ever holds more than its own shard.
    """
    weights = _cast(params, dtype=dtype)
    spread = jax.device_put(weights, param_sharding(_on_all_hosts(mesh), model, weights))
    return jax.tree.map(
        lambda leaf, sharding: jax.make_array_from_single_device_arrays(
            leaf.shape, sharding, [shard.data for shard in leaf.addressable_shards]
        ),
        spread,
        param_sharding(mesh, model, weights),
    )
