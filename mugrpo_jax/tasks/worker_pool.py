"""Worker processes that call a user's function with a deadline: a reward or an environment.

At the deadline of a call, its worker is killed and a new worker starts. If a worker crashes, only its own
call fails. Each worker has its own process group, so that the processes which the function starts are killed
with the worker. This process has one thread per worker, which waits for replies. Workers are new Python
interpreters and not forks, because this process may use an accelerator.
"""

import json
import math
import os
import queue
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from mugrpo_jax.tasks.worker_keeper import WorkerKeeper, kill_group

_STARTUP_S = 120.0
Result = TypeVar("Result")


class WorkerPool:
    """Some worker processes for the function that `hello` names, see `scoring_worker`."""

    def __init__(self, hello: Mapping[str, Any], *, workers: int, deadline_s: float, memory_mb: int) -> None:
        for name, value in (("workers", workers), ("deadline_s", deadline_s), ("memory_mb", memory_mb)):
            if not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}; possible: a number above 0")
        whole = {**hello, "path": sys.path, "deadline_s": deadline_s, "memory_mb": memory_mb}
        self._idle: queue.SimpleQueue[WorkerProcess] = queue.SimpleQueue()
        self._keeper = WorkerKeeper()
        self.workers = [WorkerProcess(whole, self._keeper) for _ in range(workers)]
        for worker in self.workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="workers")

    def submit(self, item: Mapping[str, Any], read: Callable[[dict[str, Any]], Result]) -> "Future[Result]":
        """Queue a call; the result of the future is `read` of the worker's reply."""
        return self._threads.submit(self._call, item, read)

    def close(self) -> None:
        """Remove all calls from the queue and end the workers."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self.workers:
            worker.stop()
        self._threads.shutdown(wait=True)
        for worker in self.workers:
            worker.release()
        self._keeper.close()

    def _call(self, item: Mapping[str, Any], read: Callable[[dict[str, Any]], Result]) -> Result:
        worker = self._idle.get()
        try:
            return read(worker.call(item))
        finally:
            self._idle.put(worker)


class WorkerProcess:
    """One worker process, which is started again if it dies. Calls and replies are lines of JSON."""

    def __init__(self, hello: dict[str, Any], keeper: WorkerKeeper):
        self._hello, self._keeper = hello, keeper
        self._deadline_s = float(hello["deadline_s"])
        self._stopped = False
        self._changing = threading.Lock()  # because another thread may close the pool during a restart
        self._start()

    def _start(self) -> None:
        with self._changing:
            if self._stopped:
                return
            command = [sys.executable, str(Path(__file__).with_name("scoring_worker.py"))]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, bufsize=0, process_group=0)
            self._keeper.add(self._process.pid)
            self._ready = False
        self._send(self._hello)

    def call(self, item: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reply to a call; without one, only its status and detail: `timeout` or `crash`."""
        if self._process.poll() is not None:  # the worker died while idle, so no call has failed
            self._restart()
        if not self._ready:
            self._wait_until_ready()
        self._send(item)
        try:
            reply = self._receive(self._deadline_s)
        except TimeoutError:
            self._restart()
            return {"status": "timeout", "detail": f"{self._what} within {self._deadline_s:g} s"}
        if reply is None:
            code = self._process.wait()
            self._restart()
            return {"status": "crash", "detail": f"the worker died with code {code}"}
        return reply

    @property
    def _what(self) -> str:
        return "no verdict" if self._hello["kind"] == "reward" else "no reply"

    def stop(self) -> None:
        """Kill the process for good."""
        with self._changing:
            self._stopped = True
            kill_group(self._process.pid)

    def release(self) -> None:
        """Wait for the end of the process and close its pipes."""
        self._process.wait()
        self._keeper.remove(self._process.pid)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _restart(self) -> None:
        kill_group(self._process.pid)
        self.release()
        self._start()

    def _wait_until_ready(self) -> None:
        """Wait for the first reply of the process, and raise an error if it says why it cannot start."""
        try:
            reply = self._receive(_STARTUP_S)
            why = "it died" if reply is None else reply.get("failed")
        except TimeoutError:
            why = f"no reply within {_STARTUP_S:g} s"
        self._ready = why is None
        if not self._ready and not self._stopped:
            kill_group(self._process.pid)
            kind = "a scoring" if self._hello["kind"] == "reward" else "a worker"
            raise ValueError(
                f"{kind} process for {self._hello['kind']} {self._hello['name']!r} did not start: {why} (its "
                f"limit is task.scorer_memory_mb={self._hello['memory_mb']})"
            )

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        view = memoryview(json.dumps(message).encode() + b"\n")
        try:
            while view:
                view = view[self._process.stdin.write(view) :]
        except BrokenPipeError:
            pass  # the worker died, and `_receive` returns None for a dead worker

    def _receive(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the next reply, or None if the worker died. After `timeout_s`, raise TimeoutError."""
        pipe = self._process.stdout
        assert pipe is not None
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        end = time.monotonic() + timeout_s
        line = b""
        while not line.endswith(b"\n"):
            if not poll.poll(max(0.0, end - time.monotonic()) * 1000):
                raise TimeoutError
            part = os.read(pipe.fileno(), 65536)
            if not part:
                return None
            line += part
        return json.loads(line)
