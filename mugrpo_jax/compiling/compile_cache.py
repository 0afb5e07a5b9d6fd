"""Keep compiled programs on disk, so that the next run on this machine does not compile them again.

JAX has such a cache, but without a folder it is off. We give it a folder in the user's cache. Programs for a
CPU use the instructions of that CPU, so each kind of CPU has a folder of its own: a home folder may be shared
by different machines.

Several CPU devices, which imitate a mesh, get no folder from us. A program that XLA reads from disk for them
may start its collectives in another order on each device. With few processors, all devices then wait for each
other, until XLA ends the process after 40 seconds.
"""

import hashlib
import os
import platform
from pathlib import Path
from typing import Any

import jax

AUTO, OFF = "auto", "off"
_MOST_BYTES = 8 << 30  # then JAX deletes the programs that were not used for the longest time


def use_compile_cache(setting: str | bool = AUTO) -> Path | None:
    """Turn the cache on, before anything is compiled, and return its folder; None if it is off.

    `setting` is the config's key `compile_cache`. If the user gave JAX a folder, for example with
    `JAX_COMPILATION_CACHE_DIR`, that one is used. Without a writable folder or with several CPU devices,
    `auto` goes on without a cache. Call this when all hosts are connected.
    """
    if setting in (OFF, False):  # YAML reads `off` as false
        jax.config.update("jax_enable_compilation_cache", False)
        return None
    if chosen := _setting("dir"):
        return Path(chosen)
    if setting == AUTO and jax.default_backend() == "cpu" and jax.device_count() > 1:
        return None
    folder = (_user_cache() if setting == AUTO else Path(str(setting)).expanduser().absolute()) / _machine()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder}: not writable")
    except OSError as error:
        if setting == AUTO:
            return None
        raise OSError(
            f"compile_cache: {setting}: {error.strerror or error}; use another folder or off"
        ) from None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # many small programs take long too
    if _setting("max_size") == -1:  # JAX's default: no limit
        jax.config.update("jax_compilation_cache_max_size", _MOST_BYTES)
    return folder


def _setting(name: str) -> Any:
    """What JAX now has, from the environment or from the code before us."""
    return getattr(jax.config, f"jax_compilation_cache_{name}")


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mugrpo_jax" / "programs"


def _machine() -> str:
    """A name for this kind of CPU: the architecture and a hash of its instructions."""
    known = Path("/proc/cpuinfo")
    lines = known.read_text().splitlines() if known.exists() else []
    abilities = [line for line in lines if line.lower().startswith(("flags", "features"))]
    name = abilities[0] if abilities else platform.processor()
    return f"{platform.machine() or 'cpu'}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
