"""Files of lines and JSON: append a line that survives a SIGKILL, and read files with one clear error."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mugrpo_jax.files.storage import is_remote, write_atomically

UPLOAD_S = 60.0  # an object to which lines are appended is uploaded after so many seconds, or by `sync`


class LineFile:
    """A file to which lines are appended.

    On a local disk, each line is written at once. In a bucket, the lines are kept in memory, and the whole
    file is uploaded by `sync`, and by `append` if the last upload is more than `UPLOAD_S` seconds ago.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._content: bytearray | None = None  # of a file in a bucket; None before it is read
        self._uploaded, self._complete = time.monotonic(), True

    def append(self, line: str) -> None:
        """Append a line, which must end with a line break."""
        if not is_remote(self.path):
            with self.path.open("a") as file:
                file.write(line)
            return
        if self._content is None:
            self._content = bytearray(self.path.read_bytes() if self.path.exists() else b"")
        self._content += line.encode()
        self._complete = False
        if time.monotonic() - self._uploaded > UPLOAD_S:
            self.sync()

    def sync(self) -> None:
        """Upload the file if lines were appended since the last upload; nothing to do on a local disk."""
        if self._content is not None and not self._complete:
            write_atomically(self.path, bytes(self._content))
            self._uploaded, self._complete = time.monotonic(), True

    def replace(self, text: str) -> None:
        """Replace all lines."""
        write_atomically(self.path, text)
        self._content, self._complete = None, True


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; raise a `ValueError` with the path if the file has anything else."""
    try:
        value = json.loads(path.read_bytes())
    except RecursionError:
        raise ValueError(f"{path}: not valid JSON (nested too deeply)") from None
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: a JSON {type(value).__name__}; expected an object with keys and values")
    return value


def read_json_lines(path: Path, *, skip_damaged: bool = False) -> Iterator[tuple[int, Any]]:
    """Yield the line number (from 1) and the value of every JSON line; nothing if the file does not exist.

    Empty lines are skipped. By default, a last line without a line break is also skipped, because the write
    was interrupted, and any other line that is not JSON raises a `ValueError`. With `skip_damaged`, every
    line that is not JSON is skipped, and a valid last line is kept even without a line break.
    """
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    for number, line in enumerate(lines if skip_damaged else lines[:-1], 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            if skip_damaged:
                continue
            raise ValueError(f"{path}:{number}: not valid JSON ({error})") from None
        yield number, value


def cut_unfinished_line(path: Path) -> None:
    """Remove an incomplete last line, so that the next line can be appended."""
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        with path.open("r+b") as file:
            file.truncate(end)
