"""Settings of XLA for tests and checks of tiny programs, which take longer to compile than to run."""

import os
import subprocess
import sys

# Flags that libtpu knows too; it ends the process at an unknown one.
COMMON = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
# The emitters that XLA uses for fusions on CPUs take more than half of the compilation time. To compile a
# program in many parts is work of its own, which pays if there are cores for them.
_NEW = f"{COMMON} --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
# XLA starts so many threads for CPU devices. A program that was read from a cache may begin several
# collectives at once on each device, and each of them holds a thread until all devices have come.
THREADS = {"NPROC": "32"}
_VARIABLE = "QUICK_PROGRAMS"  # processes that this one starts need not try the flags again


def flags() -> str:
    """Return the flags that the XLA of jaxlib knows: it ends a process that gives it an unknown flag."""
    if _VARIABLE not in os.environ:
        os.environ[_VARIABLE] = _NEW if _known(_NEW) else COMMON
    return os.environ[_VARIABLE]


def _known(flags: str) -> bool:
    command = [sys.executable, "-c", "from jaxlib import xla_client; xla_client.CompileOptions()"]
    return not subprocess.run(command, env=os.environ | {"XLA_FLAGS": flags}, capture_output=True).returncode
