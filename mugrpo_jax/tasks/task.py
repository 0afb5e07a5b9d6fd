"""Define `Problem` and `Task`: problems to train on, problems to test on, and the name of a reward."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

Message = dict[str, str]
Prompt = str | tuple[Message, ...]


@dataclass(frozen=True)
class Problem:
    """One prompt with its answer.

    Attributes:
      id: unique among the training problems, or among the test problems, of a task.
      prompt: plain text, or chat messages (`{"role": ..., "content": ...}`) for the tokenizer's template.
      answer: the right answer, in the form that the reward expects.
      solution: a worked solution, to train on in a warm start; None if there is none.
      turns: the worked solution as turns of the model and messages of the environment, one after the other,
        for tasks with an environment; `solution` is then their text together.
      conversation: while a response is scored that an environment answered: the prompt and all turns and
        messages; otherwise empty.
      place: the file and line that the problem was read from, for error messages; empty if there is none.
      extra: other columns of its data, by name, for rewards and environments of your own.
    """

    id: str
    prompt: Prompt
    answer: str
    solution: str | None = None
    turns: tuple[str, ...] = ()
    conversation: tuple[Message, ...] = field(default=(), compare=False)
    place: str = field(default="", compare=False)
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name. They are not copied, because `extra` may be large."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __str__(self) -> str:
        """Return the problem's name for messages: its place, if it has one, and its id."""
        return f"{self.place}: problem {self.id}" if self.place else f"problem {self.id}"


@dataclass(frozen=True)
class Verdict:
    """What a reward may return in place of a number, to say also why the response has this value.

    Attributes:
      value: the reward.
      status: `ok`, or a word for the way in which the response is wrong, such as `wrong_answer`.
      detail: a line about the reason.
    """

    value: float
    status: str = "ok"
    detail: str = ""


RewardFunction = Callable[[str, Problem], float | Verdict]
LARGEST_REWARD = 1e30  # also its sum over all responses of a stage fits into float32


@dataclass(frozen=True)
class Task:
    """A task has problems to train on, other problems to test on, and a reward's name for `load_reward`.

    `sources` maps the name of each file or Hub dataset that was read to a hash of the problems in it.
    """

    name: str
    train: Sequence[Problem]
    test: Sequence[Problem]
    reward: str
    sources: Mapping[str, str] = field(default_factory=dict)


def as_prompt(text: str, chat: bool) -> Prompt:
    """Make a prompt: a chat message of the user if `chat` is True, otherwise the text and a line break."""
    return ({"role": "user", "content": text},) if chat else text + "\n"


def conversation_of(prompt: Prompt, said: Sequence[str], role: str = "user") -> tuple[Message, ...]:
    """Return a conversation as messages: the prompt, then the model's turns and the messages between them.

    >>> conversation_of("1+2=", ["1+2=", "3", ";3"])[1:]
    ({'role': 'assistant', 'content': '1+2='}, {'role': 'user', 'content': '3'}, ...
    """
    start = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else tuple(prompt)
    roles = ("assistant", role)
    return (*start, *({"role": roles[i % 2], "content": text} for i, text in enumerate(said)))


class LazyProblems(Sequence[Problem]):
    """A sequence that calls `make(i)` whenever item `i` is read. `make(i)` must depend only on `i`."""

    def __init__(self, make: Callable[[int], Problem], indices: range):
        self._make = make
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return LazyProblems(self._make, self._indices[index])
        return self._make(self._indices[index])

    def __iter__(self) -> Iterator[Problem]:
        return map(self._make, self._indices)
