"""Show the result of compiling a run for a topology: whether the run fits, its cost and estimated time."""

import dataclasses
import json
import math

from mugrpo_jax.planning.call_time import Assumptions, CallTime, call_time
from mugrpo_jax.planning.chips import Topology
from mugrpo_jax.planning.program_table import COLUMNS, program_dict, program_table
from mugrpo_jax.planning.programs import CompiledProgram
from mugrpo_jax.planning.run_plan import APART, RunPlan
from mugrpo_jax.planning.units import human, human_share


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The estimated times and rates of a run.

    Attributes:
      update: seconds of one optimizer update if the responses have mean length.
      update_tokens: tokens that updates process per second, on all devices together.
      step: seconds of one decode step if the KV cache is half full.
      decode_tokens: tokens that are generated per second, on all hosts together.
      generate_hours: hours of generation in all stages together.
      update_hours: hours of updates in all stages together.
      reference_hours: hours to compute the reference policy's log-probs in all stages; 0 without a KL term.
      overlap: whether some devices sample while the others train.
    """

    update: float
    update_tokens: float
    step: float
    decode_tokens: float
    generate_hours: float
    update_hours: float
    reference_hours: float
    overlap: bool = False

    @property
    def hours(self) -> float:
        """Return the hours of the whole run, without evaluation, loading and checkpoints."""
        training = self.update_hours + self.reference_hours
        return max(self.generate_hours, training) if self.overlap else self.generate_hours + training


@dataclasses.dataclass(frozen=True)
class CompiledPlan:
    """A run compiled for a topology. `print(plan)` shows its memory, cost and estimated times.

    Attributes:
      programs: the compiled programs, see `program_list.programs_of`.
      assumed: the assumptions of the time estimates.
      proposal: config overrides with which the run fits; None if it already fits or none were found.
    """

    run: RunPlan
    topology: Topology
    programs: tuple[CompiledProgram, ...]
    assumed: Assumptions
    proposal: tuple[str, ...] | None = None

    @property
    def capacity(self) -> int:
        """Return the bytes of one device's memory that programs may use."""
        return self.topology.chip.usable_memory

    @property
    def peak(self) -> int:
        """Return the largest number of bytes in use on one device during the run."""
        return max((program.peak for program in self.programs), default=0)

    @property
    def fits(self) -> bool:
        """Return whether `run.problem` is None and every program compiled and fits into memory."""
        return self.run.problem is None and not self.too_large

    @property
    def too_large(self) -> list[CompiledProgram]:
        """Return the programs that do not fit into the memory of a device."""
        return [program for program in self.programs if not program.fits(self.topology.chip)]

    def program(self, name: str) -> CompiledProgram | None:
        """Return the first program whose name starts with `name`, or None."""
        return next((p for p in self.programs if p.name.startswith(name)), None)

    def call_time(self, program: CompiledProgram | None) -> CallTime | None:
        """Estimate the times of one call of a program; None without program, cost or peak rates."""
        if program is None or program.cost is None:
            return None
        return call_time(program.cost, self.topology.chip, self.assumed)

    def estimate(self) -> Estimate | None:
        """Estimate the run's times; None if a program did not compile or the peak rates are not known."""
        run, assumed, config, apart = self.run, self.assumed, self.run.config, self.run.apart
        sampler, where = (run.sampler, "") if apart is None else (apart.sampler, APART)
        names = "update", "optimizer", f"{where}decode"
        update, optimizer, step = (self.call_time(self.program(name)) for name in names)
        bandwidth = self.topology.chip.bandwidth
        if update is None or optimizer is None or step is None or sampler is None or bandwidth is None:
            return None
        prompt, response = config.sampling.max_prompt_tokens, config.sampling.max_response_tokens
        mean = math.ceil(assumed.prompt * prompt + assumed.response * response)
        per_micro_batch = run.buckets.sizes(run.buckets.lengths[-1])[0].tokens
        micro_batches = -(-run.rows_per_update * mean // per_micro_batch)
        statistics = self.call_time(self.program("statistics")) if micro_batches > 1 else None
        forward = statistics.overlapped if statistics else 0.0
        update_s = micro_batches * (update.overlapped + forward) + optimizer.overlapped
        reference = self.call_time(self.program("reference"))
        scored = run.stages * config.prompts_per_stage * config.batch.responses_per_prompt * mean
        unread = 0.5 * sampler.cache_bytes / (bandwidth * assumed.memory)
        step_s = max(step.added - unread, step.compute)
        prefill = self.call_time(self.program(f"{where}prefill"))
        prompts_per_call = sampler.prefill_rows(sampler.prompt_buckets[-1])
        per_prompt = assumed.prompt * (prefill.overlapped if prefill else 0.0) / prompts_per_call
        hosts = self.topology.hosts
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
            reference_hours=0.0
            if reference is None
            else scored / per_micro_batch * reference.overlapped / 3600,
            overlap=apart is not None and config.batch.lag > 0,
        )

    def as_json(self) -> str:
        """Return the plan as the text of one JSON object."""
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
                "verdict": self.verdict,
                "problem": self.run.problem,
                "proposal": self.proposal,
                "memory": dataclasses.asdict(self.run.memory),
                "programs": [program_dict(program, self.call_time(program)) for program in self.programs],
                "estimate": estimate and dataclasses.asdict(estimate) | {"hours": estimate.hours},
                "assumptions": dataclasses.asdict(self.assumed),
            },
            indent=2,
        )

    def __str__(self) -> str:
        table = [*program_table(self.programs), "", *COLUMNS, ""]
        parts = [self.verdict, self.run.details(), "", *table, *self._memory_lines()]
        return "\n".join([*parts, *self._time_lines()])

    @property
    def verdict(self) -> str:
        """Return one line: the run fits and how long it takes, or why it does not fit and what to do."""
        if self.fits:
            estimate = self.estimate()
            time = "" if estimate is None else f", about {_duration(estimate.hours)}"
            return f"FITS: {human_share(self.peak, self.capacity)} on each device{time}"
        reason = self.run.problem
        if self.too_large:
            largest = max(self.too_large, key=lambda program: program.peak)
            reason = f"{largest.name} takes {human_share(largest.peak, self.capacity)} on each device"
        if self.proposal is None:
            return f"DOES NOT FIT: {reason}; nothing that was tried fits, take more devices"
        return f"DOES NOT FIT: {reason}; it fits with {' '.join(self.proposal)}"

    def _memory_lines(self) -> list[str]:
        memory = self.topology.chip.memory
        return [
            f"topology    {self.topology}",
            f"memory      peak {human(self.peak)} of {human(memory)} ({self.peak / memory:.0%}); "
            f"programs may use {human(self.capacity)}",
            *(f"TOO LARGE   {program.name}: {human(program.peak)}" for program in self.too_large),
        ]

    def _time_lines(self) -> list[str]:
        estimate = self.estimate()
        if estimate is None:
            return []
        kl = f", {estimate.reference_hours:.3g} for the KL term" if estimate.reference_hours else ""
        bound = {
            p.name.removeprefix(APART).split()[0]: time.bound
            for p in self.programs
            if (time := self.call_time(p))
        }
        meanwhile = " at the same time" if estimate.overlap else ""
        return [
            f"update      {estimate.update:.3g} s ({estimate.update_tokens:,.0f} tokens/s), bound by "
            f"{bound['update']}",
            f"generation  {1e3 * estimate.step:.3g} ms a step ({estimate.decode_tokens:,.0f} tokens/s), "
            f"bound by {bound['decode']}",
            f"run         {estimate.hours:.3g} hours: {estimate.generate_hours:.3g} generating, "
            f"{estimate.update_hours:.3g} updating{kl}{meanwhile}; evaluation, loading and "
            "checkpoints come on top",
            f"assumed     {self.assumed}",
        ]


def _duration(hours: float) -> str:
    """Write an estimated time with no more digits than it is worth.

    >>> _duration(33.2), _duration(2.34), _duration(0.4), _duration(0.001)
    ('33 h', '2.3 h', '24 min', '1 min')
    """
    if hours < 1:
        return f"{max(60 * hours, 1):.0f} min"
    return f"{hours:,.0f} h" if hours >= 10 else f"{hours:.1f} h"
