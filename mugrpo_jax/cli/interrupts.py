"""Ctrl-C at any moment of a command must end it, with one line: it must not crash, and not get lost."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130  # exit status after Ctrl-C, as the shell has it
LINE = "mugrpo: interrupted; the same command continues"
_AGAIN_S = 0.02


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """Let Ctrl-C end the process in this block, in which nothing is written.

    For the import of packages such as jax: a `KeyboardInterrupt` while their compiled modules load becomes an
    `ImportError` or ends the process with a segmentation fault.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler or not _in_main_thread():
        yield  # such as `nohup mugrpo ... &`: Ctrl-C is ignored there
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def none_lost() -> Iterator[None]:
    """Repeat a Ctrl-C in this block if Python could not raise its `KeyboardInterrupt`.

    This happens if Ctrl-C comes during a collection of garbage, for which jax has a callback.
    """
    before = sys.unraisablehook

    def repeat(lost: "sys.UnraisableHookArgs") -> None:
        if issubclass(lost.exc_type, KeyboardInterrupt):
            # From another thread and a moment later: here it would be lost again.
            main = threading.main_thread().ident
            threading.Timer(_AGAIN_S, signal.pthread_kill, (main, signal.SIGINT)).start()
        else:
            before(lost)

    sys.unraisablehook = repeat
    try:
        yield
    finally:
        sys.unraisablehook = before


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _end(number: int, frame: FrameType | None) -> NoReturn:
    with contextlib.suppress(OSError):  # a closed stderr
        os.write(2, f"{LINE}\n".encode())
    os._exit(INTERRUPTED)
