"""Show memory and costs of compiled programs as a text table, or as dicts for JSON."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from mugrpo_jax.planning.call_time import CallTime
from mugrpo_jax.planning.programs import CompiledProgram
from mugrpo_jax.planning.run_plan import human
from mugrpo_jax.runs.text_table import text_table

_HEADER = ["program", "beside", "arguments", "outputs", "temporary", "peak", "FLOPs", "traffic", "messages"]


def program_dict(program: CompiledProgram, time: CallTime | None) -> dict[str, Any]:
    """Return a program's memory, cost and estimated time as a dict for JSON."""
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


def program_table(programs: Sequence[CompiledProgram]) -> list[str]:
    """Return the lines of a text table: a header, then one line per program."""
    rows = [_HEADER]
    for program in programs:
        sizes = [program.resident, program.arguments, program.outputs, program.temporaries, program.peak]
        costs = ["refused", "", ""]
        if cost := program.cost:
            sent = ", ".join(f"{n} × {kind} {human(sent)}" for kind, (n, sent) in cost.by_kind().items())
            costs = [f"{cost.flops:.3g}", human(cost.bytes), sent or "none"]
        rows.append([program.name, *map(human, sizes), *costs])
    return text_table(rows).splitlines()
