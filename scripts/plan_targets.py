"""Compile the plan of every config in configs/targets and print one table row per program.

    python scripts/plan_targets.py                        # all of them: many minutes of compilation
    python scripts/plan_targets.py qwen2.5_math_7b        # those whose name begins like this
    python scripts/plan_targets.py --out plans            # also write each plan as JSON into a folder
    python scripts/plan_targets.py --read plans           # the table from such a folder, without compiling

The topology of a config is named in its first lines. The script uses no device.
"""

import argparse
import json
import os
import re
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from mugrpo_jax import config as configs
from mugrpo_jax.planning import compile_plan

TARGETS = Path(__file__).parent.parent / "configs" / "targets"
HEADER = (
    "| config | program | beside | arguments | temporaries | peak | of | FLOPs | traffic | sent | time |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|"
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", default="", help="beginning of a config's name")
    parser.add_argument("--out", type=Path, help="folder for the plans as JSON")
    parser.add_argument("--read", type=Path, help="folder with plans: print their table")
    arguments = parser.parse_args()
    print(HEADER)
    runs = []
    for path in sorted(TARGETS.glob(f"{arguments.name}*.yaml")):
        if arguments.read:
            stored = arguments.read / f"{path.stem}.json"
            if not stored.exists():
                continue
            plan = json.loads(stored.read_text())
        else:
            plan = json.loads(
                compile_plan(configs.load(path), topology(path), propose=False, progress=True).as_json()
            )
        if arguments.out:
            arguments.out.mkdir(parents=True, exist_ok=True)
            (arguments.out / f"{path.stem}.json").write_text(json.dumps(plan, indent=1) + "\n")
        for program in plan["programs"]:
            print(row(path.stem, plan, program), flush=True)
        runs.append(summary(path.stem, plan))
    print("\n| config | topology | fits | update | tokens/s | decode step | tokens/s | hours, generating |")
    print("|---|---|---|---|---|---|---|---|")
    print("\n".join(runs))


def topology(path: Path) -> str:
    """The topology named in the header of a target config."""
    found = re.search(r"--topology (\S+)", path.read_text())
    if found is None:
        raise ValueError(f"{path}: its first lines name no --topology")
    return found[1]


def row(name: str, plan: dict[str, Any], program: dict[str, Any]) -> str:
    seconds = program.get("seconds")
    sent = sum(kind["bytes"] for kind in program.get("collectives", {}).values())
    cells = [
        name,
        program["name"],
        *(f"{program[key] / 1e9:.2f} GB" for key in ("resident", "arguments", "temporaries", "peak")),
        f"{plan['capacity'] / 1e9:.1f} GB",
        f"{program.get('flops', 0):.2e}",
        f"{program.get('bytes', 0) / 1e9:.1f} GB",
        f"{sent / 1e9:.2f} GB",
        "–" if seconds is None else f"{1e3 * max(seconds.values()):.1f} ms, {max(seconds, key=seconds.get)}",
    ]
    return "| " + " | ".join(cells) + " |"


def summary(name: str, plan: dict[str, Any]) -> str:
    estimate = plan["estimate"]
    cells = [name, plan["topology"], "yes" if plan["fits"] else "no"]
    if estimate:
        cells += [
            f"{estimate['update']:.1f} s",
            f"{estimate['update_tokens']:,.0f}",
            f"{1e3 * estimate['step']:.1f} ms",
            f"{estimate['decode_tokens']:,.0f}",
            f"{estimate['hours']:.1f}, {estimate['generate_hours']:.1f}",
        ]
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
