"""What `bench_generate.py` measures: models, requests, and the shortest possible time of a decode step."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from shapes import QWEN_1_5B, SMOLLM2_135M

from mugrpo_jax.models import ModelConfig, cache_bytes, weight_bytes
from mugrpo_jax.models.eight_bits import EIGHT_BITS
from mugrpo_jax.sampling import Request, SamplerPlan, plan_sampler, request_seeds

BYTES_PER_SECOND = 4.3e12
FLOPS_PER_SECOND = 800e12


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and the requests that are sampled from it."""

    name: str
    config: ModelConfig
    slots: tuple[int, ...]
    prompt: int = 128
    response: int = 512
    tail_samples: int = 16_384
    tail: tuple[int, int] = (32, 1024)
    group: int = 8
    short: tuple[tuple[int, ...], ...] = ()  # slots, prompt; mean, deviation and maximum of lengths
    dtype: Any = jnp.bfloat16
    matrices: str | None = None  # a key of `EIGHT_BITS`
    cache: str | None = None  # dtype of the cache; None: `dtype`

    @property
    def dtypes(self) -> dict[str, Any]:
        """Arguments of `plan_sampler` and `weight_bytes`."""
        return {"dtype": self.dtype, "matrices": EIGHT_BITS.get(self.matrices or "")}

    @property
    def label(self) -> str:
        """How the figures call the dtype of the matrices."""
        return self.matrices or jnp.dtype(self.dtype).name

    @property
    def cache_label(self) -> str:
        """How the figures call the dtype of the cache."""
        return self.cache or jnp.dtype(self.dtype).name


CASES = (
    Case("qwen2.5-1.5b", QWEN_1_5B, slots=(512,)),
    Case(
        "smollm2-135m",
        SMOLLM2_135M,
        slots=(512, 2048),
        short=((2048, 72, 42, 10, 72), (1024, 104, 110, 50, 368)),  # as on word problems and on GSM8K
    ),
)
SMALL = Case(
    "small",
    ModelConfig(
        vocab_size=512,
        hidden_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=96,
    ),
    slots=(8,),
    prompt=16,
    response=24,
    tail_samples=64,
    tail=(4, 48),
    short=((8, 16, 10, 4, 24),),
    dtype=jnp.float32,
)


def say(**facts: Any) -> None:
    rounded = {key: float(f"{x:.4g}") if isinstance(x, float) else x for key, x in facts.items()}
    print(json.dumps(rounded), flush=True)


def limit_seconds(case: Case, rows: float, filled: float) -> float:
    """The shortest possible time of a decode step with this mean number of busy rows and cache entries."""
    config = case.config
    unread = 0 if config.tie_embeddings else config.vocab_size * config.hidden_size  # the input embedding
    weights = config.num_params - unread
    read = weight_bytes(config, **case.dtypes) - unread * jnp.dtype(case.dtype).itemsize
    cache = cache_bytes(config, 1, 1, case.cache_label) * filled * rows
    attention = 4 * filled * config.num_heads * config.head_dim * config.num_layers
    flops = (2 * weights + attention) * rows
    return (read + cache) / BYTES_PER_SECOND + flops / FLOPS_PER_SECOND


def plan_for(case: Case, slots: int, response: int, *, shrink: bool = False) -> SamplerPlan:
    # Runs with fp8 are refused on a CPU, which computes it slowly but right. It has the sizes of int8.
    plain = dataclasses.replace(case, matrices="int8") if case.matrices == "fp8" and _on_cpu() else case
    plan = plan_sampler(
        case.config,
        max_prompt=case.prompt,
        max_length=case.prompt + response,
        slots=slots,
        shrink=shrink,
        cache_dtype=jnp.dtype(case.cache_label),
        **plain.dtypes,
    )
    return dataclasses.replace(plan, matrices=case.dtypes["matrices"])


def _on_cpu() -> bool:
    return jax.default_backend() == "cpu"


def requests_for(case: Case, lengths: np.ndarray) -> list[Request]:
    """One group of samples per prompt; each sample has its own length."""
    rng = np.random.default_rng(1)
    return [
        Request(
            prompt=rng.integers(0, case.config.vocab_size, case.prompt),
            seeds=request_seeds(0, index, samples=len(limits)),
            max_tokens=limits.tolist(),
            index=index,
        )
        for index, limits in enumerate(lengths.reshape(-1, case.group))
    ]
