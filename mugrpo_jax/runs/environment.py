"""Collect the software versions and the devices of a run, for its report."""

import importlib.metadata
import platform
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jax

from mugrpo_jax import __version__

_PACKAGES = ("jax", "jaxlib", "optax")


def environment() -> dict[str, Any]:
    """Return package versions, git commit, devices and start time, for the file `environment.json`."""
    devices = Counter(device.device_kind for device in jax.devices())
    return {
        "mugrpo_jax": __version__,  # package metadata may be missing or old in a source tree
        **({} if (commit := _commit()) is None else {"commit": commit}),
        **{name: importlib.metadata.version(name) for name in _PACKAGES},
        "python": platform.python_version(),
        "system": platform.platform(terse=True),
        "devices": ", ".join(f"{count} × {kind}" for kind, count in devices.items()),
        "processes": jax.process_count(),
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }


def _commit() -> str | None:
    """Return the commit of this source tree, plus `-dirty` if files changed; None outside a source tree."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip() or None
    except (OSError, subprocess.TimeoutExpired):
        return None
