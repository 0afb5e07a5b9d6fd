"""A compiled plan for people, and its programs as plain data."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mugrpo_jax.planning.estimate import Seconds
from mugrpo_jax.planning.programs import CompiledProgram
from mugrpo_jax.planning.run_plan import human
from mugrpo_jax.runs.text import text_table

if TYPE_CHECKING:
    from mugrpo_jax.planning.compiled_plan import CompiledPlan


def as_dict(program: CompiledProgram, time: Seconds | None) -> dict[str, Any]:
    """A program's memory and costs under plain names."""
    found = {
        "name": program.name,
        "resident": program.resident,
        "arguments": program.arguments,
        "outputs": program.outputs,
        "temporaries": program.temporaries,
        "peak": program.peak,
    }
    if program.cost is None:
        return found | {"refused": True}
    kinds = program.cost.by_kind()
    return found | {
        "flops": program.cost.flops,
        "bytes": program.cost.bytes,
        "collectives": {kind: {"count": n, "bytes": sent} for kind, (n, sent) in kinds.items()},
        "seconds": time and dataclasses.asdict(time),
    }


def table(plan: "CompiledPlan") -> list[str]:
    """One line a program, in columns."""
    header = [
        "program",
        "beside",
        "arguments",
        "outputs",
        "temporary",
        "peak",
        "FLOPs",
        "traffic",
        "messages",
    ]
    rows: list[Sequence[str]] = [header]
    for program in plan.programs:
        sizes = [program.resident, program.arguments, program.outputs, program.temporaries, program.peak]
        cost = program.cost
        costs = [f"{cost.flops:.3g}", human(cost.bytes), _messages(program)] if cost else ["refused", "", ""]
        rows.append([program.name, *map(human, sizes), *costs])
    return text_table(rows).splitlines()


def _messages(program: CompiledProgram) -> str:
    kinds = program.cost.by_kind() if program.cost else {}
    return ", ".join(f"{n} × {kind} {human(sent)}" for kind, (n, sent) in kinds.items()) or "none"


def verdict(plan: "CompiledPlan") -> list[str]:
    """Whether it fits, what to change if not, and how long it takes."""
    chip, estimate = plan.topology.chip, plan.estimate()
    lines = [f"topology    {plan.topology}"]
    share = plan.peak / chip.memory
    lines.append(
        f"memory      peak {human(plan.peak)} of {human(chip.memory)} ({share:.0%}); programs may use "
        f"{human(plan.capacity)}"
    )
    for program in plan.too_large:
        lines.append(f"TOO LARGE   {program.name}: {human(program.peak)}")
    if not plan.fits:
        proposal = "nothing that was tried fits; take more devices"
        if plan.proposal is not None:
            proposal = "it fits with " + " ".join(plan.proposal)
        lines.append(f"proposal    {proposal}")
    if estimate is None:
        return lines
    bound = {p.name.split()[0]: time.bound for p in plan.programs if (time := plan.seconds(p))}
    return [
        *lines,
        f"update      {estimate.update:.3g} s ({estimate.update_tokens:,.0f} tokens/s), bound by "
        f"{bound['update']}",
        f"generation  {1e3 * estimate.step:.3g} ms a step ({estimate.decode_tokens:,.0f} tokens/s), bound by "
        f"{bound['decode']}",
        f"run         {estimate.hours:.3g} hours: {estimate.generate_hours:.3g} generating, "
        f"{estimate.update_hours:.3g} updating; evaluation, loading and checkpoints come on top",
        f"assumed     {plan.assumed}",
    ]
