"""Files that survive a kill: atomic writes, and JSON lines whose last line may have been cut off."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def write_atomically(path: Path, text: str) -> None:
    """Write a text file so that, even after a kill, its content is either the old one or the new one.

    The text is written to disk under a temporary name, then renamed.
    """
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


def read_json_lines(path: Path, *, skip_damaged: bool = False) -> Iterator[tuple[int, Any]]:
    """Yield the line number (from 1) and the value of every JSON line; nothing if the file does not exist.

    Empty lines are left out, and so is a last line without a line break, because a kill cut it off. Any other
    line that is not JSON raises a `ValueError` that names the file and the line.

    Args:
      path: the file.
      skip_damaged: leave out lines that are not JSON instead, and keep every line that is, also the last one
        if only its line break is missing.
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
    """Remove a last line that a kill cut off, so that the next line can be appended."""
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        with path.open("r+b") as file:
            file.truncate(end)
