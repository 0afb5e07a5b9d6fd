"""Kill the process groups of workers when their parent ends, even if the parent is killed.

A worker notices the end of its parent, because its standard input ends. Processes that a reward has started
do not. So a small process, the keeper, reads the ids of all groups from a pipe. The pipe ends when the parent
ends in any way, and the keeper then kills the groups that are left.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading


class WorkerKeeper:
    """Starts the keeper process. `add` and `remove` tell it which process groups belong to workers."""

    def __init__(self) -> None:
        command = [sys.executable, "-I", "-S", __file__]
        # Its own session, so that a signal to the group of this process does not reach the keeper.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0, start_new_session=True)
        self._writing = threading.Lock()

    def add(self, group: int) -> None:
        """Add a process group to those that end with this process."""
        self._tell(f"+{group}\n")

    def remove(self, group: int) -> None:
        """Remove a process group that has ended."""
        self._tell(f"-{group}\n")

    def close(self) -> None:
        """End the keeper; it kills the groups that were not removed."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        # Without a keeper, workers still end when their standard input ends.
        with self._writing, contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line.encode())


def kill_group(group: int) -> None:
    """Kill all processes of a group; do nothing if there are none."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def main() -> None:
    """Read lines such as `+123` and `-123` until standard input ends, then kill the groups that are left."""
    groups: set[int] = set()
    for line in sys.stdin.buffer:
        group = int(line[1:])
        groups.add(group) if line.startswith(b"+") else groups.discard(group)
    for group in groups:
        kill_group(group)


if __name__ == "__main__":
    main()
