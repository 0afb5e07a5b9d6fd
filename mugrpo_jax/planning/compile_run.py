"""Compile the programs of a run for a topology, and check that they fit into its memory.

    plan = compile_plan(config.load("configs/targets/qwen2.5_math_7b_v5e_64.yaml"), "v5e:8x8")
    print(plan)

The compiled programs are the update step for the largest micro-batch shapes, the optimizer step, prefill of
the longest prompts, decoding with a full KV cache, and the programs that make or move the whole model. No
other program of the run needs more memory.
"""

import dataclasses

from tqdm import tqdm

from mugrpo_jax.config import ConfigError, RunConfig, changed
from mugrpo_jax.planning.call_time import Assumptions
from mugrpo_jax.planning.chips import Topology, chip_of, find_topology, topology_apart, topology_mesh
from mugrpo_jax.planning.compiled_plan import CompiledPlan
from mugrpo_jax.planning.make_plan import plan_run
from mugrpo_jax.planning.program_list import programs_of
from mugrpo_jax.planning.proposal import nearest_fit
from mugrpo_jax.planning.run_plan import RunPlan
from mugrpo_jax.planning.side_by_side import compile_programs
from mugrpo_jax.planning.units import human
from mugrpo_jax.setup.devices import local_device
from mugrpo_jax.setup.initial_model import run_model_shape


def compile_plan(
    config: RunConfig,
    topology: str | Topology,
    *,
    assumed: Assumptions | None = None,
    propose: bool = True,
    progress: bool = False,
) -> CompiledPlan:
    """Compile the programs of a run for a topology, such as `v5p:2x2x4`, whose devices need not be present.

    If the run does not fit and `propose` is True, compile it with changed settings until it fits. `assumed`
    are the assumptions of the time estimates. If `progress` is True, show a progress bar.
    """
    topology = find_topology(topology) if isinstance(topology, str) else topology
    model = run_model_shape(config)
    mesh = topology_mesh(config, topology)
    apart = topology_apart(config, model, topology)
    run = plan_run(config, model, mesh, device_memory=topology.chip.usable_memory, apart=apart)
    programs = programs_of(run, topology.host_devices() if apart is None else None)
    title = f"compile for {topology.name}"
    compiled = compile_programs(programs, topology, title=title, progress=progress)
    plan = CompiledPlan(run, topology, compiled, assumed or Assumptions())
    if plan.fits or not propose:
        return plan
    return dataclasses.replace(plan, proposal=nearest_fit(plan, model, progress))


def fitting_config(config: RunConfig, run: RunPlan) -> RunConfig:
    """Check the memory of a run; return its config, with more remat if that was left to us and is needed.

    `run` is the plan of `config`. Remat is chosen from an estimate of the activations, and only the compiler
    knows them. If the run does not fit with any remat, raise the error of `check_memory`.
    """
    more = {"none": "dots", "dots": "full"}
    ours = any(choice.key == "model.remat" for choice in run.choices)
    while True:
        try:
            check_memory(run)
            return config
        except ConfigError as error:
            remat = more.get(run.config.model.remat)
            if not ours or remat is None or not str(error).startswith("memory: update"):
                raise
            tqdm.write(f"{str(error).partition(';')[0]}; model.remat={remat} is tried")
            config = changed(config, [f"model.remat={remat}"])
            run = plan_run(config, run.model, run.mesh)


def check_memory(run: RunPlan) -> None:
    """Compile a run's programs for its own devices. Raise a `ConfigError` if a program does not fit."""
    if run.problem is not None:
        raise ConfigError(f"memory: {run.problem}")
    topology = Topology("of this run", chip_of(local_device(run.mesh)), list(run.mesh.devices.flat))
    for program in compile_programs(programs_of(run), topology, all_must_fit=True):
        if not program.fits(topology.chip):
            advice = {"prefill": "fewer slots or ", "decode": "fewer slots or ", "update": "more remat or "}
            raise ConfigError(
                f"memory: {program.name} takes {human(program.peak)} of a device's "
                f"{human(topology.chip.memory)}; {advice.get(program.kind, '')}more devices would help: "
                "`mugrpo plan` with --topology looks for settings that fit"
            )
