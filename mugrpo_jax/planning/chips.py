"""Define the devices that a run can be planned for: chips with their published figures, and topologies.

A topology is written `KIND:SHAPE`, such as `v5e:8x8` or `h100:8`. The product of the shape is the number of
chips. Google names v5p slices by cores instead, and a chip has two cores, so v5p-32 is `v5p:2x2x4`.
"""

import dataclasses
import importlib.util
import math
import os
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import Mesh

from mugrpo_jax.config import RunConfig
from mugrpo_jax.models import ModelConfig, make_mesh
from mugrpo_jax.setup.devices import sampling_only_mesh, training_devices

GB = 10**9
_USABLE = 0.96  # share of a chip's memory for programs; the runtime and fragmentation need memory too


@dataclasses.dataclass(frozen=True)
class Chip:
    """The published figures of one kind of chip; None if a figure is not known.

    Attributes:
      name: the name to print.
      memory: bytes of device memory.
      flops: peak FLOP/s of dense bfloat16 matrix products.
      bandwidth: bytes/s that the chip reads from or writes to its memory.
      link: bytes/s that the chip sends to other chips of its slice or node, over all its links together.
    """

    name: str
    memory: int
    flops: float | None = None
    bandwidth: float | None = None
    link: float | None = None

    @property
    def usable_memory(self) -> int:
        """Return the bytes of the chip's memory that programs may use."""
        return int(self.memory * _USABLE)


# TPU: docs.cloud.google.com/tpu/docs/v5e, /v5p and /v6e ("key specifications"). The bandwidth between chips
# is given there for both directions together (400, 1200 and 800 GB/s); `link` is half of it.
# GPU: nvidia.com/h100 and nvidia.com/h200, SXM data sheets. FLOP/s are half of the figure with sparsity, and
# `link` is half of NVLink's 900 GB/s, which are both directions together too. The cards with 24 GB: the data
# sheet of the L4 and the white paper of the Ada architecture; they have no NVLink, `link` is PCIe 4.0 × 16.
CHIPS: Mapping[str, Chip] = MappingProxyType(
    {
        "v5e": Chip("TPU v5e", 16 * GB, 197e12, 819e9, 200e9),
        "v5p": Chip("TPU v5p", 95 * GB, 459e12, 2765e9, 600e9),
        "v6e": Chip("TPU v6e", 32 * GB, 918e12, 1640e9, 400e9),
        "h100": Chip("NVIDIA H100 SXM", 80 * GB, 989e12, 3350e9, 450e9),
        "h200": Chip("NVIDIA H200 SXM", 141 * GB, 989e12, 4800e9, 450e9),
        "l4": Chip("NVIDIA L4", 24 * GB, 121e12, 300e9, 32e9),
        "rtx4090": Chip("NVIDIA RTX 4090", 24 * GB, 165e12, 1008e9, 32e9),
    }
)
_TPU = ("v5e", "v5p", "v6e")
GPU_KINDS = ("gpu", "h100", "h200", "l4", "rtx4090")
_KINDS = (*_TPU, *GPU_KINDS, "cpu")


@dataclasses.dataclass(frozen=True)
class Topology:
    """A set of devices of one kind to compile programs for. The devices need not be present.

    Attributes:
      name: the name that the user wrote, such as `v5e:8x8`.
      chip: the figures of every device.
      devices: abstract TPU devices, or devices of this machine.
      stand_in: the TPU slice for which programs are compiled if GPUs are absent; None without absent GPUs.
    """

    name: str
    chip: Chip
    devices: Sequence[Any]
    stand_in: str | None = None

    @property
    def hosts(self) -> int:
        """Return the number of hosts (processes) that the devices belong to."""
        return len({device.process_index for device in self.devices})

    def host_devices(self) -> Sequence[Any]:
        """Return the devices of one host, on which the host runs its own sampler.

        For a TPU slice with several hosts, return a separate, smaller slice, because the compiler cannot
        compile collectives over a part of a v5e or v6e slice.
        """
        local = [d for d in self.devices if d.process_index == self.devices[0].process_index]
        if len(local) == len(self.devices) or local[0].platform != "tpu":
            return local
        kind, _, shape = (self.stand_in or self.name).partition(":")
        ends = [max(axis) - min(axis) + 1 for axis in zip(*(device.coords for device in local))]
        return _tpu_devices(self.name, f"{kind}:{'x'.join(map(str, ends[: shape.count('x') + 1]))}")

    def __str__(self) -> str:
        hosts = "1 host" if self.hosts == 1 else f"{self.hosts} hosts"
        text = f"{len(self.devices)} × {self.chip.name} on {hosts}"
        if self.stand_in is None:
            return text
        return f"{text}, none of them here: compiled for {self.stand_in} in their place, an estimate"


def find_topology(name: str) -> Topology:
    """Return the topology with this name. Raise a `ValueError` if the kind or the shape is invalid."""
    kind, colon, shape = name.partition(":")
    if not colon or kind not in _KINDS:
        hint = " (Google's v5p-32 counts cores: v5p:2x2x4)" if name.startswith("v5p-") else ""
        raise ValueError(f"topology {name!r}: expected KIND:SHAPE with KIND one of {', '.join(_KINDS)}{hint}")
    sizes = [int(size) for size in shape.split("x")] if re.fullmatch(r"\d+(x\d+)*", shape) else [0]
    axes = {"v5e": 2, "v5p": 3, "v6e": 2}.get(kind, 1)
    if len(sizes) != axes or math.prod(sizes) < 1:
        example = {2: "4x4", 3: "2x2x4"}.get(axes, "8")
        raise ValueError(
            f"topology {name!r}: the shape of {kind} has {axes} positive numbers, as {kind}:{example}"
        )
    if kind in _TPU:
        return Topology(name, CHIPS[kind], _tpu_devices(name, name))
    if kind == "cpu":
        return _cpu(name, sizes[0])
    return _gpu(name, kind, sizes[0])


def topology_mesh(config: RunConfig, topology: Topology) -> Mesh:
    """Arrange the devices of a topology that train, which are all by default, in the config's mesh."""
    shape, devices = config.mesh, training_devices(config, topology.devices)
    try:
        return make_mesh(data=shape.data, fsdp=shape.fsdp, tensor=shape.tensor, devices=devices)
    except ValueError as error:
        raise ValueError(f"topology {topology.name!r}: {error}") from None


def topology_apart(config: RunConfig, model: ModelConfig, topology: Topology) -> Mesh | None:
    """Return a mesh of the devices of a topology that only sample; None if there are none."""
    return sampling_only_mesh(config, model, topology.devices) if config.mesh.sampling_devices else None


def _cpu(name: str, count: int) -> Topology:
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise ValueError(
            f"topology {name!r}: this process has {len(devices)} CPU devices; set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={count}"
        )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Topology(name, Chip("CPU device", memory // count), devices[:count])


def _gpu(name: str, kind: str, count: int) -> Topology:
    """Return this machine's GPUs, or a TPU slice to compile for instead if the machine has too few GPUs."""
    found = jax.devices() if jax.default_backend() == "gpu" else []
    if len(found) >= count and (kind == "gpu" or chip_of(found[0]).name == CHIPS[kind].name):
        return Topology(name, chip_of(found[0]), found[:count])
    chip = CHIPS["h100" if kind == "gpu" else kind]
    if count & (count - 1) or count > 512:
        raise ValueError(f"topology {name!r}: without GPUs here the number must be a power of two up to 512")
    # Compile for a TPU slice with as many chips, up to eight per host. The TPU compiler keeps bfloat16 and
    # has a fused attention kernel, like the GPU compiler. The CPU compiler would double the activations.
    sizes = [1, 1, 1]
    while math.prod(sizes) < count:
        sizes[sizes.index(min(sizes))] *= 2
    slice_name = f"v5p:{'x'.join(map(str, sizes))}"
    host = [min(size, 2) for size in sizes]
    return Topology(name, chip, _tpu_devices(name, slice_name, chips_per_host_bounds=host), slice_name)


def _tpu_devices(name: str, slice_name: str, **options: Any) -> Sequence[Any]:
    if importlib.util.find_spec("libtpu") is None:
        where = "on Linux and x86-64; it also stands in for GPUs"
        raise ValueError(f"topology {name!r}: libtpu is not installed; run: pip install libtpu ({where})")
    if jax.config.jax_platforms == "cpu":  # type: ignore[attr-defined]  # defined when jax is imported
        # We only compile: libtpu need not query a TPU's metadata, look for its hosts, or lock it.
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-1")
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    from jax.experimental import topologies

    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=slice_name, **options).devices
    except Exception as error:  # the type depends on the version of jax
        reason = " ".join(str(error).split()).removeprefix("INVALID_ARGUMENT: ")
        raise ValueError(f"topology {name!r}: {reason[:200]}") from None


def chip_of(device: Any) -> Chip:
    """Return the chip of a device. If the chip is not in `CHIPS`, only its name and memory are known."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    memory = stats["bytes_limit"] if stats else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    kinds = {"v5 lite": "v5e", "v5e": "v5e", "v6 lite": "v6e", "v6e": "v6e", "v5": "v5p"}
    kinds |= {"h100": "h100", "h200": "h200", "rtx 4090": "rtx4090", "l4": "l4"}
    name = device.device_kind.lower()
    kind = next((known for part, known in kinds.items() if re.search(rf"\b{part}\b", name)), None)
    chip = CHIPS[kind] if kind else Chip(device.device_kind, memory)
    return dataclasses.replace(chip, memory=memory)
