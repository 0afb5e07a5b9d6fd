"""Find settings with which a run fits into memory. Changes that slow the run least are tried first."""

from collections.abc import Iterator

from mugrpo_jax.config import changed
from mugrpo_jax.models import ModelConfig
from mugrpo_jax.planning.chips import topology_apart, topology_mesh
from mugrpo_jax.planning.compiled_plan import CompiledPlan
from mugrpo_jax.planning.make_plan import plan_run
from mugrpo_jax.planning.program_list import programs_of
from mugrpo_jax.planning.run_plan import RunPlan
from mugrpo_jax.planning.side_by_side import compile_programs


def nearest_fit(plan: CompiledPlan, model: ModelConfig, progress: bool) -> tuple[str, ...] | None:
    """Compile the run with the overrides from `candidates`; return the first overrides that fit, or None."""
    kinds = {program.kind for program in plan.too_large} or {"update", "decode"}
    for overrides in candidates(plan):
        try:
            config = changed(plan.run.config, overrides)
            mesh = topology_mesh(config, plan.topology)
            apart = topology_apart(config, model, plan.topology)
            run = plan_run(config, model, mesh, device_memory=plan.capacity, apart=apart)
        except ValueError:  # a mesh that does not divide the model
            continue
        if run.problem is None and _all_fit(plan, run, kinds, progress):
            return overrides
    return None


def candidates(plan: CompiledPlan) -> Iterator[tuple[str, ...]]:
    """Yield config overrides that reduce the memory of the programs that are too large, mildest first."""
    config, run = plan.run.config, plan.run
    large = {program.kind for program in plan.too_large}
    steps: list[str] = []
    if large & {"prefill", "decode", "cast", "send"} or run.sampler is None:
        devices = len(plan.topology.host_devices())
        slots = config.sampling.slots if run.sampler is None else run.sampler.slots
        known = slots if isinstance(slots, int) else 0  # 0: no number of slots is known
        for fewer in [known // part // devices * devices for part in (2, 4, 8)]:
            if fewer:
                steps = [f"sampling.slots={fewer}"]
                yield tuple(steps)
        tensor = 2 * config.mesh.sampling_tensor
        while devices % tensor == 0:
            yield (*steps, f"mesh.sampling_tensor={tensor}")
            tensor *= 2
    if large & {"update", "statistics", "optimizer"}:
        if config.model.remat != "full":
            steps.append("model.remat=full")
            yield tuple(steps)
        least = run.buckets.lengths[-1] * run.buckets.parts
        if run.buckets.tokens >= 2 * least:
            steps.append(f"batch.tokens_per_micro_batch={least}")
            yield tuple(steps)
    if config.track_drift:
        steps.append("track_drift=false")
        yield tuple(steps)
    for tensor in (2 * config.mesh.tensor, 4 * config.mesh.tensor, 8 * config.mesh.tensor):
        yield (*steps, f"mesh.tensor={tensor}", "mesh.fsdp=-1")


def _all_fit(plan: CompiledPlan, run: RunPlan, kinds: set[str], progress: bool) -> bool:
    """Return whether all programs of these kinds fit. Programs of other kinds fit already and do not grow."""
    wanted = [p for p in programs_of(run, plan.topology.host_devices()) if p.kind in kinds]
    compiled = compile_programs(
        wanted, plan.topology, all_must_fit=True, title="look for what fits", progress=progress
    )
    return all(program.fits(plan.topology.chip) for program in compiled)
