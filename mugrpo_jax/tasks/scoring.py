"""Score responses: the `Score` of a response, the interface `Scorer`, and a scorer for this process.

A scorer has `submit(text, problem) -> Future[Score]`, so that responses can be scored while others are
generated, and `score_all(pairs)`. If a reward times out, crashes or returns no finite number, the `Score`
tells the reason. `scoring_pool.ScoringPool` scores in worker processes with a deadline.
"""

import functools
import math
import threading
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Self

from mugrpo_jax.tasks.own_functions import line_of
from mugrpo_jax.tasks.rewards import load_reward
from mugrpo_jax.tasks.task import LARGEST_REWARD, Problem, RewardFunction, Verdict

FAILURES = ("timeout", "crash", "error", "invalid")
STATUSES = ("ok", *FAILURES)

_RECENT = 256  # number of responses over which `max_failed` is measured
_DETAIL = 300  # most characters of `Score.detail`, so that a worker's reply is one atomic write to a pipe


@dataclass(frozen=True)
class Score:
    """The reward of one response.

    Attributes:
      value: the reward, or `Scorer.failed` if the status is one of `FAILURES`.
      status: `ok`, `timeout` (no result before the deadline), `crash` (the worker process died), `error` (the
        reward raised an exception) or `invalid` (the reward did not return a finite number). A reward that
        returns a `Verdict` has its own statuses for wrong responses, such as `wrong_answer`.
      detail: why the reward failed, or why the response is wrong; empty if the status is `ok`.
      parts: with several rewards, name and value of each, in their order; `value` is the weighted sum.
    """

    value: float
    status: str = "ok"
    detail: str = ""
    parts: tuple[tuple[str, float], ...] = ()

    @property
    def failed(self) -> bool:
        """Whether the reward itself failed, so that nothing is known about the response."""
        return self.status in FAILURES

    @property
    def correctness(self) -> float:
        """The value that says whether the response is right: with several rewards, that of the first."""
        return self.parts[0][1] if self.parts else self.value


class Scorer(ABC):
    """Scores responses. Use a scorer in a `with` statement, which closes it.

    `counts[status]` is the number of responses scored so far with this status: one of `STATUSES`, or a status
    of a `Verdict`.
    `failed` is the score of a response whose reward failed. If the reward failed for more than the share
    `max_failed` of the last 256 responses, scoring raises a `ValueError` with the most frequent reason.
    """

    def __init__(self, failed: float, max_failed: float):
        self.failed, self.max_failed = failed, max_failed
        self._recent: deque[Score] = deque()
        self._recent_failures = 0
        self.counts: Counter[str] = Counter(dict.fromkeys(STATUSES, 0))
        self._counting = threading.Lock()

    @abstractmethod
    def submit(self, text: str, problem: Problem) -> "Future[Score]":
        """Start to score one response. The result of the future is the score."""

    def score_all(self, pairs: Iterable[tuple[str, Problem]]) -> list[Score]:
        """Score pairs of response and problem; return the scores in the same order."""
        return [future.result() for future in [self.submit(text, problem) for text, problem in pairs]]

    def fail(self, status: str, detail: str) -> "Future[Score]":
        """Count a response that cannot be scored, because its environment failed with one of `FAILURES`."""
        return finished_future(self._count(Score(math.nan, status, detail)))

    @abstractmethod
    def close(self) -> None:
        """Release all resources. Responses in the queue are not scored any more."""

    def _count(self, score: Score) -> Score:
        with self._counting:
            self.counts[score.status] += 1
            if self.max_failed < 1:
                self._check_recent(score)
        if not score.failed or score.parts:  # a weighted sum has the value of its failed parts already
            return score
        return replace(score, value=self.failed)

    def _check_recent(self, score: Score) -> None:
        self._recent.append(score)
        self._recent_failures += score.failed
        if len(self._recent) > _RECENT:
            self._recent_failures -= self._recent.popleft().failed
        if len(self._recent) == _RECENT and self._recent_failures > self.max_failed * _RECENT:
            reasons = Counter(score.detail for score in self._recent if score.failed)
            raise ValueError(
                f"the reward failed for {self._recent_failures} of the last {_RECENT} responses, more than "
                f"the share task.max_failed={self.max_failed:g}; most often: {reasons.most_common(1)[0][0]}; "
                "mend it and start again"
            )

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


def call_reward(reward: RewardFunction, text: str, problem: Problem) -> Score:
    """Call a reward and check its result. If the reward fails, the score is NaN, which scorers replace.

    >>> call_reward(lambda text, problem: float("inf"), "", Problem("1", "", "")).status
    'invalid'
    """
    try:
        value: Any = reward(text, problem)
        verdict = value if isinstance(value, Verdict) else Verdict(value)
        value = verdict.value
        if isinstance(value, Real) and abs(number := _as_float(value)) <= LARGEST_REWARD:
            return Score(number, verdict.status, shortened(verdict.detail))
        possible = f"a finite number, at most {LARGEST_REWARD:g}"
        return Score(math.nan, "invalid", shortened(f"returned {value!r}; possible: {possible}"))
    except (Exception, SystemExit) as error:  # a reward that calls `sys.exit` must not end the run
        return Score(math.nan, "error", describe(error))


def _as_float(value: Real) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer with hundreds of digits
        return math.inf


def describe(error: BaseException) -> str:
    """Return the type and the text of an exception that the code of a user raised, and the line if known."""
    line = line_of(error)
    try:
        return shortened(f"{type(error).__name__}: {error}")[: _DETAIL - len(line)] + shortened(line)
    except Exception:  # its own `__str__` fails
        return type(error).__name__


def shortened(text: str) -> str:
    """Return the beginning of a text; characters that cannot be printed (lone surrogates) are escaped.

    >>> shortened("a\\ud800")
    'a\\\\ud800'
    """
    return text[:_DETAIL].encode(errors="backslashreplace").decode()[:_DETAIL]


@functools.lru_cache(maxsize=256)
def finished_future(score: Score) -> "Future[Score]":
    """Return a finished future with this score. Equal scores share one cached future, which saves time."""
    future: Future[Score] = Future()
    future.set_result(score)
    return future


class InlineScorer(Scorer):
    """Scores responses in the calling thread, without worker processes and without a deadline."""

    def __init__(
        self, reward: str, *, failed: float = 0.0, max_failed: float = 1.0, unsafe_sandbox: bool = False
    ):
        super().__init__(failed, max_failed)
        self._reward = load_reward(reward, unsafe_sandbox=unsafe_sandbox)

    def submit(self, text: str, problem: Problem) -> "Future[Score]":
        """Score the response at once and return a finished future."""
        return finished_future(self._count(call_reward(self._reward, text, problem)))

    def close(self) -> None:
        """Do nothing, because there are no resources to release."""
