"""Decide which GPUs of its node a process takes. TPUs and CPUs are not divided between processes."""

import glob
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict

from mugrpo_jax.config import ConfigError

_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_CHOSEN = ("JAX_LOCAL_DEVICE_IDS", "JAX_CUDA_VISIBLE_DEVICES", "JAX_ROCM_VISIBLE_DEVICES")


class DeviceView(TypedDict):
    """What one process sees, before any device is started.

    Attributes:
      node: identifies the node, or the container, in which the process runs.
      names: the list of visible GPUs that the launcher or the user has set, or None.
      count: the number of GPUs that the process sees.
      bound: True if the launcher says that it has given this process GPUs of its own.
      chosen: True if the user has set the devices of the process in JAX's own variables.
    """

    node: str
    names: str | None
    count: int
    bound: bool
    chosen: bool


def view_devices(environment: Mapping[str, str] = os.environ) -> DeviceView:
    """Return what this process sees, without starting a device."""
    boot = _BOOT.read_text().strip() if _BOOT.exists() else ""
    node = " ".join((platform.node(), boot, environment.get("SLURM_NODEID", "")))
    names = next((environment[name] for name in _VISIBLE if name in environment), None)
    platforms = environment.get("JAX_PLATFORMS", "").split(",")
    if platforms != [""] and not {"cuda", "rocm", "gpu"} & set(platforms):
        count = 0  # the user wants another kind of device
    elif names is None:
        count = len(glob.glob("/dev/nvidia[0-9]*"))
    else:  # as in CUDA, an index of -1 hides itself and all devices after it
        listed = [name.strip() for name in names.split(",")]
        count = listed.index("-1") if "-1" in listed else sum(map(bool, listed))
    # SLURM can show each task only its own GPUs, and then numbers them from 0 in every task.
    of_node, of_task = (environment.get(f"SLURM_GPUS_{which}", "") for which in ("ON_NODE", "PER_TASK"))
    bound = count < int(of_node or 0) if of_node.isdecimal() else False
    bound |= of_task.rpartition(":")[2] == str(count)  # such as 1 or h100:1
    chosen = any(environment.get(name, "all") != "all" for name in _CHOSEN)
    return DeviceView(node=node, names=names, count=count, bound=bound, chosen=chosen)


def choose_devices(views: Sequence[DeviceView], process: int) -> list[int] | None:
    """Return the indices of the GPUs that a process takes, or None for all that it sees.

    One process on a node takes all GPUs. Several processes on a node divide its GPUs evenly, in the order of
    the processes. If the launcher has already given the processes different GPUs, each takes all it sees.

    Args:
      views: what each process of the run sees, in process order.
      process: the process to decide for.
    """
    mine = views[process]
    together = [i for i, view in enumerate(views) if view["node"] == mine["node"]]
    if len(together) == 1 or mine["count"] == 0 or any(views[i]["chosen"] for i in together):
        return None
    if mine["bound"] or len({views[i]["names"] for i in together}) == len(together):
        return None
    each, rest = divmod(mine["count"], len(together))
    if rest:
        gpus = "1 GPU" if mine["count"] == 1 else f"{mine['count']} GPUs"
        fitting = [str(n) for n in range(1, mine["count"] + 1) if mine["count"] % n == 0]
        raise ConfigError(
            f"{len(together)} processes on one node cannot divide its {gpus} evenly; start "
            f"{' or '.join(fitting)} per node"
        )
    first = together.index(process) * each
    return list(range(first, first + each))
