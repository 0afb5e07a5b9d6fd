"""A thread on every host that watches the other hosts: if one host stops or fails, all hosts do."""

import contextlib
import itertools
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import jax

from mugrpo_jax.distributed.host_agreement import BARRIER_MS
from mugrpo_jax.distributed.jax_internals import coordination_client

GONE = 75  # exit status of a host that ends because another host is gone; EX_TEMPFAIL: try again

_ROUND_S = 1.0  # time between two rounds of the watchers
_NEWS = "mugrpo/news"
_at_end: list[Callable[[], None]] = []


def share(stop: Any) -> None:
    """Share a stop request: if `stop.requested` is True on one host, all hosts set it within seconds."""
    if Watcher.current is not None:
        Watcher.current.stop = stop


def at_end(action: Callable[[], None]) -> None:
    """Call `action` before `end_process` ends this process, which skips all other cleaning up."""
    _at_end.append(action)


def end_process(status: int, message: str) -> NoReturn:
    """Print a message and end this process at once, without waiting for other threads or hosts."""
    for action in _at_end:
        with contextlib.suppress(Exception):
            action()
    print(f"mugrpo: {message}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(status)


class Watcher:
    """The thread that watches the other hosts.

    If one host is asked to stop, the watchers ask all hosts to stop. If one host fails or sends no heartbeat,
    the watchers end all processes, because a host that waits in a device program cannot be interrupted.
    """

    current: "Watcher | None" = None

    def __init__(self) -> None:
        self.stop: Any = None
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()
        Watcher.current = self

    def leave(self) -> None:
        """Wait until all hosts have ended and the thread is done; a running thread disturbs Python's exit."""
        self.ended.set()
        self.thread.join()

    def fail(self, message: str) -> NoReturn:
        """Tell the other hosts why this host ends, and end it."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._client.key_value_set(f"{_NEWS}/failed", f"process {jax.process_index()}: {message}")
            if jax.process_index() == 0:
                time.sleep(3 * _ROUND_S)  # process 0 holds the keys and values: let the others read them
        end_process(2, message)

    @property
    def _client(self) -> Any:
        client = coordination_client()
        assert client is not None
        return client

    def _watch(self) -> None:
        try:
            for number in itertools.count():
                if self._exchange(number):
                    return
                if failure := self._wait_for_failure():
                    end_process(2, failure)
        except jax.errors.JaxRuntimeError as error:
            silent = re.search(r"Task (\d+) heartbeat timeout", str(error))
            who = f"process {silent[1]} gives no sign of life" if silent else "process 0 is not reached"
            end_process(GONE, f"another host is gone, {who}; the same command on all hosts continues")

    def _exchange(self, number: int) -> bool:
        """Run one round: wait for all hosts, pass on a stop request, and return whether all hosts have ended.

        The barrier raises an error if a host is gone. A host announces its end before the barrier, so all
        hosts see the end in the same round.
        """
        ending = f"{_NEWS}/ended/{number}"
        if self.ended.is_set():
            self._client.key_value_set(f"{ending}/{jax.process_index()}", "")
        self._client.wait_at_barrier(f"mugrpo/round-{number}", BARRIER_MS)
        if self.stop is not None:
            if self.stop.requested:
                self._client.key_value_set(f"{_NEWS}/stop/yes", "", allow_overwrite=True)
            self.stop.requested |= bool(self._client.key_value_dir_get(f"{_NEWS}/stop/"))
        return len(self._client.key_value_dir_get(f"{ending}/")) == jax.process_count()

    def _wait_for_failure(self) -> str | None:
        """Wait up to `_ROUND_S` seconds for the error message of a failing host; return None if none comes.

        The wait must block: if process 0 dies, JAX soon ends this process; polling could miss the message.
        """
        try:
            return self._client.blocking_key_value_get(f"{_NEWS}/failed", int(1000 * _ROUND_S))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            return None
