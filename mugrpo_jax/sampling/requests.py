"""The requests that a sampler takes and the responses that it yields, and functions that make requests."""

import dataclasses
import difflib
import itertools
import queue
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

import jax
import numpy as np

from mugrpo_jax.models import Tokenizer

MAX_STOPS = 8
SAMPLING_DTYPES = ("bfloat16", "float32", "int8", "fp8")

Message = Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class SamplingSettings:
    """How to sample. The same model, prompts and settings give the same responses.

    Attributes:
      samples: number of responses per prompt.
      max_tokens: maximum number of tokens in a response.
      temperature: 1 is the model's own distribution, 0 is greedy.
      top_k: sample only from the `top_k` most likely tokens; 0 means all tokens.
      top_p: sample only from the most likely tokens that together reach this probability; 1 means all tokens.
      seed: the seed of each sample is derived from this seed, the prompt index and the sample number.
      dtype: one of `SAMPLING_DTYPES`, for weights and KV cache; with `int8` and `fp8`, the matrices of the
        layers have 8 bits and the rest is in bfloat16. None is float32 on CPU and bfloat16 elsewhere.
    """

    samples: int = 1
    max_tokens: int = 512
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.dtype is None:
            object.__setattr__(self, "dtype", "float32" if jax.default_backend() == "cpu" else "bfloat16")
        if self.dtype not in SAMPLING_DTYPES:
            raise ValueError(f"dtype: {self.dtype!r} is not possible; possible: {', '.join(SAMPLING_DTYPES)}")
        if self.samples < 1:
            raise ValueError(f"samples: must be at least 1, got {self.samples}")
        if self.seed < 0:
            raise ValueError(f"seed: must not be negative, got {self.seed}")


def sampling_settings(settings: Mapping[str, Any], *, more: Sequence[str] = ()) -> SamplingSettings:
    """Make `SamplingSettings` of keyword arguments; an unknown name is an error that says what is possible.

    Args:
      more: names of other arguments that the caller of the caller could have meant.

    >>> sampling_settings({"max_token": 8})
    Traceback (most recent call last):
    ValueError: no setting 'max_token', did you mean 'max_tokens'? possible: samples, max_tokens, ...
    """
    known = [field.name for field in dataclasses.fields(SamplingSettings)]
    for name in settings:
        if name not in known:
            near = difflib.get_close_matches(name, [*known, *more], 1)
            guess = f", did you mean {near[0]!r}?" if near else ";"
            raise ValueError(f"no setting {name!r}{guess} possible: {', '.join([*known, *more])}")
    return SamplingSettings(**settings)


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """A request for one or more samples of one prompt. The prompt is prefilled once for all its samples.

    Attributes:
      prompt: token ids, at least one.
      seeds: one integer below 2**64 per sample. Prompt, seed and settings determine the sample.
      max_tokens: maximum number of tokens in a response: one integer for all samples, or one per sample.
      temperature, top_k, top_p: as in `SamplingSettings`.
      stop: token ids that end a response. The stop token is part of the response.
      index: a number that the caller chooses; the responses repeat it as `Response.index`.
      numbers: one number per sample, for `Response.sample`; None means 0, 1, 2, and so on.
    """

    prompt: Sequence[int] | np.ndarray
    seeds: Sequence[int] | np.ndarray
    max_tokens: int | Sequence[int]
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop: Sequence[int] = ()
    index: int = 0
    numbers: Sequence[int] | None = None

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
        """Maximum number of response tokens for each sample."""
        return [self.max_tokens] * len(self.seeds) if isinstance(self.max_tokens, int) else self.max_tokens


@dataclasses.dataclass(frozen=True, eq=False)
class Response:
    """One finished sample.

    Attributes:
      index: the `index` of the request.
      sample: the number of the sample, see `Request.numbers`.
      prompt_tokens: int32, the prompt of the request.
      tokens: int32, the sampled tokens, including the stop token.
      logprobs: float32, the log-prob of each token in the distribution from which it was sampled. For greedy
        tokens, the distribution at temperature 1.
      finish_reason: `stop` if the last token is a stop token, else `length`. With an environment, also what
        the environment gives as the reason.
      mask: bool, True where the model wrote the token, False in messages of an environment, whose log-probs
        are 0. None means that the model wrote all tokens.
      messages: the messages of the environment as text.
      status, detail: `ok`, or how and why the environment failed.
    """

    index: int
    sample: int
    prompt_tokens: np.ndarray
    tokens: np.ndarray
    logprobs: np.ndarray
    finish_reason: str
    mask: np.ndarray | None = None
    messages: tuple[str, ...] = ()
    status: str = "ok"
    detail: str = ""


# Stands for the stage in the seed path of prompts that belong to no run. No path may be the beginning of
# another one, because `SeedSequence` ignores zeros at the end.
NO_RUN = 1 << 21


def make_request(
    prompt: Sequence[int] | np.ndarray,
    settings: SamplingSettings,
    *path: int,
    stop: Iterable[int],
    numbers: Sequence[int] | None = None,
) -> Request:
    """Make a request for samples of one prompt, and derive their seeds from `settings.seed` and `path`.

    Args:
      prompt: token ids.
      path: integers that identify the prompt, such as `(stage, index)`; the last one becomes `Request.index`.
      stop: token ids that end a response.
      numbers: which of the samples 0 to `settings.samples` - 1 to request; None requests all.
    """
    seeds = request_seeds(settings.seed, *path, samples=settings.samples)
    return Request(
        prompt=prompt,
        seeds=seeds if numbers is None else seeds[list(numbers)],
        max_tokens=settings.max_tokens,
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        stop=sorted(stop),
        index=path[-1],
        numbers=numbers,
    )


def encode_prompt(tokenizer: Tokenizer, prompt: str | Sequence[Message]) -> list[int]:
    """Tokenize plain text, or chat messages with the chat template of the tokenizer."""
    return tokenizer.encode(prompt, start=True) if isinstance(prompt, str) else tokenizer.chat(prompt)


def prompt_text(tokenizer: Tokenizer, prompt: str | Sequence[Message]) -> str:
    """Return the text that the model gets: plain text as it is, chat messages in the chat template."""
    return prompt if isinstance(prompt, str) else tokenizer.chat_text(prompt)


def request_seeds(*path: int, samples: int) -> np.ndarray:
    """Derive uint64 seeds `[samples]` from a path of integers, such as `(seed, stage, index of the prompt)`.

    The seed of sample `i` does not depend on the number of samples.

    >>> bool((request_seeds(0, 7, samples=2) == request_seeds(0, 7, samples=8)[:2]).all())
    True
    """
    return np.random.SeedSequence(path).generate_state(samples, np.uint64)


def read_ahead(requests: Iterable[Request], thread: Executor, count: int = 64) -> Iterator[Request]:
    """Return an iterator over `requests`, while another thread makes the requests in advance.

    The thread starts at once and makes batches of `count` requests. If a request cannot be made, the iterator
    raises the error at the end of its current batch, and batches made before the error are discarded. So
    the caller fails early; the samples would probably be discarded anyway.
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
            thread.submit(make)  # raises after the executor is shut down, so that no more are made

    def take() -> Iterator[Request]:
        while batch := made.get():
            if errors:
                break
            yield from batch
        if errors:
            raise errors[0]

    thread.submit(make)
    return take()
