"""What a run runs on, so that its report can say so."""

import importlib.metadata
import platform
import time
from collections import Counter
from typing import Any

import jax

from mugrpo_jax import __version__

_PACKAGES = ("jax", "jaxlib", "flax", "optax")


def environment() -> dict[str, Any]:
    """Versions and devices of this process."""
    devices = Counter(device.device_kind for device in jax.devices())
    return {
        "mugrpo_jax": __version__,  # not from the metadata: it may run from a source tree
        **{name: importlib.metadata.version(name) for name in _PACKAGES},
        "python": platform.python_version(),
        "system": platform.platform(terse=True),
        "devices": ", ".join(f"{count} × {kind}" for kind, count in devices.items()),
        "processes": jax.process_count(),
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }
