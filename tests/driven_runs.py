"""Start runs of `mugrpo train` that kill themselves at a chosen point, each in a process of its own.

To import JAX and the package takes longer than such a run. One process imports them, and each run is a fork
of it, with its own variables, output and end.
"""

import multiprocessing
import os
import time
from collections.abc import Mapping, Sequence
from multiprocessing import connection, forkserver
from subprocess import CompletedProcess, TimeoutExpired

import kill_driver
import pytest

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([kill_driver.__name__])


class DrivenRun:
    """A run that was started, with the part of the interface of `subprocess.Popen` that tests need."""

    def __init__(self, arguments: Sequence[str], variables: Mapping[str, str]):
        """Start `kill_driver.py ARGUMENTS` with these variables alone."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", os.pathsep.join(kill_driver.FOLDERS))  # of the process that is forked
            forkserver.ensure_running()
        self.arguments = list(arguments)
        pipes = [_CONTEXT.Pipe(duplex=False) for _ in range(2)]
        self._streams = [reader for reader, _ in pipes]
        writers = [writer for _, writer in pipes]
        self._process = _CONTEXT.Process(
            target=kill_driver.drive_fork, args=(self.arguments, dict(variables), *writers)
        )
        self._process.start()
        for writer in writers:
            writer.close()

    @property
    def returncode(self) -> int | None:
        """The exit status, minus the number of the signal that ended it, or None: it still runs."""
        return self._process.exitcode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for the end; return what it printed and what it said on its error stream."""
        end = time.monotonic() + timeout
        texts = dict.fromkeys(self._streams, b"")
        opened = list(self._streams)
        while opened:
            ready = connection.wait(opened, max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutExpired(self.arguments, timeout)
            for stream in ready:
                if data := os.read(stream.fileno(), 1 << 16):
                    texts[stream] += data
                else:
                    opened.remove(stream)
        self._process.join(max(0.0, end - time.monotonic()))
        if self.returncode is None:
            raise TimeoutExpired(self.arguments, timeout)
        shown, said = (texts[stream].decode() for stream in self._streams)
        for stream in self._streams:
            stream.close()
        return shown, said

    def kill(self) -> None:
        """End it at once, if it still runs."""
        self._process.kill()


def run(arguments: Sequence[str], variables: Mapping[str, str], timeout: float) -> CompletedProcess:
    """Run to the end."""
    running = DrivenRun(arguments, variables)
    try:
        shown, said = running.communicate(timeout)
    finally:
        running.kill()
    return CompletedProcess(running.arguments, running.returncode, shown, said)
