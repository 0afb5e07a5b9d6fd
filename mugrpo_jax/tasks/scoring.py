"""Scoring responses: a pool of worker processes with a hard deadline, or inline for rewards that are cheap.

Both forms offer `submit(text, problem) -> Future[Score]`, `score_all(pairs)` and `counts`, so that scoring
overlaps generation or follows it. An item that cannot be scored keeps its status: no zero is silent.
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
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from numbers import Real
from pathlib import Path
from typing import Any, Self

from mugrpo_jax.tasks.base import Problem, RewardFunction
from mugrpo_jax.tasks.rewards import SETTLED, load_reward

STATUSES = ("ok", "timeout", "crash", "error", "invalid")
INLINE_REWARDS = ("exact", "arithmetic", "countdown")

_STARTUP_S = 120.0
_DETAIL = 300  # characters; a worker's reply must fit one atomic write to a pipe


@dataclass(frozen=True)
class Score:
    """The reward of one response.

    Attributes:
      value: the reward, or the scorer's `failed` value where there is none.
      status: `ok`; `timeout`: over the deadline; `crash`: the worker died; `error`: the reward raised;
        `invalid`: it returned something that is not a finite number.
      detail: what happened, empty when ok.
    """

    value: float
    status: str = "ok"
    detail: str = ""


class Scorer(ABC):
    """What the run loop and the evaluation need. A context manager: leaving it closes the scorer.

    Attributes:
      counts: how many items ended with each of `STATUSES` so far.
      failed: the value of an item without a reward.
    """

    def __init__(self, failed: float):
        self.failed = failed
        self.counts: Counter[str] = Counter(dict.fromkeys(STATUSES, 0))
        self._counting = threading.Lock()

    @abstractmethod
    def submit(self, text: str, problem: Problem) -> "Future[Score]":
        """Score one response, now or soon."""

    def score_all(self, pairs: Iterable[tuple[str, Problem]]) -> list[Score]:
        """Score many responses; the scores come in the order of the responses."""
        return [future.result() for future in [self.submit(text, problem) for text, problem in pairs]]

    @abstractmethod
    def close(self) -> None:
        """Release what the scorer holds; what is still waiting is dropped."""

    def _count(self, score: Score) -> Score:
        with self._counting:
            self.counts[score.status] += 1
        return score if score.status == "ok" else replace(score, value=self.failed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def failure(problem: str, detail: str) -> str:
    """An item that has no score, in words.

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
    """A scorer for a reward by name.

    Args:
      reward: a key of `REWARDS` or `module:function`.
      workers: processes; 0 scores inline, without a deadline; None chooses inline for the cheap built-in
        rewards and one process a core for the others.
      deadline_s: seconds an item may take in a worker.
      memory_mb: address space of a worker (enforced on Linux).
      failed: the value of an item without a reward.
    """
    if workers is None:
        workers = 0 if reward in INLINE_REWARDS else os.cpu_count() or 1
    if workers == 0:
        return InlineScorer(reward, failed=failed)
    return ScoringPool(reward, workers=workers, deadline_s=deadline_s, memory_mb=memory_mb, failed=failed)


def judge(reward: RewardFunction, text: str, problem: Problem) -> Score:
    """Call a reward once and say what came back; the value of a failure is NaN until a scorer sets it.

    >>> judge(lambda text, problem: float("inf"), "", Problem("1", "", "")).status
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
def _done(score: Score) -> "Future[Score]":
    """A future that holds a score. Most responses have one of few scores, and equal ones share theirs."""
    future: Future[Score] = Future()
    future.set_result(score)
    return future


class InlineScorer(Scorer):
    """Scores where it is called: no processes, no deadline."""

    def __init__(self, reward: str, *, failed: float = 0.0):
        super().__init__(failed)
        self._reward = load_reward(reward)

    def submit(self, text: str, problem: Problem) -> "Future[Score]":
        """Score now; the future is done."""
        return _done(self._count(judge(self._reward, text, problem)))

    def close(self) -> None:
        """Nothing is held."""


class ScoringPool(Scorer):
    """Scores in worker processes: a hang is killed at its deadline, a crash costs one item.

    One thread waits for each worker. The workers are fresh interpreters, not forks of this process, which may
    hold an accelerator, and they import nothing of it.
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
        self._settled = SETTLED.get(reward)
        load_reward(reward)  # a name that cannot be loaded is an error here, not in a worker
        hello = {"reward": reward, "path": sys.path, "deadline_s": deadline_s, "memory_mb": memory_mb}
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._workers = [_Worker(hello) for _ in range(workers)]
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="scoring")

    def submit(self, text: str, problem: Problem) -> "Future[Score]":
        """Queue a response; the future holds its score."""
        settled = None if self._settled is None else self._settled(text, problem)
        if settled is None:
            return self._threads.submit(self._score, text, problem)
        return _done(self._count(Score(settled)))

    def close(self) -> None:
        """Drop what waits and end the workers."""
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
    """One worker process, restarted when it dies or is killed, and the conversation with it: JSON lines."""

    def __init__(self, hello: dict[str, Any]):
        self._hello = hello
        self._deadline_s = float(hello["deadline_s"])
        self._stopped = False
        self._changing = threading.Lock()  # of the process, by its own thread or by one that closes the pool
        self._start()

    def _start(self) -> None:
        with self._changing:
            if self._stopped:
                return
            command = [sys.executable, str(Path(__file__).with_name("worker.py"))]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
            )
            self._ready = False
        self._send(self._hello)

    def score(self, text: str, problem: Problem) -> Score:
        if self._process.poll() is not None:  # died while idle: no item is to blame
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
            pass  # the worker is gone, which `_receive` reports

    def _receive(self, timeout_s: float) -> dict[str, Any] | None:
        """The worker's next message; None if it died."""
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
