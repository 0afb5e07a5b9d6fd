"""Compile the programs of a run in the background, while its data is read or its first responses are sampled.

On a TPU the host's processors have little else to do, so all programs are compiled. On a CPU the run itself
needs the processors, so only those programs are compiled that the first stage almost surely needs. With fewer
than four processors, this is done only if a warm start comes first, in which there is time for it. On a GPU
nothing is compiled in the background: there the compiler chooses kernels by timing them, and a busy GPU would
make it choose slower ones. There, `mugrpo train` compiles the largest programs before the run starts.
"""

import dataclasses
from collections.abc import Sequence

from mugrpo_jax.config import AUTO
from mugrpo_jax.loop.run_context import RunContext
from mugrpo_jax.rollouts import Buckets, Shape
from mugrpo_jax.sampling import SamplerPlan, compile_sampler_ahead
from mugrpo_jax.setup.devices import local_device
from mugrpo_jax.setup.lora import abstract_run_base
from mugrpo_jax.setup.sizes import sampler_plan
from mugrpo_jax.tasks.processors import usable_processors
from mugrpo_jax.training import UpdateStep, compile_step_ahead

_FEW_PROCESSORS = 4
_MOST_THREADS = 8  # each compilation takes some memory of the host


def compile_ahead(run: RunContext, step: UpdateStep, *, has_state: bool) -> None:
    """Start to compile the programs of the sampler and of the updates, in the order in which they are needed.

    Call this before the training state is made, and again when it is on the devices (`has_state`). Only then
    an accelerator tells how many slots fit, so that the sampler's programs may not be known before.
    """
    config = run.config
    saved, processors = run.checkpoints.latest(), usable_processors()
    finished = saved == config.stages.stop * config.batch.updates_per_stage
    if finished or _platform(run) == "gpu":
        return
    warms_up = config.warm_start.updates > 0 and saved is None and not has_state
    if _on_cpu(run) and processors < _FEW_PROCESSORS and not warms_up:
        return
    # Half of the processors, because the run needs some too: to prepare data and to call the devices.
    run.setup.programs.start(max(1, min(_MOST_THREADS, processors // 2)))
    plan = _sampler_plan(run, has_state)
    if plan is not None:
        _compile_sampler(run, plan)
    # Not before the sampler's programs, unless there is a warm start in which all of them can be compiled.
    if plan is not None or has_state or warms_up:
        _compile_updates(run, step)


def _sampler_plan(run: RunContext, has_state: bool) -> SamplerPlan | None:
    """Return the plan of the sampler, or None if it is not known yet or the run has no sampler."""
    config, setup = run.config, run.setup
    if (config.replay.run is not None or run.waits is not None) and not _evaluates(run):
        return None
    if has_state or _on_cpu(run):
        plan = setup.sampler_plan
    elif config.sampling.slots != AUTO:
        # Not `setup.sampler_plan`, which is kept: it must see the free memory beside the training state.
        plan = sampler_plan(config, setup.model.config, setup.mesh)
    else:
        return None
    return plan if plan.mesh is not None else dataclasses.replace(plan, mesh=setup.mesh)  # one device


def _compile_sampler(run: RunContext, plan: SamplerPlan) -> None:
    config = run.config
    prompts, reads = plan.prompt_buckets, plan.read_buckets
    if _on_cpu(run):  # which bucket is needed is certain only if there is only one
        prompts, reads = (buckets if len(buckets) == 1 else () for buckets in (prompts, reads))
    kinds = [config.evaluation.top_p < 1] if _evaluates(run) else []
    kinds += [False] if config.replay.run is None and run.waits is None else []
    compile_sampler_ahead(
        run.setup.programs,
        plan,
        prompt_buckets=prompts,
        read_buckets=reads,
        top_p=list(dict.fromkeys(kinds)),
    )


def _evaluates(run: RunContext) -> bool:
    return bool(run.config.evaluation.problems and len(run.task.test))


def _compile_updates(run: RunContext, step: UpdateStep) -> None:
    buckets, batch = run.setup.buckets(), run.config.batch
    rows = batch.prompts_per_update * batch.responses_per_prompt
    shapes = likely_shapes(buckets, rows) if _on_cpu(run) else possible_shapes(buckets, rows)
    compile_step_ahead(
        step,
        run.setup.programs,
        run.abstract_state(),
        buckets,
        shapes,
        reference=run.config.uses_reference,
        behaviors=bool(run.behaviors),
        base=abstract_run_base(run.config, run.setup.model, run.setup.mesh),
    )


def likely_shapes(buckets: Buckets, rows: int) -> Sequence[Shape]:
    """Return the shape of an update's first micro-batch if its rows are half filled on average.

    >>> likely_shapes(Buckets((16, 32), 1856), rows=128)
    [Shape(rows=116, length=32, tokens=1856)]
    >>> likely_shapes(Buckets((16, 32), 1856), rows=16)
    []
    """
    longest = buckets.lengths[-1]
    return [shape for shape in buckets.sizes(longest)[:1] if 2 * shape.tokens <= rows * longest]


def possible_shapes(buckets: Buckets, rows: int) -> Sequence[Shape]:
    """Return the shapes that so many rows can need, largest first.

    >>> [shape.tokens for shape in possible_shapes(Buckets((16, 32), 1856), rows=20)]
    [464, 464]
    """
    shapes = [
        shape
        for length in buckets.lengths
        for shape in buckets.sizes(length)
        if shape == buckets.sizes(length)[-1] or 0.8 * shape.tokens <= rows * length
    ]
    return sorted(shapes, key=lambda shape: (shape.length, shape.tokens), reverse=True)


def _on_cpu(run: RunContext) -> bool:
    return _platform(run) == "cpu"


def _platform(run: RunContext) -> str:
    return local_device(run.setup.mesh).platform
