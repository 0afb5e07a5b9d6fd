"""What a task is: problems to train on, problems held out, and the reward that judges a response."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

Message = dict[str, str]
Prompt = str | tuple[Message, ...]


@dataclass(frozen=True)
class Problem:
    """One prompt and what is needed to judge and to imitate an answer.

    Attributes:
      id: unique within its part of a task.
      prompt: plain text, or chat messages (`{"role": ..., "content": ...}`) for the tokenizer's template.
      answer: the gold answer, in the form its reward expects.
      solution: a response a model could have written, for a warm start; None where there is none.
    """

    id: str
    prompt: Prompt
    answer: str
    solution: str | None = None


RewardFunction = Callable[[str, Problem], float]


@dataclass(frozen=True)
class Task:
    """Problems in two disjoint parts and the name of the reward, as `load_reward` understands it."""

    name: str
    train: Sequence[Problem]
    test: Sequence[Problem]
    reward: str


class LazyProblems(Sequence[Problem]):
    """Problems made when asked for: `make(i)` must depend on `i` alone. Slices are lazy too."""

    def __init__(self, make: Callable[[int], Problem], indices: range):
        self._make = make
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> Problem: ...

    @overload
    def __getitem__(self, index: slice) -> "LazyProblems": ...

    def __getitem__(self, index: int | slice) -> "Problem | LazyProblems":
        if isinstance(index, slice):
            return LazyProblems(self._make, self._indices[index])
        return self._make(self._indices[index])

    def __iter__(self) -> Iterator[Problem]:
        return map(self._make, self._indices)
