"""Compile programs in background threads before they are needed."""

import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any

import jax

WAIT_EVENT = "/mugrpo/compile_wait"  # reported to `jax.monitoring`: a thread waited for a background thread
_THREAD = "compile ahead"

Lower = Callable[[], Any]  # returns a lowered program, see `jax.stages.Lowered`
Call = Callable[..., Any]


class CompiledPrograms:
    """Compiled programs by name. `ahead` compiles a program in the background, and `get` returns it.

    A program that is compiled ahead is the same program that would be compiled later, so results do not
    change. If something goes wrong in the background, `report` gets one line of text and the program is
    compiled when it is needed.
    """

    def __init__(self, report: Callable[[str], None] | None = None) -> None:
        self._report = report or (lambda text: None)
        self._found: dict[Hashable, Call] = {}
        self._ahead: dict[Hashable, Future[Any]] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._settings: dict[str, Any] = {}

    def start(self, threads: int) -> None:
        """Start the background threads.

        Several hosts must pass the same programs to `ahead` in the same order. Then a compiler that shares
        its work with the other hosts never waits for a program that another host compiles only later.
        """
        if self._pool is not None:
            return
        self._settings = _settings()
        self._pool = ThreadPoolExecutor(threads, _THREAD)

    def close(self) -> None:
        """Drop the programs that are not compiled yet, and stop the background threads."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

    def ahead(self, name: Hashable, lower: Lower) -> "Future[Any]":
        """Compile a program in the background, where `lower` is called too; return the future program.

        The `lower` of a later program may wait for this future. The second call for a name does nothing.
        """
        assert self._pool is not None, "call `start` first"
        if name not in self._ahead:
            self._ahead[name] = self._pool.submit(self._compile, lower)
        return self._ahead[name]

    def get(self, name: Hashable, otherwise: Callable[[], Call]) -> Call:
        """Return the program with this name. If there is none yet, `otherwise` makes it.

        A program that is being compiled is waited for. One that has not been started is not.
        """
        if name not in self._found:
            compiled = self._finished(name)
            self._found[name] = otherwise() if compiled is None else self._checked(name, compiled, otherwise)
        return self._found[name]

    def _compile(self, lower: Lower) -> Any:
        # A setting of the caller's thread alone, such as a matmul precision, is unknown in this thread.
        if _settings() != self._settings:
            raise CancelledError
        return lower().compile()

    def _finished(self, name: Hashable) -> Any | None:
        future = self._ahead.get(name)
        if future is None or future.cancel():
            return None
        started = time.monotonic()
        try:
            compiled = future.result()
        except CancelledError:
            return None
        except Exception as error:  # the run can go on: the program is compiled when it is needed
            self._failed(name, error)
            return None
        waited = time.monotonic() - started
        jax.monitoring.record_event_duration_secs(WAIT_EVENT, waited)
        return compiled

    def _checked(self, name: Hashable, compiled: Call, otherwise: Callable[[], Call]) -> Call:
        """Return a function that calls a program once to see if it takes the arguments, then stays with it.

        JAX checks shapes and shardings before it runs a program, so that nothing is lost then.
        """

        def call(*arguments: Any) -> Any:
            try:
                result = compiled(*arguments)
            except (TypeError, ValueError) as error:
                self._failed(name, error)
                self._found[name] = otherwise()
                return self._found[name](*arguments)
            self._found[name] = compiled
            return result

        return call

    def _failed(self, name: Hashable, error: Exception) -> None:
        reason = " ".join(str(error).split())[:200]
        self._report(f"{_text(name)} could not be compiled ahead and is compiled now: {reason}")


def in_background() -> bool:
    """Return whether this thread compiles programs ahead."""
    return threading.current_thread().name.startswith(_THREAD)


def _text(name: Hashable) -> str:
    return str(name[0]) if isinstance(name, tuple) else str(name)


def _settings() -> dict[str, Any]:
    """Return all settings of JAX in this thread."""
    return dict(getattr(jax.config, "values", {}))
