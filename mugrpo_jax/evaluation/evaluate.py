"""Evaluation: avg@k, pass@k, majority and truncation, with confidence intervals, resumable.

The statistics are plain functions of counts. `evaluate` asks a `generate` callable for what is still missing,
scores it, appends every result to a file, and computes the statistics from the whole.
"""

import json
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mugrpo_jax.runs.text import text_table
from mugrpo_jax.tasks import Problem, Score, Scorer
from mugrpo_jax.tasks.scoring import failure

CORRECT = 1.0  # a reward this high counts as solved in pass@k and in a majority vote


@dataclass(frozen=True)
class Request:
    """A response that is wanted: problem `index`, sample number `sample`."""

    index: int
    sample: int
    problem: Problem


@dataclass(frozen=True)
class Response:
    """A response that was generated, in any order; `finish_reason` is `stop` or `length`."""

    index: int
    sample: int
    text: str
    finish_reason: str
    length: int


Generate = Callable[[list[Request]], Iterable[Response]]


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that k of n samples, c of them correct, contain a correct one: `1 − C(n−c, k) / C(n, k)`.

    Unbiased for the chance that k fresh samples solve the problem (arXiv 2107.03374), exact in integers.

    >>> pass_at_k(4, 1, 2), pass_at_k(4, 0, 2), pass_at_k(4, 3, 2)
    (0.5, 0.0, 1.0)
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"n={n}, c={c}, k={k}; possible: 0 <= c <= n and 1 <= k <= n")
    misses, draws = math.comb(n - c, k), math.comb(n, k)
    return (draws - misses) / draws


def average_at_k(values: Sequence[float]) -> float:
    """Mean reward of a problem's k samples."""
    if not values:
        raise ValueError("values is empty; possible: one reward or more")
    return math.fsum(values) / len(values)


def majority(answers: Sequence[str | None], values: Sequence[float]) -> float:
    """1.0 if the answer most samples give is correct; a tie counts by the share of its answers that are.

    Samples without an answer do not vote. A vote nobody takes part in is lost.

    >>> majority(["7", "8", "7", None], [1.0, 0.0, 1.0, 0.0]), majority(["7", "8"], [1.0, 0.0])
    (1.0, 0.5)
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    verdict = {answer: value >= CORRECT for answer, value in zip(answers, values, strict=True)}
    winners = [answer for answer, count in votes.items() if count == most]
    return sum(verdict[answer] for answer in winners) / len(winners)


@dataclass(frozen=True)
class Estimate:
    """A mean over problems with its confidence interval."""

    mean: float
    low: float
    high: float


def bootstrap(
    values: Sequence[float] | np.ndarray, *, confidence: float = 0.95, resamples: int = 2000, seed: int = 0
) -> Estimate:
    """Mean over problems with a percentile interval from resampling the problems.

    Problems are resampled, not samples: the samples of one problem are not independent evidence.

    >>> bootstrap([1.0, 1.0, 1.0])
    Estimate(mean=1.0, low=1.0, high=1.0)
    """
    values = np.asarray(values, dtype=np.float64)
    if values.ndim != 1 or not len(values):
        raise ValueError(f"values has shape {values.shape}; possible: one number a problem, at least one")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}; possible: between 0 and 1")
    rng = np.random.default_rng(seed)
    means = np.array([values[rng.integers(len(values), size=len(values))].mean() for _ in range(resamples)])
    return _estimate(float(values.mean()), means, confidence)


def bootstrap_average(
    benchmarks: Sequence[Sequence[float]], *, confidence: float = 0.95, resamples: int = 2000, seed: int = 0
) -> Estimate:
    """The average of several benchmarks' means, each benchmark counting the same whatever its size."""
    if not benchmarks:
        raise ValueError("benchmarks is empty; possible: one list of values or more")
    rng = np.random.default_rng(seed)
    arrays = [np.asarray(values, dtype=np.float64) for values in benchmarks]
    draws = [
        [values[rng.integers(len(values), size=len(values))].mean() for values in arrays]
        for _ in range(resamples)
    ]
    return _estimate(float(np.mean([a.mean() for a in arrays])), np.mean(draws, axis=1), confidence)


def _estimate(mean: float, means: np.ndarray, confidence: float) -> Estimate:
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Estimate(mean, float(low), float(high))


@dataclass(frozen=True)
class EvalResult:
    """Statistics of one benchmark.

    Attributes:
      name: of the benchmark.
      problems: how many.
      samples: per problem.
      metrics: `avg@k`, `pass@k` for each k asked for, `majority@k` where answers can be compared.
      truncated: share of responses cut off by the length limit.
      mean_length: of the responses, in tokens.
      statuses: how many items were scored with each status.
      per_problem: for each metric, its value for each problem.
      examples: of each status but `ok`, the first item and what happened to it.
    """

    name: str
    problems: int
    samples: int
    metrics: dict[str, Estimate]
    truncated: float
    mean_length: float
    statuses: dict[str, int]
    per_problem: dict[str, list[float]]
    examples: dict[str, str]

    def as_json(self) -> str:
        """One JSON object, keys in order."""
        return json.dumps(asdict(self), indent=2)


def evaluate(
    problems: Sequence[Problem],
    generate: Generate,
    scorer: Scorer,
    *,
    samples: int,
    ks: Sequence[int] = (1,),
    out: str | Path | None = None,
    name: str = "test",
    answer_of: Callable[[str], str | None] | None = None,
    confidence: float = 0.95,
) -> EvalResult:
    """Generate `samples` responses to every problem, score them and summarise.

    With `out`, each result is appended to that JSON-lines file as soon as it is scored, and results that are
    already there are not generated again: an interrupted evaluation continues, and ends with the same numbers
    if `generate` makes a response depend on its own index and sample alone.

    Args:
      problems: what to solve.
      generate: takes the requests that are still open, yields responses in any order.
      scorer: scores the responses while more are generated.
      samples: responses to a problem.
      ks: for which k to compute pass@k, each at most `samples`.
      out: the results file.
      name: of the benchmark.
      answer_of: the answer of a response, for a majority vote; an entry of `ANSWER_READERS`.
      confidence: of the intervals.
    """
    if not problems:
        raise ValueError(f"{name}: no problems to evaluate")
    if samples < 1 or any(not 1 <= k <= samples for k in ks):
        raise ValueError(f"{name}: samples={samples}, ks={list(ks)}; possible: 1 <= k <= samples")
    results = _Results(None if out is None else Path(out), name, problems, samples)
    wanted = [
        Request(i, s, problem)
        for i, problem in enumerate(problems)
        for s in range(samples)
        if (i, s) not in results.rows
    ]
    if wanted:
        open_requests = {(request.index, request.sample) for request in wanted}
        for response, score in _scored(generate(wanted), problems, scorer):
            if (key := (response.index, response.sample)) not in open_requests:
                raise ValueError(f"{name}: generate returned (index, sample) {key}, not or no longer wanted")
            open_requests.remove(key)
            answer = None if answer_of is None else answer_of(response.text)
            results.add(response, problems[response.index], score, answer)
        if open_requests:
            raise ValueError(f"{name}: generate left out {len(open_requests)} of {len(wanted)} responses")
    return _summarise(name, results.ordered(), samples, ks, answer_of is not None, confidence)


def _scored(
    responses: Iterable[Response], problems: Sequence[Problem], scorer: Scorer
) -> Iterator[tuple[Response, Score]]:
    """Responses with their scores as they come; scoring runs behind while the next are generated."""
    waiting: deque[tuple[Response, Future[Score]]] = deque()
    for response in responses:
        waiting.append((response, scorer.submit(response.text, problems[response.index])))
        while waiting and waiting[0][1].done():
            yield waiting[0][0], waiting.popleft()[1].result()
    for response, future in waiting:
        yield response, future.result()


class _Results:
    """The results so far, in memory and, where a file is given, on disk: one JSON line a response."""

    def __init__(self, path: Path | None, name: str, problems: Sequence[Problem], samples: int):
        self.rows: dict[tuple[int, int], dict[str, Any]] = {}
        self._path = path
        if path is not None and path.exists():
            self._read(path, name, problems, samples)

    def _read(self, path: Path, name: str, problems: Sequence[Problem], samples: int) -> None:
        lines = path.read_bytes().split(b"\n")
        if lines[-1]:  # the write that an interruption cut off
            with path.open("r+b") as file:
                file.truncate(sum(len(line) + 1 for line in lines[:-1]))
        for number, line in enumerate(lines[:-1], 1):
            try:
                row = json.loads(line)
                index, sample, problem = row["index"], row["sample"], row["problem"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}:{number}: not a result: {error!r}") from None
            if index >= len(problems) or problems[index].id != problem or sample >= samples:
                raise ValueError(
                    f"{path}:{number}: result of problem {problem!r}, sample {sample}, which {name} with "
                    f"{samples} samples does not have; use another file for another evaluation"
                )
            self.rows[index, sample] = row

    def add(self, response: Response, problem: Problem, score: Score, answer: str | None) -> None:
        row = {
            "index": response.index,
            "sample": response.sample,
            "problem": problem.id,
            "value": score.value,
            "status": score.status,
            "detail": score.detail,
            "answer": answer,
            "finish_reason": response.finish_reason,
            "length": response.length,
            "text": response.text,
        }
        self.rows[response.index, response.sample] = row
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab") as file:
                file.write(json.dumps(row).encode() + b"\n")

    def ordered(self) -> list[dict[str, Any]]:
        """By problem and sample: the statistics do not depend on the order of arrival."""
        return [row for _, row in sorted(self.rows.items())]


def _summarise(
    name: str,
    rows: list[dict[str, Any]],
    samples: int,
    ks: Sequence[int],
    vote: bool,
    confidence: float,
) -> EvalResult:
    groups = [rows[i : i + samples] for i in range(0, len(rows), samples)]
    failures = [row for row in rows if row["status"] != "ok"]
    values = [[row["value"] for row in group] for group in groups]
    correct = [sum(value >= CORRECT for value in group) for group in values]
    per_problem = {f"avg@{samples}": [average_at_k(group) for group in values]}
    per_problem |= {f"pass@{k}": [pass_at_k(samples, c, k) for c in correct] for k in ks}
    if vote:
        answers = [[row["answer"] for row in group] for group in groups]
        per_problem[f"majority@{samples}"] = [majority(a, v) for a, v in zip(answers, values)]
    return EvalResult(
        name=name,
        problems=len(groups),
        samples=samples,
        metrics={metric: bootstrap(v, confidence=confidence) for metric, v in per_problem.items()},
        truncated=float(np.mean([row["finish_reason"] == "length" for row in rows])),
        mean_length=float(np.mean([row["length"] for row in rows])),
        statuses=dict(sorted(Counter(row["status"] for row in rows).items())),
        per_problem=per_problem,
        examples={row["status"]: failure(row["problem"], row["detail"]) for row in reversed(failures)},
    )


def average_results(results: Sequence[EvalResult]) -> dict[str, Estimate]:
    """Averages over benchmarks of the metrics they share, each benchmark counting the same."""
    shared = (
        [m for m in results[0].metrics if all(m in result.metrics for result in results)] if results else []
    )
    return {metric: bootstrap_average([r.per_problem[metric] for r in results]) for metric in shared}


def average_as_json(results: Sequence[EvalResult]) -> str:
    """One JSON object: the metrics of each benchmark, and their average."""
    benchmarks = [{"name": result.name, "metrics": _plain(result.metrics)} for result in results]
    return json.dumps({"benchmarks": benchmarks, "average": _plain(average_results(results))}, indent=2)


def _plain(metrics: Mapping[str, Estimate]) -> dict[str, dict[str, float]]:
    return {name: asdict(estimate) for name, estimate in metrics.items()}


def as_table(results: Sequence[EvalResult]) -> str:
    """A text table, one line a benchmark, then their average: percent with confidence intervals."""
    metrics = list(dict.fromkeys(metric for result in results for metric in result.metrics))
    header = ["benchmark", "problems", "samples", *metrics, "truncated", "length", "not scored"]
    lines = [
        [
            result.name,
            str(result.problems),
            str(result.samples),
            *(_cell(result.metrics.get(metric)) for metric in metrics),
            f"{100 * result.truncated:.1f}",
            f"{result.mean_length:.0f}",
            str(sum(count for status, count in result.statuses.items() if status != "ok")),
        ]
        for result in results
    ]
    if len(results) > 1:
        average: Mapping[str, Estimate] = average_results(results)
        lines.append(["average", "", "", *(_cell(average.get(metric)) for metric in metrics), "", "", ""])
    return text_table([header, *lines])


def _cell(estimate: Estimate | None) -> str:
    if estimate is None:
        return "–"
    return f"{100 * estimate.mean:.1f} [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"
