"""Sizes of the sampler, chosen to fit the free memory before it starts: slots, cache and compiled shapes."""

import dataclasses
import math
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from mugrpo_jax.models import ModelConfig, cache_bytes, check_mesh
from mugrpo_jax.sampling.requests import Request

_MOST_SLOTS = {"cpu": 16}  # per data-parallel device; on other platforms `_MANY_SLOTS`, more gain little
_MANY_SLOTS = 2048
_PREFILL_TOKENS = 8192
_FEWEST_INSERTS = 16
_TURN = 0.5  # cost of the host's work between two device loops, in decode steps
_USABLE = 0.92  # of the free device memory; the rest is left to the compiler's temporaries


@dataclasses.dataclass(frozen=True)
class SamplerPlan:
    """Sizes of a sampler; `print` it.

    Attributes:
      config: the model's shape.
      mesh: devices the sampler is spread over, or None for the default device.
      dtype: of weights and cache.
      slots: sequences decoded at once.
      max_prompt: longest prompt accepted.
      max_length: longest sum of prompt and response accepted.
      cache_length: cache entries of a slot, `max_length` rounded up.
      prompt_buckets: padded prompt lengths, one compiled prefill each.
      read_buckets: how many cache entries a decode step may read, one compiled loop each.
      steps: most decode steps in one device loop.
      weight_bytes: weights on one device.
      cache_bytes: cache on one device.
      work_bytes: temporaries on one device (logits, prompts being run).
      memory: free bytes on one device, or None where it is unknown.
    """

    config: ModelConfig
    mesh: Mesh | None
    dtype: Any
    slots: int
    max_prompt: int
    max_length: int
    cache_length: int
    prompt_buckets: tuple[int, ...]
    read_buckets: tuple[int, ...]
    steps: int
    weight_bytes: int
    cache_bytes: int
    work_bytes: int
    memory: int | None

    @property
    def fuse(self) -> bool:
        """Whether matrices with the same input are joined into one, which needs an unsplit `tensor` axis."""
        return self.mesh is None or self.mesh.shape["tensor"] == 1

    @property
    def inserts(self) -> int:
        """Slots filled by one call of the insert program."""
        return min(self.slots, max(_FEWEST_INSERTS, self.slots // 8))

    def refill_at(self, length: float) -> int:
        """The number r of free slots at which a device loop ends early while requests wait.

        With S slots and responses of mean length L, r / 2 slots are idle on average, and the host works, at a
        cost of c steps, once per r·L / S steps. The total r / 2S + c·S / rL is least at r = S·sqrt(2c / L).
        At most an eighth of the slots, so that more than nine of ten are busy on average.
        """
        return max(1, min(self.slots // 8, round(self.slots * math.sqrt(2 * _TURN / length))))

    def prefill_rows(self, bucket: int) -> int:
        """Prompts of this padded length that are run together."""
        return _prefill_rows(self.slots, bucket, _rows_split(self.mesh))

    def __str__(self) -> str:
        where = "one device"
        if self.mesh is not None:
            where = " × ".join(f"{axis} {size}" for axis, size in self.mesh.shape.items())
        free = "unknown" if self.memory is None else _gb(self.memory)
        total = self.weight_bytes + self.cache_bytes + self.work_bytes
        return (
            f"sampler: {self.slots} slots × {self.cache_length} cache entries on {where}, "
            f"{jnp.dtype(self.dtype).name}; prompts up to {self.max_prompt} in buckets of "
            f"{_list(self.prompt_buckets)}, reads of {_list(self.read_buckets)}; per device "
            f"{_gb(total)} (weights {_gb(self.weight_bytes)}, cache {_gb(self.cache_bytes)}, "
            f"work {_gb(self.work_bytes)}) of {free} free"
        )


def plan_sampler(
    config: ModelConfig,
    *,
    max_prompt: int,
    max_length: int,
    slots: int | None = None,
    samples: int | None = None,
    mesh: Mesh | None = None,
    dtype: Any = jnp.bfloat16,
    memory: int | None = None,
    steps: int = 64,
) -> SamplerPlan:
    """Plan a sampler; raise an error with the sizes if it does not fit.

    Args:
      config: the model's shape.
      max_prompt: longest prompt to accept, in tokens.
      max_length: longest prompt plus response to accept, in tokens.
      slots: sequences decoded at once; None takes as many as fit.
      samples: how many samples there will be in all, if known; the plan has no more slots than that.
      mesh: devices to use, all of this host; None is the default device.
      dtype: of weights and cache.
      memory: free bytes on each device; None asks the device.
      steps: most decode steps in one device loop.
    """
    if not 1 <= max_prompt < max_length:
        raise ValueError(
            f"sampler: max_prompt={max_prompt} must be at least 1 and below max_length={max_length}"
        )
    if max_length > config.max_positions:
        raise ValueError(
            f"sampler: max_length={max_length} exceeds the model's max_positions={config.max_positions}"
        )
    if mesh is not None:
        check_mesh(config, mesh)
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    unit = 16 if device.platform == "cpu" else 128
    cache_length = _round_up(max_length, unit)
    # cuDNN reads only each row's own length; other back ends read the whole bucket.
    by_length = device.platform == "gpu" and jnp.dtype(dtype).itemsize == 2
    prompt_buckets = _doubling(unit, _round_up(max_prompt, unit))
    memory = free_memory(device) if memory is None else memory

    def sized(slots: int) -> SamplerPlan:
        split, tensor = _rows_split(mesh), 1 if mesh is None else mesh.shape["tensor"]
        return SamplerPlan(
            config=config,
            mesh=mesh,
            dtype=dtype,
            slots=slots,
            max_prompt=max_prompt,
            max_length=max_length,
            cache_length=cache_length,
            prompt_buckets=prompt_buckets,
            read_buckets=(cache_length,) if by_length else _doubling(max(256, 2 * steps), cache_length),
            steps=steps,
            weight_bytes=config.num_params * jnp.dtype(dtype).itemsize // tensor,
            cache_bytes=cache_bytes(config, slots, cache_length, dtype) // (split * tensor),
            work_bytes=_work_bytes(config, slots, prompt_buckets, split, tensor, dtype),
            memory=memory,
        )

    devices = 1 if mesh is None else mesh.size
    if slots is not None:
        if slots < 1 or slots % devices:
            raise ValueError(f"sampler: slots={slots} must be a positive multiple of the {devices} devices")
        return _fitting(sized(slots), sized(devices))
    most = _MOST_SLOTS.get(device.platform, _MANY_SLOTS) * _rows_split(mesh)
    most = most if samples is None else min(most, samples)
    candidates = [sized(count) for count in _halving(_round_up(most, devices), devices)]
    return next((plan for plan in candidates if _fits(plan)), None) or _fitting(
        candidates[-1], candidates[-1]
    )


def plan_for_requests(config: ModelConfig, requests: Sequence[Request], **options: Any) -> SamplerPlan:
    """Plan a sampler that fits some requests; `options` are those of `plan_sampler`."""
    longest = max(len(request.prompt) for request in requests)
    return plan_sampler(
        config,
        max_prompt=longest,
        max_length=longest + max(max(request.limits) for request in requests),
        samples=sum(len(request.seeds) for request in requests),
        **options,
    )


def _fits(plan: SamplerPlan) -> bool:
    total = plan.weight_bytes + plan.cache_bytes + plan.work_bytes
    return plan.memory is None or total <= plan.memory * _USABLE


def _fitting(plan: SamplerPlan, smallest: SamplerPlan) -> SamplerPlan:
    if _fits(plan):
        return plan
    advice = "fewer slots or a shorter max_length would help"
    if not _fits(smallest):
        advice = "a mesh with a larger tensor axis or a shorter max_length would help"
    raise ValueError(f"{plan}: does not fit; {advice}")


def _work_bytes(
    config: ModelConfig, slots: int, buckets: tuple[int, ...], split: int, tensor: int, dtype: Any
) -> int:
    """Logits of a decode step with the copies of the draw, and the activations and cache of a prefill."""
    size = jnp.dtype(dtype).itemsize
    logits = 3 * 4 * config.vocab_size * slots // (split * tensor)
    tokens = max(_prefill_rows(slots, bucket, split) * bucket for bucket in buckets)
    width = 2 * config.intermediate_size // tensor + 6 * config.hidden_size
    prompts = tokens * width * size // split + cache_bytes(config, 1, tokens, dtype) // (split * tensor)
    return logits + prompts


def _prefill_rows(slots: int, bucket: int, split: int) -> int:
    return _round_up(min(slots, max(1, _PREFILL_TOKENS // bucket)), split)


def _rows_split(mesh: Mesh | None) -> int:
    return 1 if mesh is None else mesh.shape["data"] * mesh.shape["fsdp"]


def free_memory(device: Any) -> int | None:
    """Free bytes on a device; None where it is unknown."""
    if device.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    stats = device.memory_stats()
    return None if not stats else stats["bytes_limit"] - stats["bytes_in_use"]


def _round_up(count: int, unit: int) -> int:
    return -(-count // unit) * unit


def _doubling(first: int, last: int) -> tuple[int, ...]:
    """`first`, twice that, and so on below `last`, then `last`."""
    doublings = max(0, math.ceil(math.log2(last / first)))
    return (*(first << i for i in range(doublings)), last)


def _halving(most: int, unit: int) -> list[int]:
    counts = [most]
    while counts[-1] > unit:
        counts.append(max(unit, counts[-1] // 2 // unit * unit))
    return counts


def _gb(count: int) -> str:
    return f"{count / 1e9:.3g} GB"


def _list(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))
