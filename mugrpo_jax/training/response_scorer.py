"""Compute the log-probs of stored responses under frozen weights, such as those of the reference policy."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mugrpo_jax.models import Model
from mugrpo_jax.models.sharding import batch_sharding, placed
from mugrpo_jax.rollouts import Buckets, Group
from mugrpo_jax.rollouts.micro_batches import MicroBatch, Row, arrange
from mugrpo_jax.training.update_step import StepOptions, batch_logprobs

_ARRAYS = ("tokens", "mask", "packed_from", "padded_from")


class ResponseScorer:
    """Computes the log-probs of responses in micro-batches like those of the updates, with the same options.

    All hosts must score the same groups, because the weights are sharded over the devices of all hosts.
    """

    def __init__(self, model: Model, options: StepOptions, mesh: Mesh, buckets: Buckets) -> None:
        self.mesh, self.buckets = mesh, buckets
        self._logprobs = jax.jit(
            functools.partial(_logprobs, model, options), out_shardings=NamedSharding(mesh, P())
        )

    def start(self, params: Any, groups: Sequence[Group]) -> Callable[[], list[np.ndarray]]:
        """Start to score all responses of some groups; return a function that waits for the log-probs.

        `params` are the weights in the compute dtype. The log-probs are in the order of the responses.
        """
        responses = [(group.prompt, rollout) for group in groups for rollout in group.rollouts]
        # The number of a response takes the place of its advantage, to find the response again in its batch.
        rows = [Row(prompt, r.tokens, r.logprobs, float(i)) for i, (prompt, r) in enumerate(responses)]
        batches = arrange(rows, self.buckets)
        with jax.set_mesh(self.mesh):
            found = [self._logprobs(params, self._place(batch)) for batch in batches]
        for values in found:
            values.copy_to_host_async()
        return functools.partial(_in_order, len(rows), batches, found)

    def lower(self, params: Any, batch: Mapping[str, jax.ShapeDtypeStruct]) -> Any:
        """Lower the program for abstract arrays, so that the caller can compile it ahead of time."""
        sharding = batch_sharding(self.mesh)
        arrays = {name: batch[name] for name in _ARRAYS}
        with jax.set_mesh(self.mesh):
            return self._logprobs.lower(params, placed(arrays, dict.fromkeys(arrays, sharding)))

    def _place(self, batch: MicroBatch) -> dict[str, jax.Array]:
        sharding = batch_sharding(self.mesh)
        return {
            name: jax.make_array_from_callback(batch[name].shape, sharding, batch[name].__getitem__)
            for name in _ARRAYS
        }


def _logprobs(model: Model, options: StepOptions, params: Any, batch: dict[str, jax.Array]) -> jax.Array:
    return batch_logprobs(model, options, params, batch)[0]


def _in_order(count: int, batches: Sequence[MicroBatch], found: Sequence[jax.Array]) -> list[np.ndarray]:
    ordered = [np.zeros(0, np.float32)] * count
    for batch, values in zip(batches, found):
        for number, mask, row in zip(batch["advantages"], batch["mask"] != 0, np.asarray(values)):
            if mask.any():
                ordered[int(number)] = row[mask]
    return ordered
