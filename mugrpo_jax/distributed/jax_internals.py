"""The only file that imports private modules of JAX, because JAX has no public functions for this."""

from typing import Any

from jax._src.clusters import ClusterEnv
from jax._src.distributed import global_state


def coordination_client() -> Any | None:
    """Return the client of JAX's coordination service (key-value store, barriers); None with one process."""
    return global_state.client


def in_cluster() -> bool:
    """Return whether JAX can detect the processes of the run itself (SLURM, Open MPI, TPU slices)."""
    kinds = [kind for kind in ClusterEnv._cluster_types if not kind.opt_in_only_method]
    return any(kind.is_env_present() for kind in kinds)
