"""Arguments that several commands share: config, run folder, hosts, sampling, choice of a checkpoint."""

import argparse
import os
import textwrap
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from mugrpo_jax.config import RunConfig

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_command(
    commands: Commands,
    name: str,
    run: Callable[[argparse.Namespace], None],
    *,
    help: str,
    more: str,
    example: str,
) -> argparse.ArgumentParser:
    """Add the parser of one command.

    Args:
      commands: the subparsers of the program.
      name: what the user types.
      run: called with the parsed arguments.
      help: one line without a full stop, for the list of commands.
      more: further sentences, for the help of this command.
      example: a command line that works.
    """
    parser = commands.add_parser(
        name,
        help=help,
        description=textwrap.fill(f"{help[0].upper()}{help[1:]}. {more}", 80),
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add the config file and its overrides."""
    parser.add_argument("config", help="a YAML file, such as configs/quickstart.yaml")
    add_overrides(parser)


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Add `key=value` arguments."""
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as batch.stages=2")


def add_run_folder(parser: argparse.ArgumentParser) -> None:
    """Add `--out` with a default made from the name of the config."""
    parser.add_argument("--out", type=Path, help="the run's folder (default: runs/NAME_OF_THE_CONFIG)")


def add_dry_run(parser: argparse.ArgumentParser) -> None:
    """Add `--dry-run`."""
    parser.add_argument("--dry-run", action="store_true", help="print the plan, look at the data and stop")


def add_source_run(parser: argparse.ArgumentParser) -> None:
    """Add the folder of an existing run."""
    parser.add_argument("source", type=Path, metavar="RUN", help="the folder of the run")


def add_hosts(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a run on several hosts."""
    hosts = parser.add_argument_group(
        "several hosts", "the same command on each; SLURM, Open MPI and TPU slices need none of these"
    )
    hosts.add_argument("--coordinator", metavar="HOST:PORT", help="address of process 0, port of your choice")
    hosts.add_argument("--processes", type=int, metavar="N", help="number of processes")
    hosts.add_argument("--process", type=int, metavar="I", help="number of this process, from 0")
    hosts.add_argument(
        "--host-timeout",
        type=float,
        default=100.0,
        metavar="SECONDS",
        help="how long to wait for the others, and for their next sign of life (default: 100)",
    )


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Add the settings of the sampler."""
    parser.add_argument("--max-tokens", type=int, default=512, help="longest response (default: 512)")
    parser.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        help="0 is greedy (default: 1, the model's own distribution)",
    )
    parser.add_argument("--top-p", type=float, default=1.0, help="nucleus truncation; 1 keeps all")
    parser.add_argument("--seed", type=int, default=0, help="fixes every response (default: 0)")
    parser.add_argument("--slots", type=int, help="sequences decoded at once (default: as many as fit)")
    parser.add_argument("--dtype", help="bfloat16 or float32 (default: float32 on CPU, bfloat16 elsewhere)")


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Add the choice of a run's checkpoint."""
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument(
        "--step", type=int, help="the run's checkpoint after so many updates (default: newest)"
    )
    choice.add_argument(
        "--best", action="store_true", help="the run's checkpoint with the best held-out accuracy"
    )


def load_config(arguments: argparse.Namespace) -> "RunConfig":
    """The config of `add_config`, with its overrides."""
    from mugrpo_jax import config as configs

    return configs.load(arguments.config, arguments.overrides)


def run_folder(arguments: argparse.Namespace) -> Path:
    """The folder of `add_run_folder`."""
    return arguments.out or Path("runs") / Path(arguments.config).stem


def join_hosts(arguments: argparse.Namespace) -> AbstractContextManager[None]:
    """Join the hosts that `add_hosts`, or the environment variables of JAX, name."""
    from mugrpo_jax import distributed

    return distributed.hosts(
        arguments.coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS"),
        _integer("JAX_NUM_PROCESSES") if arguments.processes is None else arguments.processes,
        _integer("JAX_PROCESS_ID") if arguments.process is None else arguments.process,
        timeout_s=arguments.host_timeout,
    )


def _integer(variable: str) -> int | None:
    text = os.environ.get(variable)
    if text is not None and not text.isdigit():
        raise ValueError(f"environment variable {variable}: expected a number, got {text!r}")
    return None if text is None else int(text)
