"""The device mesh (`data`, `fsdp`, `tensor`), and which mesh axes split each logical axis of an array."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mugrpo_jax.models.model_config import ModelConfig

MESH_AXES = ("data", "fsdp", "tensor")

# Logical axis -> mesh axes. The batch is split over both data-parallel axes; parameters are split over
# `fsdp` along the model width and over `tensor` along heads, MLP width and vocabulary.
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
    """A mesh with the three axes; one of the sizes may be -1 and takes all remaining devices.

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
        sizes[free[0]] = len(devices) // known
    if math.prod(sizes) != len(devices):
        raise ValueError(f"mesh: {_describe(sizes)} does not multiply to the {len(devices)} devices")
    if devices[0].platform == "cpu":
        grid = np.asarray(devices).reshape(sizes)
    else:
        from jax.experimental import mesh_utils

        grid = mesh_utils.create_device_mesh(sizes, devices=devices, allow_split_physical_axes=True)
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * 3)


def spec(*logical: str | None) -> P:
    """Partition spec of an array whose axes have these logical names."""
    return P(*(RULES[name] for name in logical))


def placed(shapes: Any, shardings: Any) -> Any:
    """Abstract arrays with shardings, for compilation or for restoring a checkpoint; nothing is allocated."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        shardings,
    )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of a batch: its rows are split over the data-parallel axes."""
    return NamedSharding(mesh, spec("batch"))


def constrain(x: jax.Array, *logical: str | None) -> jax.Array:
    """Fix the sharding of an activation if a mesh is set (`jax.set_mesh`); otherwise do nothing."""
    mesh = current_mesh()
    return x if mesh is None else jax.lax.with_sharding_constraint(x, spec(*logical))


def current_mesh() -> Any | None:
    """The current mesh of the trace, if it has our axes and more than one device."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh if tuple(mesh.axis_names) == MESH_AXES and mesh.size > 1 else None


def check_mesh(config: ModelConfig, mesh: Mesh) -> None:
    """Refuse a mesh that does not divide the model; the error names the axis and the numbers."""
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
