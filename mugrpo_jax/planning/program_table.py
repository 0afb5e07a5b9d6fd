"""Show memory and costs of compiled programs as a text table, or as dicts for JSON."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from mugrpo_jax.planning.call_time import CallTime
from mugrpo_jax.planning.programs import CompiledProgram
from mugrpo_jax.planning.units import human
from mugrpo_jax.runs.text_table import text_table

_HEADER = ["program", "beside", "arguments", "outputs", "temporary", "peak"]
_HEADER += ["FLOPs", "traffic", "collectives"]
COLUMNS = (
    "Each row is a program. All figures are for one device, and costs are for one call.",
    "  beside       memory of other arrays on the device meanwhile, such as the training state",
    "  arguments    memory of the program's inputs",
    "  outputs      memory of its results, without those that reuse the memory of arguments",
    "  temporary    memory that it needs only while it runs, such as activations",
    "  peak         the sum of these four; it must fit into the device's memory",
    "  FLOPs        operations of matrix products",
    "  traffic      bytes that it reads from and writes to the device's memory",
    "  collectives  count and kind of transfers between devices, and the bytes that a device sends",
)


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
