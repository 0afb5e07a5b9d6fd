"""Stop a run on SIGTERM, SIGHUP or Ctrl-C, on all its hosts at the same point."""

import contextlib
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

import jax

from mugrpo_jax import distributed
from mugrpo_jax.distributed import Stopped as Stopped

_STOPPING = "\nstopping: finishing what is under way and saving; the same command continues"


class StopRequest:
    """Handles SIGTERM, SIGHUP and Ctrl-C in a `with` block: `requested` becomes True, and the loops stop.

    SIGHUP comes when a terminal or a connection is closed; `nohup` makes the run ignore it. A second Ctrl-C
    raises `KeyboardInterrupt` at once.
    """

    def __init__(self) -> None:
        self.requested = False
        self._agreed = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                    continue  # `nohup`
                self._before[number] = signal.signal(number, self._handle)
        distributed.share(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def agreed(self) -> bool:
        """True if the loops must stop now; with several hosts, only after all hosts agreed."""
        return self._agreed or (self.requested and jax.process_count() == 1)

    def agree(self, answer: bool) -> None:
        """Record the hosts' common answer; after one True, later answers change nothing."""
        self._agreed |= answer

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True
        with contextlib.suppress(OSError):  # the terminal may be gone
            print(_STOPPING, flush=True)
