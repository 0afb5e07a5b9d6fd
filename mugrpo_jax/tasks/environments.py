"""Environments: functions that answer the model, so that a response has several turns.

An environment is a function `environment(conversation, problem)`. The conversation is a list of messages
(`{"role": ..., "content": ...}`): the prompt, and then in turn what the model wrote (`assistant`) and what
the environment said. The function returns the next message as text, or None if the response ends here. It
depends on its arguments alone, so that a run that resumes gets the same messages.
"""

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self

from mugrpo_jax.tasks.calculator import calculator
from mugrpo_jax.tasks.own_functions import own_function
from mugrpo_jax.tasks.processors import usable_processors
from mugrpo_jax.tasks.scoring import describe, shortened
from mugrpo_jax.tasks.task import Message, Problem
from mugrpo_jax.tasks.worker_pool import WorkerPool

EnvironmentFunction = Callable[[Sequence[Message], Problem], str | None]

ENVIRONMENTS: Mapping[str, Callable[..., str | None]] = MappingProxyType({"calculator": calculator})
"""The built-in environments. All are fast, so they run in the main process."""


@dataclass(frozen=True)
class Answer:
    """What an environment said.

    Attributes:
      message: the next message; None if the response ends here, or if the environment failed.
      status: `ok`, or one of `scoring.FAILURES`: `timeout`, `crash`, `error` (it raised an exception) or
        `invalid` (it returned neither None nor text with at least one character).
      detail: why it failed.
    """

    message: str | None = None
    status: str = "ok"
    detail: str = ""


def load_environment(name: str, options: Mapping[str, Any] | None = None) -> EnvironmentFunction:
    """Return an environment: `name` is a key of `ENVIRONMENTS` or `module:function`; `options` go to it.

    >>> load_environment("calculater")
    Traceback (most recent call last):
    ValueError: environment is 'calculater'; did you mean calculator? possible: calculator or ...
    """
    arguments = "(conversation, problem)"
    function = ENVIRONMENTS.get(name) or own_function("environment", name, ENVIRONMENTS, arguments)
    options = dict(options or {})
    try:
        inspect.signature(function).bind([], None, **options)
    except TypeError as error:
        raise ValueError(
            f"environment {name!r}: {error}; possible: a function {arguments}, and a keyword argument for "
            "each of environment.options"
        ) from None
    except ValueError:
        pass  # a built-in function without a signature
    return functools.partial(function, **options)


def call_environment(
    environment: EnvironmentFunction, conversation: Sequence[Message], problem: Problem
) -> Answer:
    """Call an environment; an exception or an impossible result becomes a status."""
    try:
        message: Any = environment([dict(message) for message in conversation], problem)
    except (Exception, SystemExit) as error:  # an environment that calls `sys.exit` must not end the run
        return Answer(None, "error", describe(error))
    if message is None or (isinstance(message, str) and message):
        return Answer(message)
    return Answer(None, "invalid", shortened(f"returned {message!r}; possible: text, or None at the end"))


class Environment(ABC):
    """Asks an environment. Use it in a `with` statement, which closes it."""

    @abstractmethod
    def ask(self, conversation: Sequence[Message], problem: Problem) -> "Future[Answer]":
        """Start to ask what follows the last turn. The result of the future is the answer."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class InlineEnvironment(Environment):
    """Calls the environment in the calling thread, without a deadline."""

    def __init__(self, name: str, options: Mapping[str, Any] | None = None) -> None:
        self._function = load_environment(name, options)

    def ask(self, conversation: Sequence[Message], problem: Problem) -> "Future[Answer]":
        """Call the environment at once and return a finished future."""
        future: Future[Answer] = Future()
        future.set_result(call_environment(self._function, conversation, problem))
        return future

    def close(self) -> None:
        """Do nothing, because there are no resources to release."""


class EnvironmentPool(Environment):
    """Calls the environment in worker processes with a deadline, see `worker_pool`."""

    def __init__(
        self, name: str, options: Mapping[str, Any] | None, *, workers: int, deadline_s: float, memory_mb: int
    ) -> None:
        load_environment(name, options)  # raises an error for a wrong name here and not in a worker
        hello = {"kind": "environment", "name": name, "options": dict(options or {})}
        self._pool = WorkerPool(hello, workers=workers, deadline_s=deadline_s, memory_mb=memory_mb)

    def ask(self, conversation: Sequence[Message], problem: Problem) -> "Future[Answer]":
        """Queue the question for a worker."""
        item = {"conversation": list(conversation), "problem": problem.as_dict()}
        return self._pool.submit(item, lambda reply: Answer(**reply))

    def close(self) -> None:
        """Remove all questions from the queue and end the workers."""
        self._pool.close()


def open_environment(
    name: str,
    options: Mapping[str, Any] | None = None,
    *,
    workers: int | None = None,
    deadline_s: float = 5.0,
    memory_mb: int = 2048,
) -> Environment:
    """Return an environment that can be asked.

    Args:
      name, options: as in `load_environment`.
      workers: number of worker processes. 0 means to call it in this process, without a deadline. None means
        0 for the built-in environments, and one worker per usable processor for your own.
      deadline_s: most seconds for one message.
      memory_mb: most megabytes of address space of a worker (only enforced on Linux).
    """
    if workers is None:
        workers = 0 if name in ENVIRONMENTS else usable_processors()
    if workers == 0:
        return InlineEnvironment(name, options)
    return EnvironmentPool(name, options, workers=workers, deadline_s=deadline_s, memory_mb=memory_mb)
