"""Weak scaling on paper: compile the update of a 7B model for 8 to 512 chips, with equal tokens per chip.

    python scripts/plan_scaling.py                              # compile for 8, 32, 128 and 512 chips of v5p
    python scripts/plan_scaling.py --devices 8 16 32 64 128 256 512 --fsdp all 16
    python scripts/plan_scaling.py --read docs/scaling.json     # the table and the figure, without compiling

Prints a table and draws docs/scaling.png. FLOPs, traffic and collectives are per device and micro-batch, read
from the compiled programs. Times are computed from the chip's peaks (`planning.Assumptions`).
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from mugrpo_jax import config as configs
from mugrpo_jax.planning import CHIPS, Assumptions, find_topology
from mugrpo_jax.planning.chips import topology_mesh
from mugrpo_jax.planning.program_cost import COLLECTIVES
from mugrpo_jax.planning.programs import UpdatePrograms, compile_program
from mugrpo_jax.setup.initial_model import run_model_shape

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "configs" / "targets" / "qwen2.5_math_7b_v5p_32.yaml"
SHAPES = {8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8", 512: "8x8x8"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 32, 128, 512], choices=SHAPES)
    parser.add_argument(
        "--fsdp",
        nargs="+",
        default=["all"],
        choices=["all", *map(str, SHAPES)],
        help="chips that share one copy of the weights: all, or a number; the other chips have copies",
    )
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a micro-batch on each device")
    parser.add_argument("--read", type=Path, help="read the records of an earlier run")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "scaling.json", help="write records here")
    parser.add_argument("--figure", type=Path, default=ROOT / "docs" / "scaling.png")
    arguments = parser.parse_args()
    if arguments.read:
        records = json.loads(arguments.read.read_text())
    else:
        records = []
        for fsdp in arguments.fsdp:
            for count in arguments.devices:
                if fsdp == "all" or int(fsdp) < count:
                    records.append(measure(count, count if fsdp == "all" else int(fsdp), arguments.tokens))
                    print(json.dumps(records[-1]), flush=True)
                    arguments.out.write_text(json.dumps(records, indent=1) + "\n")
    print(table(records))
    draw(records, arguments.figure)


def measure(devices: int, fsdp: int, tokens: int) -> dict[str, Any]:
    """Compile the gradient of one micro-batch for this number of chips."""
    topology = find_topology(f"v5p:{SHAPES[devices]}")
    overrides = [
        f"mesh.data={devices // fsdp}",
        f"mesh.fsdp={fsdp}",
        f"batch.tokens_per_micro_batch={devices * tokens}",
        "model.remat=full",
    ]
    config = configs.load(CONFIG, overrides)
    programs = UpdatePrograms(config, run_model_shape(config), topology_mesh(config, topology))
    program = compile_program(next(programs.programs()), topology)
    assert program.cost is not None
    kinds = program.cost.by_kind()
    return {
        "devices": devices,
        "fsdp": fsdp,
        "topology": topology.name,
        "tokens": tokens,
        "flops": program.cost.flops,
        "bytes": program.cost.bytes,
        "sent": program.cost.sent,
        "peak": program.peak,
        "collectives": {kind: {"count": n, "bytes": sent} for kind, (n, sent) in kinds.items()},
    }


def times(record: dict[str, Any]) -> dict[str, float]:
    chip, assumed = CHIPS["v5p"], Assumptions()
    assert chip.flops and chip.bandwidth and chip.link
    return {
        "compute": record["flops"] / (chip.flops * assumed.compute),
        "memory": record["bytes"] / (chip.bandwidth * assumed.memory),
        "link": record["sent"] / (chip.link * assumed.link),
    }


def break_even(record: dict[str, Any]) -> float:
    """Tokens per device below which collectives, whose size does not depend on them, outlast compute."""
    seconds = times(record)
    return record["tokens"] * seconds["link"] / seconds["compute"]


def table(records: list[dict[str, Any]]) -> str:
    kinds = [kind for kind in COLLECTIVES if any(kind in record["collectives"] for record in records)]
    head = [
        "chips",
        "fsdp",
        "FLOPs",
        "traffic",
        *kinds,
        "sent",
        "peak memory",
        "compute",
        "links",
        "break-even tokens",
    ]
    lines = [head, ["---"] * len(head)]
    for record in records:
        seconds = times(record)
        found = (record["collectives"].get(kind, {"count": 0, "bytes": 0}) for kind in kinds)
        lines.append(
            [
                str(record["devices"]),
                str(record["fsdp"]),
                f"{record['flops']:.3g}",
                f"{record['bytes'] / 1e9:.0f} GB",
                *(f"{kind['count']} × {kind['bytes'] / 1e9:.2f} GB" for kind in found),
                f"{record['sent'] / 1e9:.1f} GB",
                f"{record['peak'] / 1e9:.1f} GB",
                f"{1e3 * seconds['compute']:.0f} ms",
                f"{1e3 * seconds['link']:.0f} ms",
                f"{break_even(record):.0f}",
            ]
        )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def draw(records: list[dict[str, Any]], path: Path) -> None:
    """Left: time of a device in one micro-batch. Right: compute and collectives over tokens per device."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    split = [record for record in records if record["fsdp"] == record["devices"]]
    copied = [record for record in records if record["fsdp"] != record["devices"]]
    for name, color in (("compute", "tab:blue"), ("memory", "tab:green"), ("link", "tab:red")):
        for some, line, more in (
            (split, "o-", ""),
            (copied, "o:", f", copies on {records[-1]['fsdp']} chips"),
        ):
            if some and not (more and name == "compute"):  # which is the same
                milliseconds = [1e3 * times(record)[name] for record in some]
                left.plot([r["devices"] for r in some], milliseconds, line, color=color, label=name + more)
    counts = sorted({record["devices"] for record in records})
    left.set(xscale="log", yscale="log", xlabel="chips", ylabel="ms a micro-batch")
    left.set_xticks(counts, [str(count) for count in counts])
    left.set_title(f"weak scaling: {records[0]['tokens']} tokens on each chip")
    left.set_ylim(top=8 * left.get_ylim()[1])
    left.legend(loc="upper center", ncols=2)
    tokens = np.geomspace(64, 32768, 50)
    largest = max(split or copied, key=lambda record: record["devices"])
    seconds = times(largest)
    right.plot(
        tokens, 1e3 * seconds["compute"] * tokens / largest["tokens"], color="tab:blue", label="compute"
    )
    right.axhline(1e3 * seconds["link"], color="tab:red", label="link")
    right.axvline(break_even(largest), color="gray", linestyle=":", label=f"{break_even(largest):.0f} tokens")
    right.set(xscale="log", yscale="log", xlabel="tokens on each chip", ylabel="ms a micro-batch")
    right.set_title(f"{largest['devices']} chips: where collectives overtake compute")
    right.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
