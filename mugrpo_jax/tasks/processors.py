"""Count the processors that this process may use."""

import math
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def usable_processors(cgroup: Path = _CGROUP) -> int:
    """Return the number of processors that the scheduler and the container allow, at least 1.

    A job on a shared machine is often bound to some of its processors, and a container may be limited to a
    share of their time. `os.cpu_count` respects neither.
    """
    bound = hasattr(os, "sched_getaffinity")  # not on macOS
    allowed = len(os.sched_getaffinity(0)) if bound else os.cpu_count() or 1
    return math.ceil(min(allowed, _quota(cgroup)))


def _quota(cgroup: Path) -> float:
    """Return how many processors' time the container may use, from version 2 or 1 of Linux's cgroups."""
    try:
        if (cgroup / "cpu.max").exists():
            quota, period = (cgroup / "cpu.max").read_text().split()
        else:
            quota, period = (
                (cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period")
            )
        share = float(quota) / float(period)  # "max" and -1 mean no limit
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf
    return share if share > 0 else math.inf
