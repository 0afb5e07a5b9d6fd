"""Choose the number of slots and the other sizes of a sampler, so that it fits in the free memory."""

import dataclasses
import math
import os
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from mugrpo_jax.models import ModelConfig, cache_bytes, check_mesh, weight_bytes
from mugrpo_jax.models.eight_bits import EIGHT_BITS
from mugrpo_jax.sampling.requests import Request

_MOST_SLOTS = {"cpu": 16}  # maximum per data-parallel device; other platforms have `_MANY_SLOTS`
_MANY_SLOTS = 2048  # more slots would hardly be faster
_PREFILL_TOKENS = 8192  # in one call of the prefill program
_MESSAGE_TOKENS = 1024  # in one call of the extend program
_FEWEST_INSERTS = 16
_SHARES = 4, 16  # at the end of a stage, a fourth and then a sixteenth of the slots are used
_DRAIN = 10.0  # seconds to sample the longest response, from which on fewer slots at the end are worth it
_SPEED = 4e12  # bytes that a fast device reads in a second
_TURN = 0.5  # cost of the host's work between two device loops, in decode steps
_USABLE = 0.92  # share of the free memory; the compiler needs memory for temporary arrays too


@dataclasses.dataclass(frozen=True)
class SamplerPlan:
    """The sizes of a sampler. `print(plan)` shows the sizes and how much memory each device needs.

    Attributes:
      mesh: the devices of the sampler; None means the default device.
      dtype: dtype of the weights and the activations.
      cache_dtype: dtype of the KV cache: `dtype`, or int8 with a scale for every token and head.
      matrices: dtype of the layers' matrices, if they are in 8 bits; None means `dtype`. Embedding and head
        are not matrices of a layer.
      slots: how many sequences are decoded at the same time.
      fewer_slots: numbers of slots for the end of a stage, when no samples wait; () always keeps `slots`.
      max_prompt: maximum number of tokens in a prompt.
      max_length: maximum number of tokens in a prompt and its response together.
      cache_length: cache entries per slot, which is `max_length` rounded up.
      prompt_buckets: lengths to which prompts are padded. One prefill program is compiled for each.
      read_buckets: numbers of cache entries that attention can read. One decode program is compiled for each.
      steps: maximum number of decode steps in one device loop.
      weight_bytes, cache_bytes: size of the weights and of the KV cache on one device.
      work_bytes: size of temporary arrays on one device (logits, activations of a prefill).
      memory: free bytes on one device; None if unknown.
      turns: whether an environment may answer the model, so that a response has several turns.
    """

    config: ModelConfig
    mesh: Mesh | None
    dtype: Any
    cache_dtype: Any
    matrices: Any
    slots: int
    fewer_slots: tuple[int, ...]
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
    turns: bool = False

    @property
    def parts(self) -> int:
        """Into how many equal parts the slots are divided, so that each device decodes one part."""
        return _rows_split(self.mesh)

    @property
    def message_tokens(self) -> int:
        """How many tokens of a message one call of the extend program can append to a slot."""
        return self.prompt_buckets[0]

    @property
    def message_rows(self) -> int:
        """How many slots one call of the extend program can append tokens to."""
        return _message_rows(self.slots, self.message_tokens, _rows_split(self.mesh))

    @property
    def fuse(self) -> bool:
        """Whether to join weight matrices with the same input; True if the `tensor` axis has size 1."""
        return self.mesh is None or self.mesh.shape["tensor"] == 1

    @property
    def eight_bit_cache(self) -> bool:
        """Whether keys and values are rounded to 8 bits."""
        return bool(self.cache_dtype == jnp.int8)

    @property
    def layout(self) -> dict[str, Any]:
        """How the sampler's copy of the weights looks: the arguments of `sampling_params`."""
        return {"dtype": self.dtype, "fuse": self.fuse, "matrices": self.matrices}

    @property
    def inserts(self) -> int:
        """How many samples one call of the insert program can start."""
        return min(self.slots, max(_FEWEST_INSERTS, self.slots // 8))

    def refill_at(self, length: float) -> int:
        """Return r: while requests wait, a device loop ends as soon as r slots are free.

        S is the number of slots, L = `length` the mean response length, and c = `_TURN` the length of the
        pause between two loops, in decode steps. r slots become free in r·L / S steps, so on average r / 2
        slots are free. The lost share of time, r / 2S + c·S / (r·L), is smallest at r = S·sqrt(2c / L). The
        result is at most S / 8.
        """
        return max(1, min(self.slots // 8, round(self.slots * math.sqrt(2 * _TURN / length))))

    def prefill_rows(self, bucket: int) -> int:
        """Return how many prompts of this padded length are prefilled together."""
        return _prefill_rows(self.slots, bucket, _rows_split(self.mesh))

    @property
    def _dtypes(self) -> str:
        matrices = "" if self.matrices is None else f" with matrices in {jnp.dtype(self.matrices).name}"
        cache = ", cache in int8" if self.eight_bit_cache else ""
        return jnp.dtype(self.dtype).name + matrices + cache

    def __str__(self) -> str:
        where = "one device"
        if self.mesh is not None:
            where = " × ".join(f"{axis} {size}" for axis, size in self.mesh.shape.items())
        free = "unknown" if self.memory is None else _size(self.memory)
        total = self.weight_bytes + self.cache_bytes + self.work_bytes
        slots = f"{self.slots} slot{'' if self.slots == 1 else 's'}"
        if self.fewer_slots:
            slots += f" (at the end {_list(self.fewer_slots)})"
        return (
            f"sampler: {slots} × {self.cache_length} cache entries on {where}, {self._dtypes}; "
            f"prompts up to {self.max_prompt} in buckets of {_list(self.prompt_buckets)}, "
            f"reads of {_list(self.read_buckets)}; per device {_size(total)} "
            f"(weights {_size(self.weight_bytes)}, cache {_size(self.cache_bytes)}, "
            f"work {_size(self.work_bytes)}) of {free} free"
        )


def plan_sampler(
    config: ModelConfig,
    *,
    max_prompt: int,
    max_length: int,
    slots: int | None = None,
    shrink: bool | None = None,
    samples: int | None = None,
    mesh: Mesh | None = None,
    dtype: Any = jnp.bfloat16,
    cache_dtype: Any = None,
    matrices: Any = None,
    memory: int | None = None,
    usable: float = _USABLE,
    steps: int = 64,
    turns: bool = False,
) -> SamplerPlan:
    """Choose the sizes of a sampler; raise an error that lists the sizes if they do not fit in the memory.

    The arguments that are not listed here become the attributes of `SamplerPlan` with the same names.

    Args:
      slots: how many sequences are decoded at the same time; None uses as many as fit in the memory.
      shrink: whether to continue with fewer slots when few samples are left. A step with fewer slots takes
        less time, but needs a program of its own, and its shapes change log-probs in their last bits. None:
        not on a CPU, and only if the longest response takes long enough to sample. Never with `turns`.
      samples: the total number of samples, if known, so that the plan has no more slots than samples.
      mesh: the devices to use, which must belong to this host; None uses the default device.
      cache_dtype: None means `dtype`.
      memory: free bytes on each device; None means the value from `free_memory`.
      usable: share of the free memory that the plan may use.
    """
    if not 1 <= max_prompt < max_length:
        raise ValueError(
            f"sampler: max_prompt={max_prompt} must be at least 1 and below max_length={max_length}"
        )
    if max_length > config.max_positions:
        raise ValueError(
            f"sampler: prompts of {max_prompt:,} and responses of {max_length - max_prompt:,} tokens exceed "
            f"the model's {config.max_positions:,} positions; lower sampling.max_prompt_tokens or "
            "sampling.max_response_tokens (or --max-tokens)"
        )
    if mesh is not None:
        check_mesh(config, mesh)
    device = jax.local_devices()[0] if mesh is None else mesh.devices.flat[0]
    if matrices == EIGHT_BITS["fp8"] and not _has_fp8(device):
        raise ValueError(
            "model.sampling_dtype (or --dtype): fp8 needs an NVIDIA GPU of compute capability 8.9 or more or "
            f"a TPU v7; this is {device.device_kind}; use int8, which takes as many bytes"
        )
    if cache_dtype == jnp.int8:
        _check_eight_bit_cache(config, device.platform, 1 if mesh is None else mesh.shape["tensor"])
    unit = 16 if device.platform == "cpu" else 128
    cache_length = _round_up(max_length, unit)
    cache_dtype = dtype if cache_dtype is None else cache_dtype
    # cuDNN reads only the filled cache entries of each slot, and a CPU those up to the longest slot. It does
    # not with int8, but would round differently if it read another number of entries.
    by_length = device.platform == "gpu" and jnp.dtype(cache_dtype).itemsize == 2
    reads_all = by_length or device.platform == "cpu"
    prompt_buckets = _doubling(unit, _round_up(max_prompt, unit))
    memory = free_memory(device) if memory is None else memory

    def sized(slots: int) -> SamplerPlan:
        split, tensor = _rows_split(mesh), 1 if mesh is None else mesh.shape["tensor"]
        return SamplerPlan(
            config=config,
            mesh=mesh,
            dtype=dtype,
            cache_dtype=cache_dtype,
            matrices=matrices,
            slots=slots,
            fewer_slots=(),
            max_prompt=max_prompt,
            max_length=max_length,
            cache_length=cache_length,
            prompt_buckets=prompt_buckets,
            read_buckets=(cache_length,) if reads_all else _doubling(max(256, 2 * steps), cache_length),
            steps=steps,
            weight_bytes=weight_bytes(config, dtype, matrices) // tensor,
            cache_bytes=cache_bytes(config, slots, cache_length, cache_dtype) // (split * tensor),
            work_bytes=_work_bytes(config, slots, prompt_buckets, split, tensor, dtype, cache_dtype)
            + (_message_bytes(config, slots, prompt_buckets[0], cache_length, split, tensor) if turns else 0),
            memory=memory,
            turns=turns,
        )

    devices = 1 if mesh is None else mesh.size
    if slots is not None:
        if slots < 1 or slots % devices:
            raise ValueError(f"sampler: slots={slots} must be a positive multiple of the {devices} devices")
        return _shrinking(_fitting(sized(slots), sized(devices), usable), device.platform, shrink)
    most = _MOST_SLOTS.get(device.platform, _MANY_SLOTS) * _rows_split(mesh)
    most = most if samples is None else min(most, samples)
    candidates = [sized(count) for count in _halving(_round_up(most, devices), devices)]
    found = next((plan for plan in candidates if _fits(plan, usable)), candidates[-1])
    return _shrinking(_fitting(found, found, usable), device.platform, shrink)


def sampler_dtypes(name: str | None) -> dict[str, Any]:
    """Return `dtype` and `matrices` of `plan_sampler` for a name in a config: `bfloat16`, `int8` and others.

    With 8 bits, everything but the layers' matrices is in bfloat16.
    """
    if name in EIGHT_BITS:
        return {"dtype": jnp.dtype(jnp.bfloat16), "matrices": EIGHT_BITS[name]}
    return {"dtype": jnp.dtype(name), "matrices": None}


def plan_for_requests(config: ModelConfig, requests: Sequence[Request], **options: Any) -> SamplerPlan:
    """Call `plan_sampler` with the lengths and the number of samples that these requests need."""
    longest = max(len(request.prompt) for request in requests)
    return plan_sampler(
        config,
        max_prompt=longest,
        max_length=longest + max(max(request.limits) for request in requests),
        samples=sum(len(request.seeds) for request in requests),
        **options,
    )


def _fits(plan: SamplerPlan, usable: float) -> bool:
    total = plan.weight_bytes + plan.cache_bytes + plan.work_bytes
    return plan.memory is None or total <= plan.memory * usable


def _fitting(plan: SamplerPlan, smallest: SamplerPlan, usable: float) -> SamplerPlan:
    if _fits(plan, usable):
        return plan
    advice = "fewer slots, or shorter prompts and responses, would help"
    if not _fits(smallest, usable):
        advice = "a larger tensor axis of the mesh, or shorter prompts and responses, would help"
    raise ValueError(f"{plan}: does not fit; {advice}")


def _shrinking(plan: SamplerPlan, platform: str, shrink: bool | None) -> SamplerPlan:
    """Add the smaller numbers of slots to a plan, if `shrink` of `plan_sampler` or its rule wants them."""
    if shrink is None:
        seconds = plan.max_length * (plan.weight_bytes + plan.cache_bytes) / _SPEED
        shrink = platform != "cpu" and seconds >= _DRAIN
    if not shrink or plan.turns:
        return plan
    devices = 1 if plan.mesh is None else plan.mesh.size
    sizes = {_round_up(max(1, plan.slots // share), devices) for share in _SHARES} - {plan.slots}
    return dataclasses.replace(plan, fewer_slots=tuple(sorted(sizes, reverse=True)))


def _work_bytes(
    config: ModelConfig,
    slots: int,
    buckets: tuple[int, ...],
    split: int,
    tensor: int,
    dtype: Any,
    cache_dtype: Any,
) -> int:
    """Estimate the bytes of temporary arrays: logits and their copies, activations and cache of a prefill."""
    size = jnp.dtype(dtype).itemsize
    logits = 3 * 4 * config.vocab_size * slots // (split * tensor)
    tokens = max(_prefill_rows(slots, bucket, split) * bucket for bucket in buckets)
    width = 2 * config.intermediate_size // tensor + 6 * config.hidden_size
    prompts = tokens * width * size // split + cache_bytes(config, 1, tokens, cache_dtype) // (split * tensor)
    return logits + prompts


def _message_bytes(
    config: ModelConfig, slots: int, tokens: int, cache_length: int, split: int, tensor: int
) -> int:
    """Estimate the bytes of temporary arrays in `extend`: the attention scores and their softmax."""
    rows = _message_rows(slots, tokens, split)
    return 2 * 4 * rows * tokens * config.num_heads * cache_length // (split * tensor)


def _message_rows(slots: int, tokens: int, split: int) -> int:
    return _round_up(min(slots, max(1, _MESSAGE_TOKENS // tokens)), split)


def _prefill_rows(slots: int, bucket: int, split: int) -> int:
    return _round_up(min(slots, max(1, _PREFILL_TOKENS // bucket)), split)


def _rows_split(mesh: Mesh | None) -> int:
    return 1 if mesh is None else mesh.shape["data"] * mesh.shape["fsdp"]


def _check_eight_bit_cache(config: ModelConfig, platform: str, tensor: int) -> None:
    """Raise an error for numbers of heads that a TPU pads to the size that they have in 16 bits, or more."""
    heads = config.num_kv_heads // tensor
    if platform == "tpu" and heads % 4 and heads != 1:
        raise ValueError(
            "sampling.cache_dtype: int8 needs one key-value head on each TPU device, or a multiple of 4; "
            f"here are {heads}; change mesh.sampling_tensor ({tensor}), or use auto"
        )


def _has_fp8(device: Any) -> bool:
    capability = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
    if device.platform == "tpu":
        return re.match(r"TPU ?v?7", device.device_kind) is not None
    return capability is not None and (int(capability[1]), int(capability[2])) >= (8, 9)


def free_memory(device: Any) -> int | None:
    """Return the free bytes on a device, or None if unknown. On a CPU, return half of the memory."""
    total = total_memory(device)
    if total is None or device.platform == "cpu":
        return total
    return total - device.memory_stats()["bytes_in_use"]


def total_memory(device: Any) -> int | None:
    """Return the bytes that programs may use on an empty device, or None if unknown. On a CPU, half."""
    if device.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    stats = device.memory_stats()
    return stats["bytes_limit"] if stats else None


def _round_up(count: int, unit: int) -> int:
    return -(-count // unit) * unit


def _doubling(first: int, last: int) -> tuple[int, ...]:
    """Return `first`, 2 × `first`, 4 × `first` and so on while below `last`, and then `last`."""
    doublings = max(0, math.ceil(math.log2(last / first)))
    return (*(first << i for i in range(doublings)), last)


def _halving(most: int, unit: int) -> list[int]:
    counts = [most]
    while counts[-1] > unit:
        counts.append(max(unit, counts[-1] // 2 // unit * unit))
    return counts


def _size(count: int) -> str:
    return f"{count / 1e9:.3g} GB" if count >= 1e8 else f"{count / 1e6:.3g} MB"


def _list(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))
