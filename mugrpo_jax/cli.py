"""The command line: `mugrpo train | sft | ...`, thin shells around functions of the package."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mugrpo_jax import config as configs


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; errors a user can mend are one line and exit code 2."""
    arguments = _parser().parse_args(argv)
    from mugrpo_jax.run import Stopped

    try:
        return arguments.run(arguments) or 0
    except Stopped:
        return 0
    except (ValueError, OSError) as error:
        print(f"mugrpo: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mugrpo",
        description="µ-GRPO for JAX: reinforcement learning for language models on very stale rollouts.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    train = commands.add_parser("train", help="run, or continue, all stages of a config")
    _config_arguments(train)
    train.set_defaults(run=_train)
    sft = commands.add_parser("sft", help="only the supervised warm start of a config")
    _config_arguments(sft)
    sft.set_defaults(run=_sft)
    return parser


def _config_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="a YAML file, such as configs/quickstart.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as batch.stages=2")
    parser.add_argument("--out", type=Path, help="the run's folder (default: runs/NAME_OF_THE_CONFIG)")


def _folder(arguments: argparse.Namespace) -> Path:
    return arguments.out or Path("runs") / Path(arguments.config).stem


def _train(arguments: argparse.Namespace) -> None:
    from mugrpo_jax import stages

    stages.train(configs.load(arguments.config, arguments.overrides), _folder(arguments))


def _sft(arguments: argparse.Namespace) -> None:
    from mugrpo_jax import stages

    stages.warm_start(configs.load(arguments.config, arguments.overrides), _folder(arguments))


if __name__ == "__main__":
    sys.exit(main())
