"""The `mugrpo` program: parse the command line, execute one command, and print user errors as one line.

The modules of the commands import heavy packages only inside `run`, so that `mugrpo --help` is fast.
"""

import argparse
import dataclasses
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from types import TracebackType
from typing import NoReturn

from mugrpo_jax import __version__
from mugrpo_jax.cli import (
    config,
    export,
    generate,
    init,
    plan,
    replay,
    report,
    rollouts,
    rollouts_export,
    rollouts_import,
    sample,
    sft,
    train,
)
from mugrpo_jax.cli import eval as evaluate
from mugrpo_jax.cli.interrupts import INTERRUPTED, LINE, ending_at_once, none_lost
from mugrpo_jax.cli.streams import drop, usable_output
from mugrpo_jax.training_packages import check_installed

SHOWING = ("config", "rollouts", "plan")  # commands that only show something
STOPPED = 3  # exit status of a command that was asked to stop before its end, on every host
_LOOP_CLOSED = "Event loop is closed"  # of the loop in which a checkpoint was written
COMMANDS = (
    *(
        init,
        config,
        train,
        sample,
        sft,
        generate,
        evaluate,
        rollouts,
        rollouts_export,
        rollouts_import,
        replay,
    ),
    *(export, report, plan),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Execute one command and return its exit status.

    The status is 0 if the command did all its work, `STOPPED` if it was asked to stop before, 2 after an
    error that the user can fix, and `distributed.GONE` if another process of the run is missing. Errors are
    printed.
    """
    with usable_output(lasting=False):
        arguments = parse(argv)
    with usable_output(lasting=arguments.command not in SHOWING):
        return _execute(arguments)


def _execute(arguments: argparse.Namespace) -> int:
    try:
        check_installed(f"mugrpo {arguments.command}")
    except ModuleNotFoundError as error:
        print(error, file=sys.stderr)
        return 2
    _silence_background_threads()
    with ending_at_once():
        from mugrpo_jax.distributed import GONE, Absent, Stopped
        from mugrpo_jax.distributed.platforms import missing_platform, without_missing_tpu
    without_missing_tpu()
    try:
        with none_lost():
            arguments.run(arguments)
        sys.stdout.flush()
    except Stopped as stopped:
        print(f"mugrpo: stopped before the end, {stopped}; the same command continues", file=sys.stderr)
        return STOPPED
    except KeyboardInterrupt:
        print(LINE, file=sys.stderr)
        return INTERRUPTED
    except (RuntimeError, AssertionError):
        if not (missing := missing_platform()):
            raise
        return _refused(missing)
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError) and arguments.command in SHOWING:
            drop(sys.stdout)  # `mugrpo rollouts ... | head`: the other program has seen enough
            return 0
        return _refused(str(error), GONE if isinstance(error, Absent) else 2)
    return 0


def _refused(why: str, status: int = 2) -> int:
    """Print an error in one line, and where it was raised if this was asked for; return the exit status."""
    if os.environ.get("MUGRPO_TRACEBACK"):
        traceback.print_exc()
    print(f"mugrpo: {' '.join(why.split())}", file=sys.stderr)
    return status


def program() -> NoReturn:
    """Execute one command and end the process; this is what the shell calls.

    After an error, the process ends at once, because threads of a failed save would keep it for minutes.
    """
    status = main()
    if status not in (0, STOPPED):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def _silence_background_threads() -> None:
    """Print nothing about checkpoints except the one line of the error that `main` prints.

    Orbax logs a lot about every checkpoint, and TensorStore prints a stack trace for each array not written;
    which hook it calls depends on its version.
    """
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    sys.excepthook, sys.unraisablehook = _print_error, _print_unraisable


def _print_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if str(error) != _LOOP_CLOSED:
        sys.__excepthook__(kind, error, trace)


def _print_unraisable(lost: "sys.UnraisableHookArgs") -> None:
    if str(lost.exc_value) != _LOOP_CLOSED:
        sys.__unraisablehook__(lost)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; `key=value` overrides may stand anywhere after the command's name."""
    program = parser()
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] == ["rollouts"] and words[1:2] in (["export"], ["import"]):  # one command of two words
        words = [" ".join(words[:2]), *words[2:]]
    arguments, rest = program.parse_known_args(words, argparse.Namespace(words=words))
    # argparse accepts positional arguments only in one block; it returns the other overrides in `rest`.
    if rest and hasattr(arguments, "overrides") and not any(text.startswith("-") for text in rest):
        arguments.overrides = [*arguments.overrides, *rest]
    elif rest:
        keys = [_as_key(text) for text in rest if hasattr(arguments, "overrides") and _as_key(text)]
        hint = f"; a key of the config has no dashes: {keys[0]}" if keys else ""
        program.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
    return arguments


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole program, with all commands."""
    program = argparse.ArgumentParser(
        prog="mugrpo",
        description="µ-GRPO for JAX: reinforcement learning for language models on very stale rollouts.",
        epilog="mugrpo COMMAND --help explains a command and gives an example.",
    )
    program.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = program.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for command in COMMANDS:
        command.add(commands)
    return program


def _as_key(text: str) -> str:
    """Return `--text` as it sets a key of the config; "" if there is no such key."""
    from mugrpo_jax.config import RunConfig

    name, equals, value = text.lstrip("-").partition("=")
    section, dot, _ = name.partition(".")
    known = {field.name for field in dataclasses.fields(RunConfig)}
    if not text.startswith("--") or section not in known or not (dot or equals):
        return ""
    return f"{name}={value if equals else 'VALUE'}"
