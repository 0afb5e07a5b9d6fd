"""Several hosts as one run: who they are, and what they must agree on.

Arrays move between hosts inside jitted programs. What is here are the few words that hosts exchange outside
of them, through the coordination service of `jax.distributed`, every wait bounded. With one process, all of
it is immediate.
"""

import itertools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.distributed import global_state
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

_WAIT_S = 3600.0  # for slower hosts; one that died is noticed by its missing heartbeats long before

_calls = itertools.count()


def gather(name: str, value: Any, *, timeout_s: float = _WAIT_S) -> list[Any]:
    """What each host says (anything JSON), by process; all hosts must ask in the same order."""
    if jax.process_count() == 1:
        return [value]
    client, place = global_state.client, f"mugrpo/{next(_calls)}-{name}"
    assert client is not None
    client.key_value_set(f"{place}/{jax.process_index()}", json.dumps(value))
    client.wait_at_barrier(place, int(1000 * timeout_s))
    return [
        json.loads(client.blocking_key_value_get(f"{place}/{i}", 60_000)) for i in range(jax.process_count())
    ]


class Vote:
    """Whether any host says yes, asked on the devices, so that no host waits for the answer."""

    def __init__(self, mesh: Mesh) -> None:
        everywhere = NamedSharding(mesh, P(mesh.axis_names))
        no, yes = np.zeros(mesh.size, np.float32), np.ones(mesh.size, np.float32)
        self._no, self._yes = (
            jax.make_array_from_callback(ballots.shape, everywhere, ballots.__getitem__)
            for ballots in (no, yes)
        )
        self._count = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, P()))

    def __call__(self, answer: bool) -> jax.Array:
        """1.0 if any host says yes, once the device has come this far."""
        return self._count(self._yes if answer else self._no)
