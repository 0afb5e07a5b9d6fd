"""What goes into the sampler and what comes out: plain frozen records of tokens."""

import dataclasses
import itertools
import queue
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from typing import Literal

import numpy as np

MAX_STOPS = 8


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """One prompt and the samples wanted from it; the prompt is run through the model once for all of them.

    Attributes:
      prompt: token ids, at least one.
      seeds: one integer below 2**64 a sample; with the prompt and the settings it fixes the sample.
      max_tokens: longest response, one number for all samples or one each.
      temperature: 1 is the model's own distribution, 0 is greedy.
      top_k: keep the `top_k` most likely tokens; 0 keeps all.
      top_p: keep the most likely tokens that together reach this probability; 1 keeps all.
      stop: token ids that end a response; the one that did is part of it.
      index: the caller's name for the request.
    """

    prompt: Sequence[int] | np.ndarray
    seeds: Sequence[int] | np.ndarray
    max_tokens: int | Sequence[int]
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop: Sequence[int] = ()
    index: int = 0

    def __post_init__(self) -> None:
        def refuse(field: str, what: str) -> None:
            raise ValueError(f"request {self.index}: {field} {what}")

        object.__setattr__(self, "prompt", np.asarray(self.prompt, np.int32))
        if isinstance(self.max_tokens, np.integer):
            object.__setattr__(self, "max_tokens", int(self.max_tokens))
        if len(self.prompt) == 0:
            refuse("prompt", "is empty; it needs at least one token")
        if outside := [seed for seed in self.seeds if not 0 <= seed < 2**64]:
            refuse("seeds", f"must lie in [0, 2**64), got {outside[0]}")
        if not isinstance(self.max_tokens, int) and len(self.max_tokens) != len(self.seeds):
            refuse("max_tokens", f"has {len(self.max_tokens)} entries for {len(self.seeds)} samples")
        if min(self.limits, default=1) < 1:
            refuse("max_tokens", f"must be at least 1, got {min(self.limits)}")
        if not 0 <= self.temperature < float("inf"):
            refuse("temperature", f"must be 0 (greedy) or positive, got {self.temperature}")
        if self.top_k < 0:
            refuse("top_k", f"must be 0 (off) or positive, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            refuse("top_p", f"must lie in (0, 1], got {self.top_p}")
        if len(self.stop) > MAX_STOPS:
            refuse("stop", f"has {len(self.stop)} token ids; at most {MAX_STOPS} are possible")

    @property
    def limits(self) -> Sequence[int]:
        """Longest response of each sample."""
        return [self.max_tokens] * len(self.seeds) if isinstance(self.max_tokens, int) else self.max_tokens


@dataclasses.dataclass(frozen=True, eq=False)
class Response:
    """One finished sample.

    Attributes:
      index: `index` of its request.
      sample: which of the request's samples, counted from 0.
      prompt_tokens: the request's prompt, int32.
      tokens: what was sampled, int32, the end token included.
      logprobs: float32, one a token, under the distribution it was sampled from (greedy: at temperature 1).
      finish_reason: `stop` when the last token is a stop token, else `length`.
    """

    index: int
    sample: int
    prompt_tokens: np.ndarray
    tokens: np.ndarray
    logprobs: np.ndarray
    finish_reason: Literal["stop", "length"]


def read_ahead(requests: Iterable[Request], thread: Executor, count: int = 64) -> Iterator[Request]:
    """The same requests in the same order, made by another thread, which begins now.

    They are handed out as soon as `count` of them are made. An error is raised as soon as it is known, not in
    its turn: what is sampled until then may be of no use.
    """
    source = iter(requests)
    made: queue.SimpleQueue[list[Request]] = queue.SimpleQueue()
    errors: list[Exception] = []

    def make() -> None:
        try:
            batch = list(itertools.islice(source, count))
        except Exception as error:
            errors.append(error)
            batch = []
        made.put(batch)
        if batch:
            thread.submit(make)  # refused, and so the end, when the thread is shut down

    def take() -> Iterator[Request]:
        while batch := made.get():
            if errors:
                break
            yield from batch
        if errors:
            raise errors[0]

    thread.submit(make)
    return take()


def request_seeds(*path: int, samples: int) -> np.ndarray:
    """Seeds `[samples]` uint64 for the item that a path of integers names, such as `(seed, stage, item)`.

    Sample `i` has the same seed however many samples are asked for.

    >>> bool((request_seeds(0, 7, samples=2) == request_seeds(0, 7, samples=8)[:2]).all())
    True
    """
    return np.random.SeedSequence(path).generate_state(samples, np.uint64)
