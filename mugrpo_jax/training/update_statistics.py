"""Compute the batch statistics of an objective over a whole update, before the gradient.

`objectives.batch_statistics` lists the objectives that have such statistics. They need the log-ratios of all
tokens, so an update of several micro-batches costs one more forward pass. The log-ratios of all micro-batches
are written into one buffer on the devices; each device writes only its own rows. The host never waits.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mugrpo_jax.models.sharding import batch_sharding
from mugrpo_jax.objectives import Statistics

LogProbs = Callable[[Any, Any], tuple[jax.Array, Any]]  # of weights and micro-batch; [rows, length] first
Buffer = dict[str, jax.Array]  # log_ratio, advantages and mask, each [parts, capacity]


class UpdateStatistics:
    """Call `keywords = statistics(compute, batches)` with all micro-batches of an update on the devices.

    `forward` is compiled once per micro-batch shape. The other programs are small: `write` is compiled for
    each shape and buffer size, and `finish` for each buffer size. All buffer sizes are powers of two, so
    there are few of them.
    """

    def __init__(self, logprobs: LogProbs, statistics: Statistics, mesh: Mesh) -> None:
        rows = batch_sharding(mesh)
        self.mesh, self.parts = mesh, mesh.shape["data"] * mesh.shape["fsdp"]
        self._statistics = statistics
        self.empty = jax.jit(
            functools.partial(_empty, self.parts), static_argnames="capacity", out_shardings=rows
        )
        self.forward = jax.jit(functools.partial(_log_ratio, logprobs), out_shardings=rows)
        self.write = jax.jit(_write, donate_argnums=0, out_shardings=rows)
        self.finish = jax.jit(functools.partial(_finish, statistics), out_shardings=NamedSharding(mesh, P()))

    def __call__(self, compute: Any, batches: Sequence[dict[str, jax.Array]]) -> dict[str, Any]:
        """Return the keyword arguments of the objective; `compute` are the weights in the compute dtype."""
        # The size depends on this update alone, so that a resumed run adds up in the same order.
        buffer = self.empty(capacity=self.capacity([batch["mask"].shape for batch in batches]))
        start = 0
        for batch in batches:
            log_ratio = self.forward(compute, batch)
            buffer = self.write(buffer, log_ratio, batch["advantages"], batch["mask"], np.int32(start))
            start += log_ratio.size // self.parts
        return self.finish(buffer)

    def capacity(self, shapes: Sequence[tuple[int, ...]]) -> int:
        """Return the buffer size per device for micro-batches of these shapes `(rows, length)`."""
        entries = sum(rows * length // self.parts for rows, length in shapes)
        return 1 << max(entries - 1, 0).bit_length()

    def abstract(self) -> dict[str, Any]:
        """Return the keyword arguments as abstract arrays."""
        token = jax.ShapeDtypeStruct((1, 1), jnp.float32)
        everywhere = NamedSharding(self.mesh, P())
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere),
            jax.eval_shape(self._statistics, token, token, token),
        )

    def lower_forward(self, compute: Any, batch: dict[str, Any]) -> Any:
        """Lower `forward` for abstract arrays, so that the caller can compile it ahead of time."""
        with jax.set_mesh(self.mesh):
            return self.forward.lower(compute, batch)

    def lower_finish(self, capacity: int) -> Any:
        """Lower `finish` for a buffer of this size."""
        with jax.set_mesh(self.mesh):
            sharding = batch_sharding(self.mesh)
            shapes = jax.eval_shape(functools.partial(_empty, self.parts, capacity=capacity))
            buffer = {
                name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
                for name, leaf in shapes.items()
            }
            return self.finish.lower(buffer)


def _empty(parts: int, *, capacity: int) -> Buffer:
    return {name: jnp.zeros((parts, capacity)) for name in ("log_ratio", "advantages", "mask")}


def _log_ratio(logprobs: LogProbs, compute: Any, batch: dict[str, jax.Array]) -> jax.Array:
    return logprobs(compute, batch)[0] - batch["behavior_logp"]


def _write(
    buffer: Buffer, log_ratio: jax.Array, advantages: jax.Array, mask: jax.Array, start: jax.Array
) -> Buffer:
    """Write a micro-batch into the buffer. Each part of the rows stays on its device."""
    values = {"log_ratio": log_ratio, "advantages": advantages[:, None] * jnp.ones_like(mask), "mask": mask}
    return {
        name: jax.lax.dynamic_update_slice(
            whole, values[name].astype(jnp.float32).reshape(len(whole), -1), (jnp.zeros_like(start), start)
        )
        for name, whole in buffer.items()
    }


def _finish(statistics: Statistics, buffer: Buffer) -> dict[str, Any]:
    return statistics(buffer["log_ratio"], buffer["advantages"], buffer["mask"])
