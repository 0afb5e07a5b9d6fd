"""Load problems from JSONL files, from Parquet files and from the Hugging Face Hub.

A source is a string: `path/to/file.jsonl`, `path/to/file.parquet`, `hub:owner/name:split` or
`hub:owner/name/subset:split`. `Columns` says how to make a problem from the columns of a row.
"""

import hashlib
import json
import math
import re
import string
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mugrpo_jax.tasks.math_answers import boxed_answer
from mugrpo_jax.tasks.near_names import possible_names
from mugrpo_jax.tasks.synthetic_task import check_integer
from mugrpo_jax.tasks.task import Message, Problem, Prompt, Task

Row = tuple[str, Mapping[str, Any]]  # the place of the row (file and line) for error texts, and its columns


def _after_hashes(text: str) -> str | None:
    _, mark, answer = text.rpartition("####")
    return answer.strip() if mark else None


ANSWER_PARTS: Mapping[str, Callable[[str], str | None]] = MappingProxyType(
    {"whole": str.strip, "hashes": _after_hashes, "boxed": boxed_answer}
)
"""Functions that extract the answer from the answer column: the whole text, the text after the last `####`,
or the content of the last `\\boxed{...}`. A function returns None if the text has no such part."""


@dataclass(frozen=True)
class Columns:
    """Settings for making a problem from a row of a dataset.

    Attributes:
      template: the prompt with column names in braces, such as `"{question}"`. It is a text, or a tuple of
        chat messages whose `content` is such a text. Write a literal brace twice.
      answer: the column with the answer.
      answer_part: a key of `ANSWER_PARTS`.
      solution: the column with a worked solution for a warm start, or None.
      id: the column with an id. None means that the ids are 0, 1, 2, ...
      extra: columns that a reward or an environment gets as they are, in `problem.extra`.
    """

    template: str | tuple[Message, ...] = "{question}"
    answer: str = "answer"
    answer_part: str = "whole"
    solution: str | None = None
    id: str | None = None
    extra: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.answer_part, str) or self.answer_part not in ANSWER_PARTS:
            raise ValueError(f"answer_part is {self.answer_part!r}; possible: {', '.join(ANSWER_PARTS)}")
        for key in ("answer", "solution", "id"):
            if not isinstance(getattr(self, key), str | None):
                raise ValueError(f"{key} is {getattr(self, key)!r}; possible: the name of a column")
        if not isinstance(self.extra, tuple) or not all(isinstance(name, str) for name in self.extra):
            raise ValueError(f"extra is {self.extra!r}; possible: a list of column names")
        if not isinstance(self.template, str | tuple):
            possible = _in_quotes(self.template) or "text, or a list of chat messages"
            raise ValueError(f"template is {self.template!r}; possible: {possible}")
        if isinstance(self.template, str):
            columns = _fields(self.template)
        else:
            columns = [name for message in self.template for name in _message_fields(message)]
        if not columns:
            raise ValueError(
                f"template {self.template!r} has no column in braces; all prompts would be equal"
            )

    def prompt(self, row: Mapping[str, Any]) -> Prompt:
        """Fill the template with the row's columns."""
        if isinstance(self.template, str):
            return _fill(self.template, row)
        return tuple({"role": m["role"], "content": _fill(m["content"], row)} for m in self.template)

    def problem(self, row: Mapping[str, Any], number: int) -> Problem:
        """Make a problem from a row. `number` is the problem's id if there is no id column."""
        answer = ANSWER_PARTS[self.answer_part](_text(_column(row, self.answer, "answer")))
        if not answer:
            raise ValueError(f"column {self.answer!r} has no answer (answer_part is {self.answer_part!r})")
        solution = None
        if self.solution is not None:  # remove GSM8K's calculator notes, such as <<1+1=2>>
            solution = re.sub(r"<<[^<>]*>>", "", _text(_column(row, self.solution, "solution")))
        name = str(number) if self.id is None else _text(_column(row, self.id, "id"))
        extra = {column: _plain(row, column) for column in self.extra}
        return Problem(name, self.prompt(row), answer, solution, extra=extra)


def load_problems(source: str, columns: Columns) -> list[Problem]:
    """Read all problems from a source. The text of a `ValueError` names the source and the line or row."""
    problems: dict[str, Problem] = {}
    for where, row in _rows(source):
        try:
            problem = columns.problem(row, len(problems))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        if problem.id in problems:
            raise ValueError(f"{where}: id {problem.id!r} is there twice; ids must be unique")
        problems[problem.id] = replace(problem, place=where)
    if not problems:
        raise ValueError(f"{source}: no problems in it")
    return list(problems.values())


def dataset_task(
    *,
    name: str = "dataset",
    train: str | None = None,
    test: str | None = None,
    holdout: int = 0,
    columns: Columns | Mapping[str, Any] | None = None,
    reward: str = "math",
) -> Task:
    """Make a task from a source of training problems, a source of test problems, or both.

    `holdout` takes at least so many problems out of the training source; they are the test problems. The
    hashes of the prompts decide which, not the order of the rows, and equal prompts stay together.

    `columns` is a `Columns` object, or a mapping with some fields of `Columns`. `reward` is a name for
    `load_reward`. The forms of a source are listed at the top of this module.
    """
    if train is None and test is None:
        raise ValueError(f"{name}: neither train nor test is given; possible: a file or hub:owner/name:split")
    check_integer(name, "holdout", holdout, 0, sys.maxsize)
    if holdout and (train is None or test is not None):
        reason = "there is no train" if train is None else f"test is {test}"
        raise ValueError(f"{name}: holdout takes test problems out of train, but {reason}; set holdout=0")
    columns = columns if isinstance(columns, Columns) else _columns(columns or {})
    problems = {source: load_problems(source, columns) for source in (train, test) if source is not None}
    sources = {source: _digest(found) for source, found in problems.items()}
    if train is not None and test is not None and sources[train] == sources[test]:
        raise ValueError(
            f"{test}: has the same problems as {train}; held-out problems must be others (to evaluate "
            "on training problems, leave the option train out: train=null)"
        )
    lists = [[] if source is None else problems[source] for source in (train, test)]
    if holdout and train is not None:
        lists = _split(train, lists[0], holdout)
    return Task(name=name, train=lists[0], test=lists[1], reward=reward, sources=sources)


def _split(source: str, problems: Sequence[Problem], holdout: int) -> list[list[Problem]]:
    """Return the training problems, and at least `holdout` test problems: those whose prompts hash lowest."""
    places = {problem.id: hashlib.sha256(repr(problem.prompt).encode()).digest() for problem in problems}
    if holdout >= len(problems):
        raise ValueError(f"{source}: has {len(problems)} problems, holdout is {holdout}; none would be left")
    last = sorted(places.values())[holdout - 1]
    train = [problem for problem in problems if places[problem.id] > last]
    if not train:
        raise ValueError(f"{source}: too many equal prompts for holdout={holdout}; none would be left")
    test = [problem for problem in problems if places[problem.id] <= last]
    return [train, sorted(test, key=lambda problem: places[problem.id])]


def _digest(problems: Iterable[Problem]) -> str:
    """Return a hash of problems; raise an error for text that is not Unicode, such as half of an emoji."""
    digest = hashlib.sha256()
    for problem in problems:
        content: list[Any] = [problem.id, problem.prompt, problem.answer, problem.solution]
        content += [problem.extra] if problem.extra else []
        try:
            digest.update(json.dumps(content, ensure_ascii=False).encode())
        except UnicodeEncodeError as error:
            raise ValueError(f"{problem}: not valid Unicode: {error}") from None
    return digest.hexdigest()


def _columns(settings: Mapping[str, Any]) -> Columns:
    known = [field.name for field in fields(Columns)]
    for key in settings:
        if key not in known:
            raise ValueError(f"columns: no key {key!r}; {possible_names(key, known)}")
    given: Any = dict(settings)
    for key in ("template", "extra"):
        if isinstance(given.get(key), list):
            given[key] = tuple(given[key])
    try:
        return Columns(**given)
    except ValueError as error:
        raise ValueError(f"columns: {error}") from None


def first_columns(source: str) -> list[str]:
    """Return the names of the columns that have a text or a number in the first row of a source."""
    _, row = next(_rows(source), ("", {}))
    return [name for name, value in row.items() if isinstance(value, str | int | float) and value != ""]


def count_problems(source: str) -> int:
    """Return the number of rows of a .jsonl or .parquet file, without reading their content."""
    if source.endswith(".parquet"):
        import pyarrow.parquet

        return int(pyarrow.parquet.ParquetFile(source).metadata.num_rows)
    with Path(source).open("rb") as lines:
        return sum(1 for line in lines if line.strip())


def _rows(source: str) -> Iterator[Row]:
    if source.startswith("hub:"):
        return _hub_rows(source)
    path = Path(source)
    readers = {".jsonl": _jsonl_rows, ".parquet": _parquet_rows}
    if path.suffix not in readers:
        possible = "a .jsonl or .parquet file or hub:owner/name:split"
        raise ValueError(f"{source}: problems cannot be read from it; possible: {possible}")
    if not path.is_file():
        place = "" if path.is_absolute() else f" in this folder, {Path.cwd()}"
        raise ValueError(f"{source}: no such file{place}")
    return readers[path.suffix](path)


def _jsonl_rows(path: Path) -> Iterator[Row]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}:{number}: not UTF-8 text: {error}") from None
            if text.strip():
                yield f"{path}:{number}", _json_object(f"{path}:{number}", text)


def _json_object(where: str, line: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line.rstrip("\r\n"))
    except (ValueError, RecursionError) as error:
        # The position in the message of json counts lines inside this one line.
        wrong = f"{error.msg}, column {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else error
        raise ValueError(f"{where}: not JSON: {wrong}; possible: one JSON object a line") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where}: a {type(row).__name__}; possible: one JSON object a line")
    return row


def _parquet_rows(path: Path) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        install = "pip install 'mugrpo-jax[parquet]'"
        raise ValueError(f"{path}: reading Parquet needs pyarrow: {install}") from None
    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path}: not a Parquet file: {str(error).splitlines()[0]}") from None
    yield from ((f"{path}: row {i}", row) for i, row in enumerate(rows))


def _hub_rows(source: str) -> Iterator[Row]:
    match = re.fullmatch(r"hub:([^/:]+/[^/:]+)(?:/([^/:]+))?:([^:]+)", source)
    if match is None:
        forms = "hub:owner/name:split or hub:owner/name/subset:split"
        raise ValueError(f"{source}: not a dataset of the Hub; possible: {forms}")
    try:
        import datasets
    except ImportError:
        raise ValueError(f"{source}: the Hub needs datasets: pip install 'mugrpo-jax[hub]'") from None
    try:
        rows = datasets.load_dataset(match[1], match[2], split=match[3])
    except Exception as error:  # the type depends on the reason: offline, missing or gated
        raise ValueError(f"{source}: cannot be loaded: {' '.join(str(error).split())[:200]}") from error
    yield from ((f"{source}: row {i}", row) for i, row in enumerate(rows))


def _in_quotes(template: Any) -> str | None:
    """Return the text that was meant by `template: {question}`, which YAML reads as keys without values."""
    if isinstance(template, Mapping) and template and not any(template.values()):
        text = "".join(f"{{{name}}}" for name in template)
        return f"in quotes, '{text}' (in a shell twice, \"'{text}'\")"
    return None


def _message_fields(message: Any) -> list[str]:
    """Check a chat message of a template, and return the columns that it names."""
    if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
        raise ValueError(f"template has a message {message!r}; possible keys: role and content, both")
    if not all(isinstance(text, str) for text in message.values()):
        raise ValueError(f"template has a message {message!r}; role and content must be text")
    return _fields(message["content"])


def _fields(template: str) -> list[str]:
    try:
        return [field for _, field, _, _ in string.Formatter().parse(template) if field is not None]
    except ValueError as error:
        raise ValueError(f"template {template!r}: {error}; a brace that is meant is written twice") from None


def _fill(template: str, row: Mapping[str, Any]) -> str:
    """Fill the template with columns. In braces, only column names are allowed: `{a.b}` and `{a[0]}` fail."""
    for field in _fields(template):
        _column(row, field, "template")
    parts = string.Formatter().parse(template)
    return "".join(text + ("" if field is None else _text(row[field])) for text, field, _, _ in parts)


def _column(row: Mapping[str, Any], column: str, wanted_by: str) -> Any:
    value = row.get(column)
    missing = isinstance(value, float) and math.isnan(value)  # as pandas writes it
    if value is None or missing:
        state = "is empty" if column in row else "is not there"
        raise ValueError(f"column {column!r}, named by {wanted_by}, {state}; possible: {', '.join(row)}")
    return value


def _plain(row: Mapping[str, Any], column: str) -> Any:
    """Return a column as it is. It may be empty, but it must be something that JSON can say."""
    if column not in row:
        raise ValueError(f"column {column!r}, named by extra, is not there; possible: {', '.join(row)}")
    try:
        return json.loads(json.dumps(row[column]))  # a copy with the same types in every worker
    except (TypeError, ValueError) as error:
        possible = "text, numbers, lists and objects of them"
        raise ValueError(
            f"column {column!r}, named by extra: {error}; possible: {possible}; convert it in the data"
        ) from None


def _text(value: Any) -> str:
    """Convert a value to text: lists and objects to JSON, a float that is a whole number without a point."""
    if isinstance(value, list | dict):
        try:
            return json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError):  # such as dates in a Parquet file
            return str(value)
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
