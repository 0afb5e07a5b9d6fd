"""Score responses in worker processes with a deadline."""

import json
import math
import os
import queue
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mugrpo_jax.tasks.processors import usable_processors
from mugrpo_jax.tasks.rewards import CODE_REWARDS, FAST_REWARDS, load_reward
from mugrpo_jax.tasks.sandbox import check_sandbox
from mugrpo_jax.tasks.scoring import InlineScorer, Score, Scorer, finished_future
from mugrpo_jax.tasks.task import Problem
from mugrpo_jax.tasks.weighted_scorer import WeightedScorer
from mugrpo_jax.tasks.worker_keeper import WorkerKeeper, kill_group

INLINE_REWARDS = ("exact", "arithmetic", "countdown")

_STARTUP_S = 120.0


def make_scorer(
    reward: str | Mapping[str, float],
    *,
    workers: int | None = None,
    deadline_s: float = 5.0,
    memory_mb: int = 2048,
    failed: float = 0.0,
    max_failed: float = 1.0,
    unsafe_sandbox: bool = False,
) -> Scorer:
    """Make a scorer for a reward, or for the weighted sum of several.

    Args:
      reward: a name for `load_reward`, or several names with their weights.
      workers: number of worker processes. 0 means to score in this process, without a deadline. None means 0
        for the rewards in `INLINE_REWARDS`, which are fast, and one worker per processor that this process
        may use for all other rewards. Each of several rewards has so many workers of its own.
      deadline_s: most seconds that a worker may take for one response.
      memory_mb: most megabytes of address space of a worker (only enforced on Linux).
      failed: score of a response whose reward failed.
      max_failed: share of responses whose reward may fail, see `Scorer`; 1 means no limit.
      unsafe_sandbox: whether the rewards in `CODE_REWARDS` may run programs without isolation.
    """
    if not isinstance(reward, str):
        limits: dict[str, Any] = {"workers": workers, "deadline_s": deadline_s, "memory_mb": memory_mb}
        limits["unsafe_sandbox"] = unsafe_sandbox
        with ExitStack() as opened:  # closes the others if one cannot be made
            scorers = {
                name: opened.enter_context(make_scorer(name, failed=failed, **limits)) for name in reward
            }
            opened.pop_all()
        return WeightedScorer(scorers, reward, failed=failed, max_failed=max_failed)
    if reward in CODE_REWARDS:
        check_sandbox(unsafe=unsafe_sandbox)
    if workers is None:
        workers = 0 if reward in INLINE_REWARDS else usable_processors()
    if workers == 0:
        return InlineScorer(reward, failed=failed, max_failed=max_failed, unsafe_sandbox=unsafe_sandbox)
    return ScoringPool(
        reward,
        workers=workers,
        deadline_s=deadline_s,
        memory_mb=memory_mb,
        failed=failed,
        max_failed=max_failed,
        unsafe_sandbox=unsafe_sandbox,
    )


class ScoringPool(Scorer):
    """Scores responses in worker processes.

    At the deadline of a response, its worker is killed and a new worker starts. If a worker crashes, only the
    response that it was scoring fails. Each worker has its own process group, so that the processes which a
    reward starts are killed with the worker. This process has one thread per worker, which waits for replies.
    Workers are new Python interpreters and not forks, because this process may use an accelerator.
    """

    def __init__(
        self,
        reward: str,
        *,
        workers: int,
        deadline_s: float = 5.0,
        memory_mb: int = 2048,
        failed: float = 0.0,
        max_failed: float = 1.0,
        unsafe_sandbox: bool = False,
    ):
        for name, value in (("workers", workers), ("deadline_s", deadline_s), ("memory_mb", memory_mb)):
            if not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}; possible: a number above 0")
        super().__init__(failed, max_failed)
        self._fast_reward = FAST_REWARDS.get(reward)
        load_reward(reward)  # raises an error for a wrong name here and not in a worker
        hello = {"reward": reward, "path": sys.path, "deadline_s": deadline_s, "memory_mb": memory_mb}
        hello["unsafe_sandbox"] = unsafe_sandbox
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._keeper = WorkerKeeper()
        self._workers = [_Worker(hello, self._keeper) for _ in range(workers)]
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="scoring")

    def submit(self, text: str, problem: Problem) -> "Future[Score]":
        """Score the response at once if a function in `FAST_REWARDS` can, otherwise queue the response."""
        value = None if self._fast_reward is None else self._fast_reward(text, problem)
        if value is None:
            return self._threads.submit(self._score, text, problem)
        return finished_future(self._count(Score(value)))

    def close(self) -> None:
        """Remove all responses from the queue and end the workers."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.stop()
        self._threads.shutdown(wait=True)
        for worker in self._workers:
            worker.release()
        self._keeper.close()

    def _score(self, text: str, problem: Problem) -> Score:
        worker = self._idle.get()
        try:
            return self._count(worker.score(text, problem))
        finally:
            self._idle.put(worker)


class _Worker:
    """One worker process, which is started again if it dies. Requests and replies are lines of JSON."""

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

    def score(self, text: str, problem: Problem) -> Score:
        if self._process.poll() is not None:  # the worker died while idle, so no response has failed
            self._restart()
        if not self._ready:
            self._wait_until_ready()
        self._send({"text": text, "problem": asdict(problem)})
        try:
            reply = self._receive(self._deadline_s)
        except TimeoutError:
            self._restart()
            return Score(math.nan, "timeout", f"no verdict within {self._deadline_s:g} s")
        if reply is None:
            code = self._process.wait()
            self._restart()
            return Score(math.nan, "crash", f"the worker died with code {code}")
        return Score(**reply)

    def stop(self) -> None:
        with self._changing:
            self._stopped = True
            kill_group(self._process.pid)

    def release(self) -> None:
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
            raise ValueError(
                f"a scoring process for reward {self._hello['reward']!r} did not start: {why} (its limit is "
                f"task.scorer_memory_mb={self._hello['memory_mb']})"
            )

    def _send(self, message: dict[str, Any]) -> None:
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
