"""Results of an evaluation: scored responses, the file that stores them, statistics, tables and JSON."""

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mugrpo_jax import files
from mugrpo_jax.evaluation import statistics
from mugrpo_jax.evaluation.statistics import Estimate
from mugrpo_jax.runs.text_table import text_table
from mugrpo_jax.tasks import Problem
from mugrpo_jax.tasks.scoring import FAILURES, failure

_LONGEST_ANSWER = 64  # most characters of an answer that is sent to other hosts


@dataclass(frozen=True)
class ScoredResponse:
    """One response to a problem with its score.

    Attributes:
      index: index of the problem in the evaluation.
      sample: number of the response to this problem, from 0.
      problem: id of the problem.
      value, status, detail: as in `tasks.Score`.
      parts: with several rewards, the value of each; the first says whether the response is right.
      answer: the answer in the response; None if it has none, or if nobody looked.
      finish_reason: `stop`, or `length` if the response reached the length limit.
      length: number of tokens.
      prompt: the prompt as the model got it, with its chat template; empty if it was not kept.
      text: the response; with an environment, the model's last turn.
      messages: number of messages of the environment.
      conversation: with an environment, everything that was said; else empty.
    """

    index: int
    sample: int
    problem: str
    value: float
    status: str
    detail: str
    answer: str | None
    finish_reason: str
    length: int
    prompt: str
    text: str
    parts: dict[str, float] = dataclasses.field(default_factory=dict)
    messages: int = 0
    conversation: Sequence[Mapping[str, str]] = ()

    @property
    def correctness(self) -> float:
        """The value that says whether the response is right: with several rewards, that of the first."""
        return next(iter(self.parts.values()), self.value)


class ResultsFile:
    """Stores scored responses in memory and, with a path, in a file with one JSON line per response.

    `rows` maps (index, sample) to a response; the responses that the file already has are included.
    """

    def __init__(self, path: Path | None, name: str, problems: Sequence[Problem], samples: int) -> None:
        self.rows: dict[tuple[int, int], ScoredResponse] = {}
        self._path = path
        if path is None or not path.exists():
            return
        files.cut_unfinished_line(path)
        for number, line in files.read_json_lines(path):
            try:
                row = ScoredResponse(**line)
            except TypeError as error:
                raise ValueError(f"{path}:{number}: not a result: {error!r}") from None
            if row.index >= len(problems) or problems[row.index].id != row.problem or row.sample >= samples:
                raise ValueError(
                    f"{path}:{number}: result of problem {row.problem!r}, sample {row.sample}, which {name} "
                    f"with {samples} samples does not have; use another file for another evaluation"
                )
            self.rows[row.index, row.sample] = row

    def add(self, row: ScoredResponse) -> None:
        """Store a response in memory and append it to the file."""
        self.rows[row.index, row.sample] = row
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab") as file:
                file.write(json.dumps(asdict(row)).encode() + b"\n")

    def ordered(self) -> list[ScoredResponse]:
        """Return all responses ordered by problem and sample, whatever the order in which they were added."""
        return [row for _, row in sorted(self.rows.items())]


def pack_rows(rows: Sequence[ScoredResponse]) -> list[list[Any]]:
    """Convert responses to short lists for other hosts: no texts, short answers, one `detail` per status."""
    told: set[str] = set()
    packed = []
    for row in rows:
        detail = "" if row.status in told else row.detail
        told.add(row.status)
        answer = None if row.answer is None else row.answer[:_LONGEST_ANSWER]
        short = dataclasses.replace(row, prompt="", text="", conversation=(), answer=answer, detail=detail)
        packed.append([*dataclasses.astuple(short)])
    return packed


def unpack_rows(parts: Iterable[Sequence[Sequence[Any]]]) -> list[ScoredResponse]:
    """Convert the lists of all hosts back to responses, ordered by problem and sample."""
    rows = [ScoredResponse(*values) for part in parts for values in part]
    return sorted(rows, key=lambda row: (row.index, row.sample))


@dataclass(frozen=True)
class EvalResult:
    """Statistics of one benchmark.

    Attributes:
      name: name of the benchmark.
      problems: number of problems.
      samples: responses per problem.
      metrics: `avg@k`, `pass@k` for each k asked for, `majority@k` where answers can be compared.
      truncated: share of responses cut off by the length limit.
      malformed: share of responses that ended, but have no answer that can be read; None if nobody looked.
      mean_length: mean number of tokens in a response.
      statuses: number of responses with each scoring status.
      per_problem: for each metric, its value for each problem.
      examples: for each status except `ok`, the problem and detail of the first such response.
      reward: mean reward of the responses; with several rewards, of their weighted sum.
      reward_parts: with several rewards, the mean of each, without its weight.
      answered: share of responses in which an environment answered the model at least once.
    """

    name: str
    problems: int
    samples: int
    metrics: dict[str, Estimate]
    truncated: float
    malformed: float | None
    mean_length: float
    statuses: dict[str, int]
    per_problem: dict[str, list[float]]
    examples: dict[str, str]
    reward: float
    reward_parts: dict[str, float]
    answered: float = 0.0

    @property
    def accuracy(self) -> Estimate:
        """The metric avg@k, which is the mean reward (of several rewards, the first), with k = `samples`."""
        return self.metrics[f"avg@{self.samples}"]

    def as_json(self) -> str:
        """Return all attributes as one JSON object."""
        return json.dumps(asdict(self), indent=2)


def summarise(
    name: str,
    rows: Sequence[ScoredResponse],
    *,
    samples: int,
    ks: Sequence[int] = (),
    answers: bool = False,
    confidence: float = 0.95,
) -> EvalResult:
    """Compute the statistics of scored responses.

    Args:
      rows: `samples` responses to every problem, ordered by problem and sample.
      ks: the values of k for pass@k.
      answers: True if the rows have answers, for the majority vote and the share of malformed responses.
      confidence: level of the confidence intervals.
    """
    groups = [rows[i : i + samples] for i in range(0, len(rows), samples)]
    values = [[row.correctness for row in group] for group in groups]
    correct = [sum(value >= statistics.CORRECT for value in group) for group in values]
    per_problem = {f"avg@{samples}": [statistics.average_at_k(group) for group in values]}
    per_problem |= {f"pass@{k}": [statistics.pass_at_k(samples, c, k) for c in correct] for k in ks}
    if answers:
        read = [[row.answer for row in group] for group in groups]
        per_problem[f"majority@{samples}"] = [statistics.majority(a, v) for a, v in zip(read, values)]
    failures = [row for row in rows if row.status != "ok"]
    return EvalResult(
        name=name,
        problems=len(groups),
        samples=samples,
        metrics={
            metric: statistics.estimate_mean(v, confidence=confidence) for metric, v in per_problem.items()
        },
        truncated=float(np.mean([row.finish_reason == "length" for row in rows])),
        malformed=float(np.mean([row.finish_reason == "stop" and row.answer is None for row in rows]))
        if answers
        else None,
        mean_length=float(np.mean([row.length for row in rows])),
        statuses=dict(sorted(Counter(row.status for row in rows).items())),
        per_problem=per_problem,
        examples={row.status: failure(row.problem, row.detail) for row in reversed(failures)},
        reward=float(np.mean([row.value for row in rows])),
        reward_parts={name: float(np.mean([row.parts[name] for row in rows])) for name in rows[0].parts},
        answered=float(np.mean([row.messages > 0 for row in rows])),
    )


def average_results(results: Sequence[EvalResult]) -> dict[str, Estimate]:
    """Average each metric that all benchmarks have; every benchmark has the same weight."""
    first = results[0].metrics if results else {}
    shared = [m for m in first if all(m in result.metrics for result in results)]
    return {m: statistics.estimate_average([r.per_problem[m] for r in results]) for m in shared}


def average_as_json(results: Sequence[EvalResult]) -> str:
    """Return one JSON object with the metrics of each benchmark and their average."""
    benchmarks = [{"name": result.name, "metrics": _plain(result.metrics)} for result in results]
    return json.dumps({"benchmarks": benchmarks, "average": _plain(average_results(results))}, indent=2)


def _plain(metrics: Mapping[str, Estimate]) -> dict[str, dict[str, float]]:
    return {name: asdict(estimate) for name, estimate in metrics.items()}


def as_table(results: Sequence[EvalResult]) -> str:
    """Format a table of benchmarks and their average; all shares are percentages.

    A metric is followed by its 95 % interval, `metric% [low, high]`.
    """
    metrics = list(dict.fromkeys(metric for result in results for metric in result.metrics))
    header = ["benchmark", "problems", "samples", *metrics, "truncated", "malformed", "length", "not scored"]
    lines = [
        [
            result.name,
            str(result.problems),
            str(result.samples),
            *(_cell(result.metrics.get(metric)) for metric in metrics),
            f"{result.truncated:.1%}",
            "–" if result.malformed is None else f"{result.malformed:.1%}",
            f"{result.mean_length:.0f}",
            str(sum(count for status, count in result.statuses.items() if status in FAILURES)),
        ]
        for result in results
    ]
    if len(results) > 1:
        average: Mapping[str, Estimate] = average_results(results)
        lines.append(["average", "", "", *(_cell(average.get(metric)) for metric in metrics), "", "", "", ""])
    return text_table([header, *lines])


def _cell(estimate: Estimate | None) -> str:
    if estimate is None:
        return "–"
    return f"{estimate.mean:.1%} [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"
