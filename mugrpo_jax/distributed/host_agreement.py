"""Exchange small values between hosts, over the link of `host_link`.

Arrays move between hosts inside jitted programs, not here. Every wait has a time limit. With one process,
every function returns at once.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mugrpo_jax.config import ConfigError, differing_keys
from mugrpo_jax.distributed.absence import Absent
from mugrpo_jax.distributed.host_link import HostLink


def gather(name: str, value: Any) -> list[Any]:
    """Return the values of all processes, in process order; a value is anything that JSON can represent.

    All processes must call `gather` equally often, in the same order and with the same names.
    """
    link = HostLink.current
    return [value] if link is None else link.gather(name, value)


def share(stop: Any) -> None:
    """Share a stop request: if `stop.requested` is True on one host, all hosts set it within seconds."""
    if HostLink.current is not None:
        HostLink.current.share(stop)


def reached(step: str) -> None:
    """Say that this host has reached a step; if a host is far behind the others, process 0 names it."""
    if HostLink.current is not None:
        HostLink.current.reached(step)


def check_same(name: str, value: Mapping[str, Any]) -> None:
    """Raise the same error on all hosts, with the differing keys, unless `value` is equal on all hosts."""
    first, *others = gather(name, value)
    for i, other in enumerate(others, 1):
        if differing := differing_keys(other, first):
            raise ConfigError(
                f"hosts disagree on the {name}: {'; '.join(differing)} (there: process {i}, here: "
                "process 0); start all of them with the same command"
            )


@contextlib.contextmanager
def together(name: str) -> Iterator[None]:
    """Run a `with` block on all hosts; if any host raises a user error in the block, all hosts raise it."""
    failure: Exception | None = None
    try:
        yield
    except (ValueError, OSError) as error:
        failure = error
    failures = gather(name, None if failure is None else [isinstance(failure, Absent), str(failure)])
    if failure is not None:
        raise failure
    for process, found in enumerate(failures):
        if found is not None:
            absent, message = found
            raise (Absent if absent else ConfigError)(f"process {process}: {message}")


class Vote:
    """Computes whether any host votes True, on the devices, so that no host has to wait for the others."""

    def __init__(self, mesh: Mesh) -> None:
        everywhere = NamedSharding(mesh, P(mesh.axis_names))
        no, yes = np.zeros(mesh.size, np.float32), np.ones(mesh.size, np.float32)
        self._no, self._yes = (
            jax.make_array_from_callback(ballots.shape, everywhere, ballots.__getitem__)
            for ballots in (no, yes)
        )
        self._count = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, P()))

    def __call__(self, answer: bool) -> jax.Array:
        """Return 1.0 if any host votes True, else 0.0, as an array that is computed asynchronously."""
        return self._count(self._yes if answer else self._no)
