"""Compile the sampler's programs in the background, under the names with which `Engine` looks for them."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from mugrpo_jax.compiling.compiled_programs import CompiledPrograms
from mugrpo_jax.sampling.engine import decode_name, extend_name, insert_name, prefill_name
from mugrpo_jax.sampling.lowering import lower_decode, lower_extend, lower_insert, lower_prefill
from mugrpo_jax.sampling.sampler_plan import SamplerPlan


def compile_sampler_ahead(
    programs: CompiledPrograms,
    plan: SamplerPlan,
    *,
    prompt_buckets: Sequence[int],
    read_buckets: Sequence[int],
    top_p: Sequence[bool] = (False,),
) -> None:
    """Start to compile the programs for these buckets; `plan` needs a mesh, even for one device.

    `top_p` says whether to compile decoding without top-p, with it, or both.
    """
    for bucket in prompt_buckets:
        rows = plan.prefill_rows(bucket)
        prefill = programs.ahead(prefill_name(rows, bucket), functools.partial(lower_prefill, plan, bucket))
        programs.ahead(insert_name(rows, bucket), functools.partial(_lower_insert, plan, prefill))
    if plan.turns:
        programs.ahead(extend_name(), functools.partial(lower_extend, plan))
    for slots, read, by_p in itertools.product((plan.slots, *plan.fewer_slots), read_buckets, top_p):
        programs.ahead(
            decode_name(slots, read, top_p=by_p),
            functools.partial(lower_decode, dataclasses.replace(plan, slots=slots), read=read, top_p=by_p),
        )


def _lower_insert(plan: SamplerPlan, prefill: "Future[Any]") -> Any:
    return lower_insert(plan, prefill.result())
