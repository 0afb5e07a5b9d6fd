"""A run compiled for devices that need not be there: whether it fits, what it costs, how long it takes.

    plan = compile_plan(config.load("configs/targets/qwen2.5_math_7b_v5e_64.yaml"), "v5e:8x8")
    print(plan)

Compiled are the update step for the micro-batch shapes that no other exceeds, the optimizer's step, prefill
of the longest prompts, and decoding with the longest read. Everything is per device and per call.
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh
from tqdm import tqdm

from mugrpo_jax.config import ConfigError, RunConfig
from mugrpo_jax.models import ModelConfig, make_mesh
from mugrpo_jax.planning import show
from mugrpo_jax.planning.chips import Topology, chip_of, find_topology
from mugrpo_jax.planning.estimate import Assumptions, Seconds, seconds
from mugrpo_jax.planning.programs import (
    CompiledProgram,
    Lowered,
    UpdatePrograms,
    compile_program,
    sampler_programs,
)
from mugrpo_jax.planning.run_plan import RunPlan, human, plan_run
from mugrpo_jax.setup.run_model import run_model_shape

_USABLE = 0.96  # of a chip's memory; the rest is the runtime's and lost between buffers


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Times of a run.

    Attributes:
      update: seconds of one optimizer update with responses of mean length.
      update_tokens: tokens a second that updates read, all devices together.
      step: seconds of one decode step with half-filled slots.
      decode_tokens: tokens a second that are generated, all hosts together.
      generate_hours: of all stages.
      update_hours: of all stages.
    """

    update: float
    update_tokens: float
    step: float
    decode_tokens: float
    generate_hours: float
    update_hours: float

    @property
    def hours(self) -> float:
        """Of the run, without evaluation, loading and checkpoints."""
        return self.generate_hours + self.update_hours


@dataclasses.dataclass(frozen=True)
class CompiledPlan:
    """What a run needs on each device of a topology; `print` it, or take `as_json`.

    Attributes:
      run: the sizes that follow from the config.
      topology: the devices.
      programs: compiled ones, in the order of a stage.
      assumed: what the times rest on.
      proposal: overrides of the config under which everything fits; None if it does as it is, or if no
        setting was found.
    """

    run: RunPlan
    topology: Topology
    programs: tuple[CompiledProgram, ...]
    assumed: Assumptions
    proposal: tuple[str, ...] | None = None

    @property
    def capacity(self) -> int:
        """Bytes on a device that programs may use."""
        return int(self.topology.chip.memory * _USABLE)

    @property
    def peak(self) -> int:
        """Most bytes on a device over the whole run."""
        return max((program.peak for program in self.programs), default=0)

    @property
    def fits(self) -> bool:
        """Whether every program compiled and leaves room."""
        return self.run.problem is None and not self.too_large

    @property
    def too_large(self) -> list[CompiledProgram]:
        """The programs that do not fit."""
        return [p for p in self.programs if p.cost is None or p.peak > self.capacity]

    def program(self, name: str) -> CompiledProgram | None:
        """The first program whose name begins so."""
        return next((p for p in self.programs if p.name.startswith(name)), None)

    def seconds(self, program: CompiledProgram) -> Seconds | None:
        """Time of one call, by what it waits for."""
        return seconds(program.cost, self.topology.chip, self.assumed) if program.cost else None

    def estimate(self) -> Estimate | None:
        """Times of the run; None if a program did not compile or the chip has no published peaks."""
        update, apply, decode = (self.program(name) for name in ("update", "optimizer", "decode"))
        if update is None or apply is None or decode is None or self.run.sampler is None:
            return None
        found = (self.seconds(program) for program in (update, apply, decode))
        times = [time for time in found if time is not None]
        return _estimate(self, *times) if len(times) == 3 else None

    def as_json(self) -> str:
        """One JSON object with everything that the text shows."""
        estimate = self.estimate()
        return json.dumps(
            {
                "topology": self.topology.name,
                "chip": self.topology.chip.name,
                "devices": len(self.topology.devices),
                "stand_in": self.topology.stand_in,
                "mesh": dict(self.run.mesh.shape),
                "capacity": self.capacity,
                "peak": self.peak,
                "fits": self.fits,
                "problem": self.run.problem,
                "proposal": self.proposal,
                "memory": dataclasses.asdict(self.run.memory),
                "programs": [show.as_dict(program, self.seconds(program)) for program in self.programs],
                "estimate": estimate and dataclasses.asdict(estimate) | {"hours": estimate.hours},
                "assumptions": dataclasses.asdict(self.assumed),
            },
            indent=2,
        )

    def __str__(self) -> str:
        return "\n".join([str(self.run), "", *show.table(self), "", *show.verdict(self)])


def compile_plan(
    config: RunConfig,
    topology: str | Topology,
    *,
    assumed: Assumptions | None = None,
    propose: bool = True,
    progress: bool = False,
) -> CompiledPlan:
    """Compile a run for a topology without touching a device.

    Args:
      config: the run's.
      topology: such as `v5p:2x2x4`; see `find_topology`.
      assumed: shares of the peaks for the times.
      propose: where something does not fit, look for the nearest setting that does: more compilations.
      progress: show a bar.
    """
    topology = find_topology(topology) if isinstance(topology, str) else topology
    model = run_model_shape(config)
    plan = _compiled(config, model, topology, assumed or Assumptions(), progress)
    if plan.fits or not propose:
        return plan
    from mugrpo_jax.planning.advice import nearest_fit

    return dataclasses.replace(plan, proposal=nearest_fit(plan, model, progress))


def _compiled(
    config: RunConfig, model: ModelConfig, topology: Topology, assumed: Assumptions, progress: bool
) -> CompiledPlan:
    mesh = topology_mesh(config, topology)
    capacity = int(topology.chip.memory * _USABLE)
    run = plan_run(config, model, mesh, device_memory=capacity)
    bar = tqdm(
        lowered_programs(run, topology.host_devices()),
        desc=f"compile for {topology.name}",
        unit="program",
        disable=not progress,
    )
    programs = []
    for program in bar:
        bar.set_postfix_str(program.name)
        programs.append(compile_program(program, topology))
    return CompiledPlan(run, topology, tuple(programs), assumed)


def check_memory(run: RunPlan) -> None:
    """Compile a planned run for its own devices and refuse it, in one line, if it does not fit them."""
    if run.problem is not None:
        raise ConfigError(f"memory: {run.problem}")
    devices = list(run.mesh.devices.flat)
    topology = Topology("of this run", chip_of(devices[0]), devices)
    for program in lowered_programs(run):
        compiled = compile_program(program, topology)
        if compiled.cost is None or compiled.peak > topology.chip.memory * _USABLE:
            advice = "fewer slots" if program.name.startswith(("prefill", "decode")) else "more remat"
            raise ConfigError(
                f"memory: {program.name} takes {human(compiled.peak)} of a device's "
                f"{human(topology.chip.memory)}; {advice} or more devices would help: `mugrpo plan` with "
                "--topology looks for what fits"
            )


def lowered_programs(run: RunPlan, host: Sequence[Any] | None = None) -> list[Lowered]:
    """Everything of a planned run that is worth compiling; `host` are devices to sample on, if others."""
    updates = UpdatePrograms(run.config, run.model, run.mesh)
    programs = list(updates.lowered())
    if run.sampler is not None:
        sampler = run.sampler
        if sampler.mesh is None or host is not None:  # a lone device is named, lest it be this machine's
            devices = host or [run.mesh.devices.flat[0]]
            mesh = make_mesh(data=-1, tensor=run.config.mesh.sampling_tensor, devices=devices)
            sampler = dataclasses.replace(sampler, mesh=mesh)
        programs += sampler_programs(sampler, run.config, updates.state_bytes)
    return programs


def topology_mesh(config: RunConfig, topology: Topology) -> Mesh:
    """All devices of a topology in the config's shape."""
    shape = config.mesh
    try:
        return make_mesh(data=shape.data, fsdp=shape.fsdp, tensor=shape.tensor, devices=topology.devices)
    except ValueError as error:
        raise ValueError(f"topology {topology.name!r}: {error}") from None


def _estimate(plan: CompiledPlan, update: Seconds, apply: Seconds, step: Seconds) -> Estimate:
    run, assumed, config = plan.run, plan.assumed, plan.run.config
    prompt, response = config.sampling.max_prompt_tokens, config.sampling.max_response_tokens
    mean = math.ceil(assumed.prompt * prompt + assumed.response * response)
    micro_batches = -(-run.rows_per_update * mean // run.buckets.sizes(run.buckets.lengths[-1])[0].tokens)
    update_s = micro_batches * max(update.compute, update.memory, update.link) + apply.overlapped
    sampler = run.sampler
    assert sampler is not None and plan.topology.chip.bandwidth is not None
    unread = 0.5 * sampler.cache_bytes / (plan.topology.chip.bandwidth * assumed.memory)
    step_s = max(step.added - unread, step.compute)
    prefill = plan.program("prefill")
    prefill_time = plan.seconds(prefill) if prefill else None
    prompts_a_call = sampler.prefill_rows(sampler.prompt_buckets[-1])
    per_prompt = assumed.prompt * (prefill_time.overlapped if prefill_time else 0.0) / prompts_a_call
    hosts = plan.topology.hosts
    decode_tokens = sampler.slots * hosts * assumed.occupancy / step_s
    tokens = run.stages * run.responses_per_stage * assumed.response * response
    prompts = run.stages * run.responses_per_stage / config.batch.responses_per_prompt
    return Estimate(
        update=update_s,
        update_tokens=run.rows_per_update * mean / update_s,
        step=step_s,
        decode_tokens=decode_tokens,
        generate_hours=(tokens / decode_tokens + prompts / hosts * per_prompt) / 3600,
        update_hours=run.updates * update_s / 3600,
    )
