"""Read and write files of rows: JSON Lines (`.jsonl`) and Parquet (`.parquet`)."""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mugrpo_jax.files import discard, flush, hold, publish_new
from mugrpo_jax.rollouts.record_files import RolloutError

_ROWS = 256  # in one row group of a Parquet file, so that neither side holds the whole file in memory


def read_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the number of every row, from 1, and the row. A line that is not JSON gives its `ValueError`."""
    if not path.is_file():
        raise RolloutError(f"{path}: not found")
    if path.suffix == ".parquet":
        yield from _parquet_rows(path)
    elif path.suffix in (".jsonl", ".json", ".ndjson"):
        yield from _json_rows(path)
    else:
        raise RolloutError(f"{path}: unknown kind of file; possible: .jsonl and .parquet")


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]], *, columns: Mapping[str, Any]) -> int:
    """Write rows to a new file, under a temporary name that becomes `path` at the end; return their number.

    `columns` maps each column to its Parquet type as text: `string`, `list<int32>` and so on.
    """
    if path.exists():
        raise RolloutError(f"{path}: exists already; remove it, or choose another --out")
    temporary = path.with_name(path.name + ".tmp")
    write = _write_parquet if path.suffix == ".parquet" else _write_json
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with hold(temporary):
            try:
                count = write(temporary, rows, columns)
                flush(temporary)
                if not publish_new(temporary, path):
                    raise RolloutError(f"{path}: another process has written it in the meantime")
            finally:
                discard(temporary)
    except OSError as error:
        raise RolloutError(f"{path}: cannot be written ({error.strerror or error})") from None
    return count


def _json_rows(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line, parse_constant=_refuse_constant)
            except (ValueError, RecursionError) as error:
                yield number, ValueError(f"not valid JSON ({error})")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number in JSON")


def _write_json(path: Path, rows: Iterable[Mapping[str, Any]], _: Mapping[str, Any]) -> int:
    """A float32 is written with the digits of the equal float64, so that it is read back exactly."""
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
            count += 1
    return count


def _parquet_rows(path: Path) -> Iterator[tuple[int, Any]]:
    with _pyarrow(path) as pyarrow:
        number = 0
        try:
            for batch in pyarrow.parquet.ParquetFile(path).iter_batches(_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
        except pyarrow.ArrowException as error:
            raise RolloutError(f"{path}: not a Parquet file ({str(error).splitlines()[0]})") from None


def _write_parquet(path: Path, rows: Iterable[Mapping[str, Any]], columns: Mapping[str, Any]) -> int:
    with _pyarrow(path.with_suffix("")) as pyarrow:
        schema = pyarrow.schema([(name, _kind(pyarrow, kind)) for name, kind in columns.items()])
        count, waiting = 0, []
        with pyarrow.parquet.ParquetWriter(path, schema) as writer:
            for row in rows:
                waiting.append(row)
                count += 1
                if len(waiting) == _ROWS:
                    writer.write_table(pyarrow.Table.from_pylist(waiting, schema=schema))
                    waiting = []
            if waiting:
                writer.write_table(pyarrow.Table.from_pylist(waiting, schema=schema))
    return count


def _kind(pyarrow: Any, kind: Any) -> Any:
    """Return the Parquet type of a column: text such as `list<int32>` or `map<double>`, or a dict of such."""
    if isinstance(kind, Mapping):
        return pyarrow.struct([(name, _kind(pyarrow, inner)) for name, inner in kind.items()])
    outer, _, inner = kind.rstrip(">").partition("<")
    if outer == "list":
        return pyarrow.list_(_kind(pyarrow, inner))
    if outer == "map":
        return pyarrow.map_(pyarrow.string(), _kind(pyarrow, inner))
    return getattr(pyarrow, {"double": "float64", "bool": "bool_"}.get(outer, outer))()


@contextmanager
def _pyarrow(path: Path) -> Iterator[Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise RolloutError(f"{path}: Parquet needs pyarrow: pip install 'mugrpo-jax[parquet]'") from None
    yield pyarrow
