"""The platforms, such as cpu, cuda and tpu, on which JAX can work on this machine."""

import glob
import importlib.metadata
import importlib.util
import os

import jax

_DEVICES = ("/dev/nvidia*", "/dev/kfd", "/dev/dxg", "/dev/accel*", "/dev/vfio/[0-9]*")


def without_missing_tpu() -> None:
    """Do not let JAX look for a TPU on a machine that has none, although libtpu is installed.

    `mugrpo plan --topology` needs libtpu on a laptop, and there libtpu prints five lines about missing hosts.
    When JAX is imported, it names its platforms itself if it finds libtpu and TPU chips. TPU_SKIP_MDS_QUERY
    alone says little: JAX sets it on a machine without chips that it knows, but Kubernetes sets it on TPU
    hosts too. Nothing is changed on a machine with a GPU or another device: JAX may be able to use it, or it
    warns that the package for it is missing.
    """
    asked = jax.config.jax_platforms  # type: ignore[attr-defined]  # defined when jax is imported
    has_libtpu = importlib.util.find_spec("libtpu") is not None
    if not asked and has_libtpu and "TPU_SKIP_MDS_QUERY" in os.environ and not _may_have_devices():
        jax.config.update("jax_platforms", "cpu")


def _may_have_devices() -> bool:
    """Return whether there are files of GPUs or TPUs, or plugins through which JAX finds other devices."""
    return bool(
        any(map(glob.glob, _DEVICES))
        or importlib.util.find_spec("jax_plugins")
        or importlib.metadata.entry_points(group="jax_plugins")
        or os.environ.get("PJRT_NAMES_AND_LIBRARY_PATHS")
    )


def missing_platform() -> str:
    """Return a text about JAX_PLATFORMS if JAX finds no such device; "" if it finds one."""
    asked = os.environ.get("JAX_PLATFORMS")
    if not asked:
        return ""
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # which one depends on the platform
        reason = f" ({' '.join(str(error).split())[:120]})" if str(error) else ""
        return (
            f"JAX_PLATFORMS={asked}: JAX finds no such device{reason}; unset it, or install the package "
            "for it, such as mugrpo-jax[cuda] or mugrpo-jax[tpu]"
        )
    return ""
