"""Lower the sampler's programs without arrays on a device, to compile them ahead or for other devices."""

from typing import Any

import numpy as np

from mugrpo_jax.models.sharding import placed
from mugrpo_jax.sampling.programs import (
    abstract_slots,
    decode,
    extend,
    insert,
    mesh_of,
    no_entries,
    no_messages,
    run_prompts,
)
from mugrpo_jax.sampling.sampler_plan import SamplerPlan
from mugrpo_jax.sampling.sampler_weights import abstract_params


def lower_prefill(plan: SamplerPlan, bucket: int) -> Any:
    """Lower `run_prompts` for the prompts of a bucket, without making arrays on a device."""
    model, weights = abstract_params(plan)
    rows = plan.prefill_rows(bucket)
    tokens, lengths = np.zeros((rows, bucket), np.int32), np.ones(rows, np.int32)
    with mesh_of(plan):
        return run_prompts.lower(model, weights, tokens, lengths, eight_bits=plan.eight_bit_cache)


def lower_insert(plan: SamplerPlan, prefill: Any) -> Any:
    """Lower `insert` for the prompts that a compiled `run_prompts` returns."""
    prompts = placed(prefill.out_info, prefill.output_shardings)
    with mesh_of(plan):
        return insert.lower(abstract_slots(plan), prompts, no_entries(plan))


def lower_extend(plan: SamplerPlan) -> Any:
    """Lower `extend` without making arrays on a device."""
    model, weights = abstract_params(plan)
    with mesh_of(plan):
        return extend.lower(model, weights, abstract_slots(plan), no_messages(plan))


def lower_decode(
    plan: SamplerPlan, *, read: int | None = None, top_k: bool = False, top_p: bool = False
) -> Any:
    """Lower `decode` without making arrays on a device; `read` None reads all cache entries."""
    model, weights = abstract_params(plan)
    with mesh_of(plan):
        return decode.lower(
            model,
            weights,
            abstract_slots(plan),
            np.int32(plan.slots),
            steps=plan.steps,
            read=read or plan.read_buckets[-1],
            top_k=top_k,
            top_p=top_p,
            keep=plan.turns,
        )
