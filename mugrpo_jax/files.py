"""Files that survive a kill: atomic writes, and JSON lines whose last line may have been cut off."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def write_atomically(path: Path, text: str) -> None:
    """Write a text file so that a reader, or a run after a kill, finds the old content or the new one.

    The text is flushed to disk under a temporary name, then renamed.
    """
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    flush(temporary)
    os.replace(temporary, path)


def flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json_lines(path: Path, *, skip_damaged: bool = False) -> Iterator[tuple[int, Any]]:
    """Line number (from 1) and value of every JSON line; nothing if the file does not exist.

    A last line without a line break was cut off by a kill and is left out. Any other line that is not JSON is
    a `ValueError` that names the file and the line, or is left out too with `skip_damaged`.
    """
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    for number, line in enumerate(lines, 1):
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
    """Remove a last line that a kill cut off, so that the next line can be appended."""
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with path.open("r+b") as file:
            file.truncate(whole)
