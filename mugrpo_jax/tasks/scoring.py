"""Score responses in worker processes with a deadline (`ScoringPool`) or in this process (`InlineScorer`).

Both classes have `submit(text, problem) -> Future[Score]`, so that responses can be scored while others are
generated, and `score_all(pairs)`. If a reward times out, crashes or returns no finite number, the `Score`
tells the reason.
"""

import functools
import json
import math
import os
import queue
import select
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from numbers import Real
from pathlib import Path
from typing import Any, Self

from mugrpo_jax.tasks.rewards import FAST_REWARDS, load_reward
from mugrpo_jax.tasks.task import Problem, RewardFunction

STATUSES = ("ok", "timeout", "crash", "error", "invalid")
INLINE_REWARDS = ("exact", "arithmetic", "countdown")

_STARTUP_S = 120.0
_DETAIL = 300  # most characters of `Score.detail`, so that a worker's reply is one atomic write to a pipe


@dataclass(frozen=True)
class Score:
    """The reward of one response.

    Attributes:
      value: the reward, or `Scorer.failed` if the status is not `ok`.
      status: `ok`, `timeout` (no result before the deadline), `crash` (the worker process died), `error` (the
        reward raised an exception) or `invalid` (the reward did not return a finite number).
      detail: why the reward failed; empty if the status is `ok`.
    """

    value: float
    status: str = "ok"
    detail: str = ""


class Scorer(ABC):
    """Scores responses. Use a scorer in a `with` statement, which closes it.

    `counts[status]` is the number of responses scored so far with this status, which is one of `STATUSES`.
    `failed` is the score of a response whose reward failed.
    """

    def __init__(self, failed: float):
        self.failed = failed
        self.counts: Counter[str] = Counter(dict.fromkeys(STATUSES, 0))
        self._counting = threading.Lock()

    @abstractmethod
    def submit(self, text: str, problem: Problem) -> "Future[Score]":
        """Start to score one response. The result of the future is the score."""

    def score_all(self, pairs: Iterable[tuple[str, Problem]]) -> list[Score]:
        """Score pairs of response and problem; return the scores in the same order."""
        return [future.result() for future in [self.submit(text, problem) for text, problem in pairs]]

    @abstractmethod
    def close(self) -> None:
        """Release all resources. Responses in the queue are not scored any more."""

    def _count(self, score: Score) -> Score:
        with self._counting:
            self.counts[score.status] += 1
        return score if score.status == "ok" else replace(score, value=self.failed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def known_score(score: "Future[Score]", stopped: Callable[[], bool]) -> bool:
    """Wait until a response is scored; return False if `stopped` returns True before that."""
    while not score.done():
        if stopped():
            return False
        wait([score], timeout=0.2)
    return True


def failure(problem: str, detail: str) -> str:
    """Return a one-line text about a response that could not be scored; `problem` is the problem's id.

    >>> failure("17", "no verdict within 5 s")
    'problem 17: no verdict within 5 s'
    """
    detail = " ".join(detail.split())
    return detail if f"problem {problem}:" in detail else f"problem {problem}: {detail}"


def make_scorer(
    reward: str,
    *,
    workers: int | None = None,
    deadline_s: float = 5.0,
    memory_mb: int = 2048,
    failed: float = 0.0,
) -> Scorer:
    """Make a scorer for a reward.

    Args:
      reward: a name for `load_reward`.
      workers: number of worker processes. 0 means to score in this process, without a deadline. None means 0
        for the rewards in `INLINE_REWARDS`, which are fast, and one worker per core for all other rewards.
      deadline_s: most seconds that a worker may take for one response.
      memory_mb: most megabytes of address space of a worker (only enforced on Linux).
      failed: score of a response whose reward failed.
    """
    if workers is None:
        workers = 0 if reward in INLINE_REWARDS else os.cpu_count() or 1
    if workers == 0:
        return InlineScorer(reward, failed=failed)
    return ScoringPool(reward, workers=workers, deadline_s=deadline_s, memory_mb=memory_mb, failed=failed)


def call_reward(reward: RewardFunction, text: str, problem: Problem) -> Score:
    """Call a reward and check its result. If the reward fails, the score is NaN, which scorers replace.

    >>> call_reward(lambda text, problem: float("inf"), "", Problem("1", "", "")).status
    'invalid'
    """
    try:
        value: Any = reward(text, problem)
        if isinstance(value, Real) and math.isfinite(value):
            return Score(float(value))
        return Score(math.nan, "invalid", f"returned {value!r}; possible: a finite number"[:_DETAIL])
    except Exception as error:
        return Score(math.nan, "error", f"{type(error).__name__}: {error}"[:_DETAIL])


@functools.lru_cache(maxsize=256)
def _finished_future(score: Score) -> "Future[Score]":
    """Return a finished future with this score. Equal scores share one cached future, which saves time."""
    future: Future[Score] = Future()
    future.set_result(score)
    return future


class InlineScorer(Scorer):
    """Scores responses in the calling thread, without worker processes and without a deadline."""

    def __init__(self, reward: str, *, failed: float = 0.0):
        super().__init__(failed)
        self._reward = load_reward(reward)

    def submit(self, text: str, problem: Problem) -> "Future[Score]":
        """Score the response at once and return a finished future."""
        return _finished_future(self._count(call_reward(self._reward, text, problem)))

    def close(self) -> None:
        """Do nothing, because there are no resources to release."""


class ScoringPool(Scorer):
    """Scores responses in worker processes.

    At the deadline of a response, its worker is killed and a new worker starts. If a worker crashes, only the
    response that it was scoring fails. This process has one thread per worker, which waits for the worker's
    reply. Workers are new Python interpreters and not forks, because this process may use an accelerator.
    """

    def __init__(
        self,
        reward: str,
        *,
        workers: int,
        deadline_s: float = 5.0,
        memory_mb: int = 2048,
        failed: float = 0.0,
    ):
        for name, value in (("workers", workers), ("deadline_s", deadline_s), ("memory_mb", memory_mb)):
            if not value > 0:
                raise ValueError(f"{name} is {value}; possible: a number above 0")
        super().__init__(failed)
        self._fast_reward = FAST_REWARDS.get(reward)
        load_reward(reward)  # raises an error for a wrong name here and not in a worker
        hello = {"reward": reward, "path": sys.path, "deadline_s": deadline_s, "memory_mb": memory_mb}
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._workers = [_Worker(hello) for _ in range(workers)]
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="scoring")

    def submit(self, text: str, problem: Problem) -> "Future[Score]":
        """Score the response at once if a function in `FAST_REWARDS` can, otherwise queue the response."""
        value = None if self._fast_reward is None else self._fast_reward(text, problem)
        if value is None:
            return self._threads.submit(self._score, text, problem)
        return _finished_future(self._count(Score(value)))

    def close(self) -> None:
        """Remove all responses from the queue and end the workers."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.stop()
        self._threads.shutdown(wait=True)
        for worker in self._workers:
            worker.release()

    def _score(self, text: str, problem: Problem) -> Score:
        worker = self._idle.get()
        try:
            return self._count(worker.score(text, problem))
        finally:
            self._idle.put(worker)


class _Worker:
    """One worker process, which is started again if it dies. Requests and replies are lines of JSON."""

    def __init__(self, hello: dict[str, Any]):
        self._hello = hello
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
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, bufsize=0)
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
            self._process.kill()

    def release(self) -> None:
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _restart(self) -> None:
        self._process.kill()
        self.release()
        self._start()

    def _wait_until_ready(self) -> None:
        try:
            self._ready = self._receive(_STARTUP_S) is not None
        except TimeoutError:
            self._process.kill()
        if not self._ready:
            raise RuntimeError(f"a scoring worker for reward {self._hello['reward']!r} did not start")

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
