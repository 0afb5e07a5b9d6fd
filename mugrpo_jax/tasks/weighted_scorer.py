"""Score responses with several rewards: the reward of a response is their weighted sum."""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future

from mugrpo_jax.tasks.scoring import Score, Scorer, finished_future
from mugrpo_jax.tasks.task import Problem


class WeightedScorer(Scorer):
    """Scores responses with one scorer per reward and adds up weight × value.

    A reward that fails for a response has the value `failed` in the sum. The score has the status of the
    first reward that failed, or else the first status that is not `ok`, and its detail names that reward.
    """

    def __init__(
        self,
        scorers: Mapping[str, Scorer],
        weights: Mapping[str, float],
        *,
        failed: float = 0.0,
        max_failed: float = 1.0,
    ):
        super().__init__(failed, max_failed)
        self._scorers, self._weights = dict(scorers), dict(weights)

    def submit(self, text: str, problem: Problem) -> "Future[Score]":
        """Start to score the response with every reward."""
        futures = {name: scorer.submit(text, problem) for name, scorer in self._scorers.items()}
        if all(future.done() for future in futures.values()):
            return finished_future(self._sum(futures))
        total: Future[Score] = Future()
        _when_all_are_done(futures, lambda: _settle(total, lambda: self._sum(futures)))
        return total

    def fail(self, status: str, detail: str) -> "Future[Score]":
        """See `Scorer.fail`. The score has a part for every reward, as if each of them had failed."""
        parts = tuple((name, scorer.failed) for name, scorer in self._scorers.items())
        value = sum(self._weights[name] * failed for name, failed in parts)
        return finished_future(self._count(Score(value, status, detail, parts)))

    def close(self) -> None:
        """Close the scorers of all rewards."""
        for scorer in self._scorers.values():
            scorer.close()

    def _sum(self, futures: "Mapping[str, Future[Score]]") -> Score:
        scores = {name: future.result() for name, future in futures.items()}
        value = sum(self._weights[name] * score.value for name, score in scores.items())
        parts = tuple((name, score.value) for name, score in scores.items())
        failed = [item for item in scores.items() if item[1].failed]
        for name, score in failed or scores.items():
            if score.status != "ok":
                return self._count(Score(value, score.status, f"{name}: {score.detail}", parts))
        return self._count(Score(value, parts=parts))


def _when_all_are_done(futures: "Mapping[str, Future[Score]]", call: Callable[[], None]) -> None:
    """Call `call` once, in the thread that finishes the last of the futures."""
    left, lock = len(futures), threading.Lock()

    def one_is_done(_: "Future[Score]") -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if last:
            call()

    for future in futures.values():
        future.add_done_callback(one_is_done)


def _settle(total: "Future[Score]", compute: Callable[[], Score]) -> None:
    """Give a future its result, or the error with which a part failed or was cancelled."""
    try:
        total.set_result(compute())
    except Exception as error:
        total.set_exception(error)
