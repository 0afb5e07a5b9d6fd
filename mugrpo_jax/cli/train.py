"""`mugrpo train`: run all stages of a config, or resume a run that was stopped."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from mugrpo_jax.cli import arguments as shared

if TYPE_CHECKING:
    from mugrpo_jax.config import RunConfig


def add(commands: shared.Commands) -> None:
    """Add `mugrpo train` and its arguments to the program."""
    parser = shared.add_command(
        commands,
        "train",
        run,
        help="run all stages of a config, or resume a run",
        more="Prints the plan first. If the run is stopped or killed, the same command resumes it.",
        example="mugrpo train quickstart batch.stages=2 --out runs/first",
    )
    shared.add_config(parser)
    shared.add_run_folder(parser)
    shared.add_overwrite(parser)
    shared.add_hosts(parser)
    shared.add_dry_run(parser)
    parser.add_argument(
        "--back-to",
        type=int,
        metavar="UPDATES",
        help="go back to the kept checkpoint after this many updates; later checkpoints are moved away",
    )
    parser.add_argument(
        "--rollouts",
        choices=("generate", "wait"),
        default="generate",
        help="wait: do not sample, but wait for the rollouts of `mugrpo sample` (default: generate)",
    )
    shared.add_wait_limit(parser)


def run(arguments: argparse.Namespace) -> None:
    """Execute `mugrpo train` with the parsed arguments."""
    with shared.join_hosts(arguments):
        plan_and_train(
            shared.load_config(arguments),
            shared.run_folder(arguments),
            dry_run=arguments.dry_run,
            back_to=arguments.back_to,
            overwrite=arguments.overwrite,
            command=shared.without_dry_run(arguments),
            wait_limit_s=arguments.wait_limit if arguments.rollouts == "wait" else None,
        )


def plan_and_train(
    config: "RunConfig",
    folder: Path,
    *,
    dry_run: bool,
    command: str,
    back_to: int | None = None,
    overwrite: bool = False,
    wait_limit_s: float | None = None,
) -> None:
    """Print the plan, check that the run fits into memory, then train; a dry run only prints and checks.

    A dry run ends with `command`, the command that starts the run.
    """
    import jax

    from mugrpo_jax.compiling.compile_cache import use_compile_cache
    from mugrpo_jax.config import to_dict
    from mugrpo_jax.distributed import check_same
    from mugrpo_jax.loop import preflight, stages
    from mugrpo_jax.planning import check_loss, fitting_config, plan_run
    from mugrpo_jax.planning.disk_space import little_disk
    from mugrpo_jax.runs import progress
    from mugrpo_jax.runs.run_folder import differences, keep_choices
    from mugrpo_jax.runs.start_times import process_start

    use_compile_cache(config.compile_cache)
    check_same("config", to_dict(config))  # as it was given, without what the run has chosen before
    config = keep_choices(folder, config)
    plan = plan_run(config)
    if jax.process_index() == 0:
        print(plan, flush=True)
        continues = back_to is None and not differences(folder, config)
        if note := little_disk(folder, plan.disk_bytes, continues=continues):
            progress.say(note)
    unchecked = ""
    if dry_run:
        check_loss(plan)
        if jax.process_index() == 0:
            unchecked = preflight.dry_run(config, folder, overwrite=overwrite)
    on_cpu = jax.default_backend() == "cpu"
    if dry_run and on_cpu and plan.problem is not None:
        # The run may be meant for other devices, so everything else is checked and this is only said.
        unchecked = f"{unchecked and unchecked + ' and '}the memory, which is too small on this machine"
    # A CPU can swap memory to disk, so it is checked only if the plan already reports a problem.
    elif plan.problem is not None or not on_cpu:
        config = fitting_config(config, plan)
    if dry_run:
        rest = f" except {unchecked}" if unchecked else ""
        progress.say(f"checked     everything{rest}; nothing was written\nstart       {command}")
        return
    stages.train(
        config,
        folder,
        back_to=back_to,
        overwrite=overwrite,
        started=process_start(),
        wait_limit_s=wait_limit_s,
    )
