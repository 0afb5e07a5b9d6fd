"""`mugrpo plan`: predict the work, memory and time of a run, on these devices or on others."""

import argparse
import os

from mugrpo_jax.cli import arguments as shared


def add(commands: shared.Commands) -> None:
    """Add `mugrpo plan` and its arguments to the program."""
    parser = shared.add_command(
        commands,
        "plan",
        run,
        help="predict what a run will do and how much memory and time it needs",
        more="The first line says whether the run fits. Below it are updates, tokens, compiled programs, "
        "sampler, memory and disk for the devices of this machine; of the model, only the shape is read. "
        "With --topology, the plan compiles all programs for other devices, which this machine need not "
        "have. It then also shows FLOPs, collectives, hours, and what to change if the run does not fit.",
        example="mugrpo plan quickstart --topology v5e:2x2",
    )
    shared.add_config(parser)
    parser.add_argument(
        "--topology",
        metavar="KIND:SHAPE",
        help="such as v5e:8x8, v5p:2x2x4, v6e:4x4 (chips), h100:8, h200:1, l4:1, rtx4090:1, gpu:8, cpu:8",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object; needs --topology")


def run(arguments: argparse.Namespace) -> None:
    """Execute `mugrpo plan` with the parsed arguments."""
    config = shared.load_config(arguments)
    if arguments.json and not arguments.topology:
        raise ValueError("--json: only a compiled plan has this form; name a --topology")
    if arguments.topology:
        _choose_platform(arguments.topology)
    from mugrpo_jax.planning import compile_plan, plan_run

    if not arguments.topology:
        print(plan_run(config))
        return
    plan = compile_plan(config, arguments.topology, progress=not arguments.json)
    print(plan.as_json() if arguments.json else plan)


def _choose_platform(topology: str) -> None:
    """Choose JAX's platform for compiling for `topology`; must be called before anything uses a device."""
    import jax

    from mugrpo_jax.planning.chips import GPU_KINDS

    kind, _, count = topology.partition(":")
    if kind == "cpu" and count.isdigit() and "device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", int(count))
    if kind not in GPU_KINDS:  # GPU programs are compiled on a GPU
        jax.config.update("jax_platforms", "cpu")
