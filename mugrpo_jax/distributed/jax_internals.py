"""The only file that imports private modules of JAX: a public version of the same would go here."""

from typing import Any

from jax._src.clusters import ClusterEnv
from jax._src.distributed import global_state


def coordination_client() -> Any | None:
    """The client of JAX's coordination service (keys, values, barriers); None with one process."""
    return global_state.client


def in_cluster() -> bool:
    """Whether JAX finds out by itself which processes belong together: SLURM, Open MPI, TPU slices."""
    kinds = [kind for kind in ClusterEnv._cluster_types if not kind.opt_in_only_method]
    return any(kind.is_env_present() for kind in kinds)
