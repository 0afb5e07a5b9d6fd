"""Arguments that several commands share: config, run folder, hosts, sampling and checkpoint."""

import argparse
import math
import shlex
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
    """Add a command to the program and return the argument parser of the command.

    Args:
      run: executes the command; the program calls it with the parsed arguments.
      help: one line without a full stop, for the list of commands and the beginning of the command's help.
      more: further sentences for the command's help.
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


def at_least(smallest: int) -> Callable[[str], int]:
    """Return a function that reads a whole number from the command line and refuses smaller ones."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = None
        if number is None or not smallest <= number < 2**63:
            most = " and below 2^63" if number is not None and number >= smallest else ""
            raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, at least {smallest}{most}")
        return number

    return read


def number(text: str) -> float:
    """Read a finite number from the command line."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a finite number")
    return value


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add the name of a config, and `key=value` arguments that override keys of the config."""
    parser.add_argument("config", help="a YAML file, or the name of a shipped config such as quickstart")
    add_overrides(parser)


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Add `key=value` arguments that override keys of a config."""
    # Without a default, argparse would call them required in its errors.
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="such as batch.stages=2"
    )


def path(text: str) -> Path:
    """Convert an argument to the path of a local file or folder, or of one in a bucket (`gs://`)."""
    from mugrpo_jax.files import to_path

    if not text.strip():
        raise argparse.ArgumentTypeError("the path is empty")
    try:
        return to_path(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def local_path(text: str) -> Path:
    """Convert an argument to the path of a local file or folder."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the path is empty")
    if "://" in text:
        raise argparse.ArgumentTypeError(f"{text}: must be on a local disk; only a run can be in a bucket")
    return Path(text)


def add_run_folder(parser: argparse.ArgumentParser) -> None:
    """Add `--out`, the folder of the run to start or resume."""
    parser.add_argument(
        "--out",
        type=path,
        help="the run's folder, local or gs://BUCKET/FOLDER (default: runs/NAME_OF_THE_CONFIG)",
    )


def add_overwrite(parser: argparse.ArgumentParser) -> None:
    """Add `--overwrite`, which moves a run with another config aside."""
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="if the folder holds a run with another config or other data, move that run to FOLDER.old-1 and "
        "start anew; a run with the same config and data is continued as always",
    )


def add_dry_run(parser: argparse.ArgumentParser) -> None:
    """Add `--dry-run`, which prints the plan and starts nothing."""
    parser.add_argument("--dry-run", action="store_true", help="print the plan, check everything, then stop")


def without_dry_run(arguments: argparse.Namespace) -> str:
    """Return the user's command without `--dry-run`, which may be abbreviated."""
    words = [word for word in arguments.words if not (len(word) > 2 and "--dry-run".startswith(word))]
    return shlex.join(["mugrpo", *words])


def add_source_run(parser: argparse.ArgumentParser) -> None:
    """Add the folder of an existing run as a positional argument."""
    parser.add_argument("source", type=path, metavar="RUN", help="the folder of the run")


def add_hosts(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that connect several hosts to one run."""
    hosts = parser.add_argument_group(
        "several hosts",
        "Start the same command on every host. SLURM, Open MPI 4, TPU VMs and GKE with TPUs need no flags.",
    )
    hosts.add_argument("--coordinator", metavar="HOST:PORT", help="address of process 0 and a free port")
    hosts.add_argument("--processes", type=int, metavar="N", help="number of processes")
    hosts.add_argument("--process", type=int, metavar="I", help="index of this process, from 0")
    hosts.add_argument(
        "--host-timeout",
        type=float,
        default=100.0,
        metavar="SECONDS",
        help="longest wait for the other hosts to start, and later for a heartbeat of each (default: 100)",
    )


def add_wait_limit(parser: argparse.ArgumentParser) -> None:
    """Add `--wait-limit`, how long a trainer and its samplers wait for each other."""
    parser.add_argument(
        "--wait-limit",
        type=at_least(1),
        default=600,
        metavar="SECONDS",
        help="longest wait for a sign of life of the other side, trainer or sampler (default: 600)",
    )


def add_sampling(parser: argparse.ArgumentParser, *, of_run: bool = False) -> None:
    """Add the arguments that set how responses are sampled; with `of_run`, a run has its own for all."""
    first = "as in the run, or " if of_run else ""
    parser.add_argument(
        "--max-tokens", type=at_least(1), help="longest response (default: as in the run, or 512)"
    )
    parser.add_argument(
        "--temperature",
        type=number,
        help=f"0 is greedy decoding (default: {first}1, the model's own distribution)",
    )
    parser.add_argument("--top-p", type=number, help=f"nucleus sampling (default: {first}1, all tokens)")
    parser.add_argument("--seed", type=at_least(0), default=0, help="determines every response (default: 0)")
    parser.add_argument(
        "--slots", type=at_least(1), help="sequences decoded at once (default: as many as fit)"
    )
    parser.add_argument(
        "--dtype", help="bfloat16, float32, int8 or fp8 (default: float32 on CPU, bfloat16 elsewhere)"
    )


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Add `--step` and `--best`, which choose one of a run's checkpoints."""
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument(
        "--step", type=at_least(0), help="checkpoint after this many updates (default: newest)"
    )
    choice.add_argument("--best", action="store_true", help="checkpoint with the best held-out accuracy")


def load_config(arguments: argparse.Namespace) -> "RunConfig":
    """Load the config that the user named, and apply the overrides."""
    from mugrpo_jax import config as configs

    return configs.load(arguments.config, arguments.overrides)


def run_folder(arguments: argparse.Namespace) -> Path:
    """Return `--out`, or `runs/NAME_OF_THE_CONFIG` if the user did not give it."""
    name = Path(arguments.config).name  # a shipped name such as qwen3_1.7b may have a dot but no suffix
    return arguments.out or Path("runs") / name.removesuffix(".yaml").removesuffix(".yml")


def join_hosts(arguments: argparse.Namespace) -> AbstractContextManager[None]:
    """Connect to the other hosts; arguments that the user left out come from environment variables."""
    from mugrpo_jax import distributed

    return distributed.hosts(
        arguments.coordinator, arguments.processes, arguments.process, timeout_s=arguments.host_timeout
    )
