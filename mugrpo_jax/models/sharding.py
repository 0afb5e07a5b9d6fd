"""Make the device mesh with the axes `data`, `fsdp` and `tensor`, and shard arrays over this mesh.

Each axis of an array has a logical name such as `batch` or `heads`. `RULES` maps logical names to mesh axes.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mugrpo_jax.models.model_config import ModelConfig

MESH_AXES = ("data", "fsdp", "tensor")

# Logical axis -> the mesh axes that split it, or None. The batch is split over both data-parallel axes.
# Parameters are split over `fsdp` along the model width, over `tensor` along heads, MLP width and vocabulary.
RULES: dict[str | None, str | tuple[str, ...] | None] = {
    "batch": ("data", "fsdp"),
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    "layers": None,
    None: None,
}


def make_mesh(*, data: int = 1, fsdp: int = 1, tensor: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """Make a mesh of `devices` (default: all). One size may be -1: that axis gets all remaining devices.

    >>> dict(make_mesh(devices=jax.devices()[:1]).shape)
    {'data': 1, 'fsdp': 1, 'tensor': 1}
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = [data, fsdp, tensor]
    free = [i for i, size in enumerate(sizes) if size == -1]
    if len(free) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise ValueError(f"mesh: sizes must be positive with at most one -1, got {_describe(sizes)}")
    if free:
        known = math.prod(size for size in sizes if size != -1)
        if len(devices) % known:
            raise ValueError(
                f"mesh: {_describe(sizes)} does not fit: {known} does not divide the {len(devices)} devices"
            )
        sizes[free[0]] = len(devices) // known
    if math.prod(sizes) != len(devices):
        raise ValueError(
            f"mesh: {_describe(sizes)} does not multiply to the {len(devices)} devices; "
            "one of the three may be -1, which takes all that are left; --topology plans for other devices"
        )
    return Mesh(device_grid(sizes, devices), MESH_AXES, axis_types=(AxisType.Auto,) * 3)


def device_grid(sizes: Sequence[int], devices: Sequence[Any]) -> np.ndarray:
    """Arrange devices in an array of shape `sizes`, so that neighbours in the array have fast links.

    TPU slices are connected by a network that is much slower than the links inside a slice. So only `data`,
    which sends one gradient per update, goes across slices; `fsdp` and `tensor` stay inside a slice.
    """
    if devices[0].platform == "cpu":
        return np.asarray(devices).reshape(sizes)
    from jax.experimental import mesh_utils

    slices = {getattr(device, "slice_index", 0) for device in devices}
    if devices[0].platform != "tpu" or len(slices) == 1:
        return mesh_utils.create_device_mesh(sizes, devices=devices, allow_split_physical_axes=True)
    data, *inside = sizes
    if data % len(slices):
        raise ValueError(
            f"mesh: {_describe(sizes)} does not fit {len(slices)} slices of {len(devices) // len(slices)} "
            f"devices: fsdp and tensor stay inside a slice, so data must be a multiple of {len(slices)}"
        )
    return mesh_utils.create_hybrid_device_mesh(
        (data // len(slices), *inside),
        (len(slices), 1, 1),
        devices=devices,
        allow_split_physical_axes=True,
    )


def spec(*logical: str | None) -> P:
    """Return the `PartitionSpec` of an array whose axes have these logical names."""
    return P(*(RULES[name] for name in logical))


def placed(shapes: Any, shardings: Any) -> Any:
    """Add shardings to abstract arrays, as ahead-of-time compilation and checkpoint restore need them."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        shardings,
    )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding that splits the rows of a batch over the mesh axes `data` and `fsdp`."""
    return NamedSharding(mesh, spec("batch"))


def local_parts(mesh: Mesh) -> set[int]:
    """Return which of the parts, into which `batch_sharding` splits a batch, are on devices of this host."""
    parts = mesh.shape["data"] * mesh.shape["fsdp"]
    found = batch_sharding(mesh).addressable_devices_indices_map((parts,)).values()
    return {part for where in found if where is not None for part in range(parts)[where[0]]}


def constrain(x: jax.Array, *logical: str | None) -> jax.Array:
    """Shard `x` by the logical names of its axes. Without a current mesh, return `x` unchanged."""
    mesh = current_mesh()
    return x if mesh is None else jax.lax.with_sharding_constraint(x, spec(*logical))


def current_mesh() -> Any | None:
    """Return the mesh set by `jax.set_mesh`, or None if that mesh has other axes or only one device."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh if tuple(mesh.axis_names) == MESH_AXES and mesh.size > 1 else None


def check_mesh(config: ModelConfig, mesh: Mesh) -> None:
    """Raise ValueError if the size of a mesh axis does not divide a model dimension that the axis splits."""
    fsdp, tensor = mesh.shape["fsdp"], mesh.shape["tensor"]
    for axis, size, what, dimension in (
        ("fsdp", fsdp, "hidden_size", config.hidden_size),
        ("tensor", tensor, "num_heads", config.num_heads),
        ("tensor", tensor, "num_kv_heads", config.num_kv_heads),
        ("tensor", tensor, "intermediate_size", config.intermediate_size),
        ("tensor", tensor, "vocab_size", config.vocab_size),
    ):
        if dimension % size:
            raise ValueError(f"mesh: {axis}={size} does not divide the model's {what}={dimension}")


def _describe(sizes: Sequence[int]) -> str:
    return " × ".join(f"{axis}={size}" for axis, size in zip(MESH_AXES, sizes))
