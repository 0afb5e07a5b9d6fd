"""Check once that loaded weights are finite, on the devices that hold them."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mugrpo_jax.models.weights import Params


def check_finite(
    params: Params, names: Mapping[tuple[Any, ...], Sequence[str]], source: str, mesh: Mesh | None
) -> None:
    """Raise a ValueError that names the first tensors with NaN or infinity.

    Only one boolean per tensor leaves the devices; on several hosts, all hosts get the same answer.

    Args:
      names: the names of each parameter in its file, by path; a stacked parameter has a name per layer.
      source: names the file or folder in the error.
      mesh: the devices of the parameters; None: the default device.
    """
    everywhere = None if mesh is None else NamedSharding(mesh, P())
    finite = jax.jit(_finite, out_shardings=everywhere)(params)
    bad = [
        name
        for path, leaf in jax.tree.leaves_with_path(finite)
        for name, good in zip(names[path], np.atleast_1d(np.asarray(leaf)))
        if not good
    ]
    if bad:
        more = f" (and {len(bad) - 1} more tensors)" if len(bad) > 1 else ""
        raise ValueError(f"{source}: tensor {bad[0]}{more} has values that are NaN or infinite")


def _finite(params: Params) -> Any:
    """Return whether each tensor is finite: one boolean, or one per layer for stacked parameters."""

    def whole(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        inner = tuple(range(1 if path[0].key == "layers" else 0, leaf.ndim))
        # NaN passes through max and min. Unlike `isfinite(leaf)`, they need no array of the leaf's size.
        return jnp.isfinite(leaf.max(axis=inner)) & jnp.isfinite(leaf.min(axis=inner))

    return jax.tree.map_with_path(whole, params)
