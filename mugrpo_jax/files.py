"""Files that survive a SIGKILL: atomic writes, and JSON lines whose last line may be incomplete."""

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

PATIENCE_S = 60.0  # how long a file that another host has just written may take to be seen here

_T = TypeVar("_T")


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write to a temporary file and rename it, so that even a SIGKILL leaves the old or the new content."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(content.encode() if isinstance(content, str) else content)
    flush(temporary)
    os.replace(temporary, path)


def flush(path: Path) -> None:
    """Wait until the content of a file, or the list of names in a folder, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def wait_for(read: Callable[[], _T], path: Path, seconds: float) -> _T:
    """Return `read()`. While it raises OSError or ValueError, try again, for up to `seconds` seconds.

    Use this for a file that another host has just written: a network file system may show the file late, or
    show it empty or incomplete at first. One printed line says that we wait.
    """
    end, said = time.monotonic() + seconds, False
    while True:
        try:
            return read()
        except (OSError, ValueError):
            if time.monotonic() >= end:
                raise
        if not said:
            print(f"{path}: missing or incomplete here; waiting for it up to {seconds:g} s", flush=True)
            said = True
        time.sleep(min(0.5, seconds / 20))


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
