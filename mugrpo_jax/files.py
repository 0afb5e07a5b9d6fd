"""Files that survive a SIGKILL: atomic writes, and JSON lines whose last line may be incomplete."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def write_atomically(path: Path, text: str) -> None:
    """Write to a temporary file and rename it, so that even a SIGKILL leaves the old or the new text."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    flush(temporary)
    os.replace(temporary, path)


def flush(path: Path) -> None:
    """Wait until the content of a file, or the list of names in a folder, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
