"""Files of records with a JSON file beside each, and the errors that name a file which cannot be used.

Each file is written under a temporary name, flushed and then renamed.
"""

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

from mugrpo_jax.files import (
    discard,
    flush,
    is_remote,
    local_copy,
    make_folder,
    publish,
    publish_new,
    scratch_folder,
    temporary_for,
    wait_for,
    write_atomically,
)


class RolloutError(ValueError):
    """Raised if rollouts cannot be read, written or used. The message names the file and says what to do."""


class DamagedRollouts(RolloutError):
    """Raised if a file of a stage is missing or damaged."""


def write_records(
    path: Path,
    records: Iterable[bytes],
    summary: Mapping[str, Any],
    *,
    replace: bool = True,
    allowed: Callable[[], bool] = lambda: True,
) -> bool:
    """Write an ArrayRecord file and, in a JSON file beside it, `summary` with the checksum of the records.

    Both files are written under a temporary name and renamed, the records last. Before each of them gets its
    name, `allowed` is asked; if it returns False, the file does not get it.

    Args:
      replace: whether the records may replace a file.

    Returns:
      Whether the file of records is there and is ours.
    """
    make_folder(path.parent)
    temporary = temporary_for(path)
    try:
        writer = ArrayRecordWriter(str(temporary), "group_size:1")
        for record in records:
            writer.write(record)
        writer.close()
        flush(temporary)
        text = {**summary, "sha256": sha256(temporary)}
        if not allowed():
            return False
        write_json(path.with_suffix(".json"), text, indent=None)
        if not allowed():
            return False
        if not replace:
            return publish_new(temporary, path)
        publish(temporary, path)
        return True
    except (OSError, RuntimeError) as error:  # the ArrayRecord writer raises RuntimeError
        reason = getattr(error, "strerror", None) or str(error)
        reason = reason.removeprefix("write() failed: ").partition("; writing ")[0]
        raise RolloutError(f"{path}: cannot be written ({reason}); the same command continues") from None
    finally:
        discard(temporary)  # after an error; on a full disk it would take room


def holds_records(path: Path, summary: Mapping[str, Any]) -> bool:
    """Return whether `write_records` wrote this file with this summary, and the file is not damaged."""
    beside = path.with_suffix(".json")
    try:
        return bool(read_json(beside) == {**summary, "sha256": sha256(path)})
    except (RolloutError, FileNotFoundError):  # damaged like a file with a wrong checksum, or missing
        return False


def read_records(path: Path) -> list[bytes]:
    """Return the records of an ArrayRecord file, which may be in a bucket."""
    copies = tempfile.TemporaryDirectory(dir=scratch_folder()) if is_remote(path) else nullcontext("")
    try:
        with copies as folder, closing(ArrayRecordReader(str(local_copy(path, Path(folder))))) as reader:
            return reader.read_all()
    except (OSError, RuntimeError) as error:  # the ArrayRecord reader raises RuntimeError
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise DamagedRollouts(f"{path}: cannot be read ({reason})") from None


def write_json(path: Path, value: Any, *, indent: int | None = 1) -> None:
    """Write `value` to a JSON file, see `write_file`."""
    write_file(path, json.dumps(value, indent=indent).encode())


def write_file(path: Path, data: bytes) -> None:
    """Write a file atomically; raise `RolloutError` if it cannot be written."""
    try:
        write_atomically(path, data)
    except OSError as error:
        raise RolloutError(
            f"{path}: cannot be written ({error.strerror or error}); the same command continues"
        ) from None


def read_json(path: Path, *, patience_s: float = 0.0) -> Any:
    """Return the value in a JSON file; raise `RolloutError` if it is missing or not valid JSON.

    With `patience_s`, wait so many seconds for the file of another host, see `files.wait_for`.
    """
    waited = f" after {patience_s:g} s" if patience_s else ""
    try:
        return wait_for(lambda: json.loads(path.read_bytes()), path, patience_s)
    except FileNotFoundError:
        raise RolloutError(
            f"{path}: not found{waited}; restore it, or put the run on storage that all hosts share"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DamagedRollouts(f"{path}: damaged, not valid JSON{waited} ({error})") from None


def sha256(path: Path) -> str:
    """Return the SHA-256 checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
