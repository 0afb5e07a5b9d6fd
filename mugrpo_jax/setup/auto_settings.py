"""Choose the settings that a config leaves to us (`auto`) from the model's shape, the lengths and the memory.

The rules come from measurements on one H200 with SmolLM2-135M (docs/performance.md). There, unrolled layers
without remat were 3 to 6 % faster than a scan with remat `dots`, but took a minute to compile for each shape
of a micro-batch. A scan without remat was 18 % slower than one with `dots`: copying what every layer stores
takes longer than computing it again. Micro-batches should be large, and an update should fill them. The
memory of activations is an estimate; `planning` measures it with the compiler.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from mugrpo_jax.config import AUTO, CHOSEN_AT_START, MOST_CHOSEN_TOKENS, RunConfig, changed, value_of
from mugrpo_jax.models import Decoder, ModelConfig
from mugrpo_jax.models.frozen_weights import abstract_base
from mugrpo_jax.models.weights import abstract_params
from mugrpo_jax.sampling.sampler_plan import total_memory
from mugrpo_jax.setup.devices import local_device
from mugrpo_jax.setup.lora import trainable_model

MEAN_PROMPT, MEAN_RESPONSE = 0.25, 0.5  # assumed mean lengths, as shares of the longest
_USABLE = 0.8  # share of the memory; the estimate below is not exact
_ENOUGH_TOKENS = 16_384  # on one device; fewer would not keep it busy
_MOST_TOKENS = {"cpu": 8192, "gpu": 65_536}  # on one device; other platforms have `MOST_CHOSEN_TOKENS`
_SMALL_MODEL = 10**9  # parameters; unrolled layers of larger models take minutes to compile
_LONG_RUN = 3600  # seconds of updates in the whole run; in a shorter one, unrolling costs more than it saves
_SPEED = 3e14  # FLOP/s of a device in the updates of a small model
_REMATS = ("none", "dots", "full")  # from the fastest to the one with the least memory
_LOGITS = 3 << 30  # bytes: one chunk of logits, its probabilities and its gradient


@dataclasses.dataclass(frozen=True)
class Choice:
    """A setting that was chosen. `print(choice)` shows it with the reason."""

    key: str
    value: Any
    reason: str

    def __str__(self) -> str:
        value = str(self.value).lower() if isinstance(self.value, bool) else self.value
        return f"{self.key}={value}: {self.reason}"


def choose_settings(
    config: RunConfig, model: ModelConfig, mesh: Mesh, *, memory: int | None = None
) -> tuple[RunConfig, tuple[Choice, ...]]:
    """Return the config with a value for each key in `CHOSEN_AT_START`, and what was chosen.

    `memory` is the memory of a device in bytes; None takes that of this host's first device.
    """
    open_keys = [key for key in CHOSEN_AT_START if value_of(config, key) == AUTO]
    if not open_keys:
        return config, ()
    device = local_device(mesh)
    memory = total_memory(device) if memory is None else memory
    estimate = _Estimate(config, model, mesh, device.platform)
    left = None if memory is None else max(_USABLE * memory - estimate.fixed, 0)
    remat, scan = _passes(config, estimate, left)
    tokens, split = _micro_batch(config, estimate, left, remat)
    free = "" if left is None else f" of the {left / 1e9:.3g} GB beside weights and optimizer"
    share = tokens // estimate.parts * estimate.per_token(remat) / 1e9
    reasons = {
        "model.remat": f"activations take about {share:.3g} GB{free}",
        "model.scan_layers": estimate.why_scan
        if scan
        else "unrolled layers are faster for a small model and a long run",
        "batch.tokens_per_micro_batch": split,
    }
    values = {"model.remat": remat, "model.scan_layers": scan, "batch.tokens_per_micro_batch": tokens}
    choices = tuple(Choice(key, values[key], reasons[key]) for key in open_keys)
    return changed(config, [f"{choice.key}={str(choice.value).lower()}" for choice in choices]), choices


class _Estimate:
    """Rough bytes on one device: `fixed` without activations, and `per_token` for each token of an update."""

    def __init__(self, config: RunConfig, model: ModelConfig, mesh: Mesh, platform: str) -> None:
        self.model, self.platform, sampling = model, platform, config.sampling
        self.size = jnp.dtype(config.model.compute_dtype).itemsize
        self.parts, self.tensor = mesh.shape["data"] * mesh.shape["fsdp"], mesh.shape["tensor"]
        longest, unit = (
            sampling.max_prompt_tokens + sampling.max_response_tokens,
            config.batch.length_multiple,
        )
        self.longest = -(-longest // unit) * unit
        copies = 4 + (2 if config.track_drift else 0)  # weights, two moments, gradient; drift
        bytes_per_weight = 4 * copies + self.size * (2 + (config.proximal_dtype is not None))
        trained, frozen = _trained_and_frozen(config, model)
        updates = config.batch.updates_per_stage * config.batch.stages
        # With LoRA, the gradients of the frozen matrices are not computed.
        flops = (4 if frozen else 6) * model.num_params * _mean_tokens(config) * updates
        self.seconds = flops / (_SPEED * self.parts * self.tensor)
        shards = mesh.shape["fsdp"] * self.tensor
        logits = min(_LOGITS, 3 * 4 * model.vocab_size * self.longest)
        self.fixed = (trained * bytes_per_weight + frozen) // shards + logits
        fused = platform in ("gpu", "tpu") and self.size == 2 and config.model.attention != "xla"
        # Without a fused kernel, attention keeps scores, probabilities and their mask for padded rows.
        self.scores = 0 if fused else 2 * 3 * 4 * model.num_heads * self.longest // self.tensor

    def per_token(self, remat: str) -> float:
        """Return the bytes of activations per token that are alive in the backward pass."""
        m, layers = self.model, self.model.num_layers
        products = 4 * m.hidden_size + 2 * m.num_kv_heads * m.head_dim + 2 * m.intermediate_size
        # Measured by compiling small models: without remat, a layer keeps three times its matrix products.
        everything = 3 * self.size * products / self.tensor + self.scores
        saved = {
            "none": layers * everything,
            "dots": layers * self.size * products / self.tensor + everything,
            "full": layers * self.size * m.hidden_size + everything,
        }
        return saved[remat] + 40 * self.size * m.hidden_size

    @property
    def may_unroll(self) -> bool:
        """Whether unrolled layers are worth their longer compilation."""
        small = self.model.num_params <= _SMALL_MODEL
        return self.platform == "gpu" and small and self.seconds >= _LONG_RUN

    @property
    def why_scan(self) -> str:
        """Say why layers are not unrolled."""
        if self.platform != "gpu":
            return "a scan over the layers compiles faster; unrolling them was faster on GPUs only"
        if self.model.num_params > _SMALL_MODEL:
            return "a scan over the layers compiles faster; unrolling them pays for small models only"
        if not self.may_unroll:
            return f"a scan over the layers compiles faster; the updates take only about {self.seconds:.0f} s"
        return "unrolled layers need remat=none, which does not fit into memory"


def _trained_and_frozen(config: RunConfig, model: ModelConfig) -> tuple[int, int]:
    """Return the number of trained weights, and the bytes of the frozen weights of a LoRA run."""
    if not config.lora.rank:
        return model.num_params, 0
    decoder = Decoder(model)
    adapters = abstract_params(trainable_model(config, decoder))
    base = abstract_base(decoder, config.lora.base_dtype)
    frozen = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(base))
    return sum(leaf.size for leaf in jax.tree.leaves(adapters)), frozen


def _passes(config: RunConfig, estimate: _Estimate, left: float | None) -> tuple[str, bool]:
    """Return the fastest remat and scan that leave memory for a micro-batch of enough tokens."""
    wanted, scan = config.model.remat, config.model.scan_layers
    options = [("none", False)] if estimate.may_unroll else []
    scans = ("dots", "full") if estimate.platform == "gpu" else _REMATS
    options += [(remat, True) for remat in scans]
    if scan != AUTO:
        options = [(remat, bool(scan)) for remat in (scans if scan else _REMATS)]
    if wanted != AUTO:
        options = [(remat, option) for remat, option in options if remat == wanted] or [(wanted, True)]
    for remat, option in options:
        if left is None or left >= _least_tokens(config, estimate) * estimate.per_token(remat):
            return remat, option
    return options[-1]


def _least_tokens(config: RunConfig, estimate: _Estimate) -> int:
    """Return how many tokens of a micro-batch a device must have room for."""
    if isinstance(config.batch.tokens_per_micro_batch, int):
        return config.batch.tokens_per_micro_batch // estimate.parts
    enough = min(_ENOUGH_TOKENS, _MOST_TOKENS.get(estimate.platform, MOST_CHOSEN_TOKENS))
    return max(min(enough, _mean_tokens(config) // estimate.parts), estimate.longest)


def _mean_tokens(config: RunConfig) -> int:
    """Return the tokens that an update has on average, for the assumed mean lengths."""
    sampling, batch = config.sampling, config.batch
    mean = MEAN_PROMPT * sampling.max_prompt_tokens + MEAN_RESPONSE * sampling.max_response_tokens
    return math.ceil(batch.prompts_per_update * batch.responses_per_prompt * mean)


def _micro_batch(config: RunConfig, estimate: _Estimate, left: float | None, remat: str) -> tuple[int, str]:
    """Return the tokens of a micro-batch over all devices, and why."""
    if isinstance(config.batch.tokens_per_micro_batch, int):
        return config.batch.tokens_per_micro_batch, ""
    most = _MOST_TOKENS.get(estimate.platform, MOST_CHOSEN_TOKENS)
    if left is not None:
        most = min(most, int(left / estimate.per_token(remat)))
    length = config.batch.length_multiple
    most = max(most // length * length, estimate.longest) * estimate.parts
    # A little more than the mean, so that most updates need no further micro-batch.
    mean, unit = _mean_tokens(config), length * estimate.parts
    count = math.ceil(1.05 * mean / most)
    share = max(math.ceil(1.05 * mean / count), estimate.longest * estimate.parts)
    tokens = -(-share // unit) * unit
    return tokens, f"an update has about {mean:,} tokens, which fill {count} of them"
