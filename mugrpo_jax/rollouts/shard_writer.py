"""Collect responses and their scores, and write each shard when it is complete."""

import collections
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from mugrpo_jax.rollouts.records import Group, Rollout
from mugrpo_jax.sampling import Response
from mugrpo_jax.tasks import Problem, Score
from mugrpo_jax.tasks.scoring import failure, known_score


class ShardFolder(Protocol):
    """Where shards are written: the folder of a stage, or of one behavior's part of it."""

    @property
    def prompts_per_shard(self) -> int:
        """Number of prompts in one shard; the last shard may hold fewer."""
        ...

    def shard_prompts(self, shard: int) -> range:
        """Return the indices of the prompts in a shard."""
        ...

    def write_shard(self, shard: int, groups: Sequence[Group]) -> bool:
        """Write the groups of one shard, sorted by prompt index; return whether it was written."""
        ...


_Scored = tuple[Response, "Future[Score]", str]
_RIGHT = 1.0  # the reward of a right answer


class ShardWriter:
    """Collect scored responses, and write each shard in a separate thread while sampling continues.

    A shard is written as soon as all its responses are scored. Leaving the context waits for these writes.

    Attributes:
      reward: sum of the rewards of all responses that were given to the writing thread.
      scored: number of the responses whose rewards are in this sum.
      write_seconds: time in which the thread wrote shards.
      examples: for each status except `ok`, a text with one problem id and the reason why scoring failed.
    """

    def __init__(
        self,
        stage: ShardFolder,
        problems: Mapping[int, Problem],
        behaviors: Callable[[int], Mapping[int, str]],
        answer_of: Callable[[str], str | None] | None = None,
    ) -> None:
        """Make a writer for a stage.

        Args:
          problems: maps each prompt index to its problem.
          behaviors: returns for a prompt index the expected sample numbers, with their behaviors' names.
          answer_of: returns the answer in a response or None, to count malformed responses; None: do not.
        """
        self.stage, self.problems, self.behaviors, self.answer_of = stage, problems, behaviors, answer_of
        self.reward, self.scored, self.write_seconds = 0.0, 0, 0.0
        self.examples: dict[str, str] = {}
        self._filling: dict[int, list[_Scored]] = collections.defaultdict(list)
        self._sizes: dict[int, int] = {}
        self._unscored: dict[int, list[Future[Score]]] = {}  # pending scores of full shards
        self._writer = ThreadPoolExecutor(1, "shards")
        self._writing: collections.deque[Future[None]] = collections.deque()

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.shutdown()

    def add(self, response: Response, score: "Future[Score]", text: str = "") -> None:
        """Add a response, the future of its score and its text; start to write shards that are complete."""
        shard = response.index // self.stage.prompts_per_shard
        filling = self._filling[shard]
        filling.append((response, score, text))
        if len(filling) == self._expected(shard):
            self._unscored[shard] = [score for _, score, _ in filling]
        if self._unscored:
            self._write_complete()

    def _expected(self, shard: int) -> int:
        """Return the number of responses in a full shard."""
        if shard not in self._sizes:
            self._sizes[shard] = sum(len(self.behaviors(i)) for i in self.stage.shard_prompts(shard))
        return self._sizes[shard]

    def finish(self, stopped: Callable[[], bool] = lambda: False) -> float:
        """Write all full shards to disk; return the seconds for which this call waited for scores.

        Once `stopped` returns True, wait no more, and write only the shards whose scores are all known.
        """
        started = time.monotonic()
        for score in [score for scores in self._unscored.values() for score in scores]:
            if not known_score(score, stopped):
                break
        waited = time.monotonic() - started
        self._write_complete()
        while self._writing:
            self._writing.popleft().result()
        return waited

    def _write_complete(self) -> None:
        """Give the full shards whose scores are all known to the writing thread."""
        for shard, scores in list(self._unscored.items()):
            while scores and scores[-1].done():
                scores.pop()
            if not scores:
                del self._unscored[shard]
                self._writing.append(self._writer.submit(self._write, shard, self._filling.pop(shard)))
        while self._writing and self._writing[0].done():
            self._writing.popleft().result()  # raises the error of a failed write

    def _write(self, shard: int, responses: list[_Scored]) -> None:
        started = time.monotonic()
        groups: dict[int, list[_Scored]] = {index: [] for index in self.stage.shard_prompts(shard)}
        for scored in sorted(responses, key=lambda scored: scored[0].sample):
            groups[scored[0].index].append(scored)
        self.stage.write_shard(shard, [self._group(index, group) for index, group in groups.items() if group])
        self.write_seconds += time.monotonic() - started

    def _group(self, index: int, responses: list[_Scored]) -> Group:
        rollouts, problem, names = [], self.problems[index].id, self.behaviors(index)
        for response, future, text in responses:
            score = future.result()
            self.reward += score.value
            if score.status != "ok":
                self.examples.setdefault(score.status, failure(problem, score.detail))
            rollouts.append(
                Rollout(
                    response.tokens,
                    response.logprobs,
                    score.value,
                    response.finish_reason,
                    score.status,
                    self._malformed(response, score, text),
                    dict(score.parts),
                    names[response.sample],
                    response.mask,
                )
            )
        self.scored += len(rollouts)
        return Group(index, problem, responses[0][0].prompt_tokens, tuple(rollouts))

    def _malformed(self, response: Response, score: Score, text: str) -> bool | None:
        if self.answer_of is None:
            return None
        if response.finish_reason != "stop" or score.correctness >= _RIGHT:  # a right answer was read already
            return False
        return self.answer_of(text) is None
