"""Write and check the checksums of a checkpoint, in the format of the program `sha256sum`."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mugrpo_jax.files import names_below, plain_errors, write_atomically

CHECKSUMS = "checksums.txt"
ACCURACY = "accuracy.txt"  # has its own checksum, because it may be written later
COMMITTED = "commit_success.txt"

# Orbax writes these two files last, after the checksums. Nothing that reads a checkpoint needs them.
_NOT_CHECKED = (CHECKSUMS, ACCURACY, "_CHECKPOINT_METADATA", COMMITTED)


def write_checksums(folder: Path) -> None:
    """Write the checksums of all files in the folder of a checkpoint."""
    names = _names(folder)
    with ThreadPoolExecutor() as threads:
        sums = threads.map(lambda name: _checksum(folder / name), names)
    lines = "".join(f"{checksum}  {name}\n" for checksum, name in zip(sums, names))
    write_atomically(folder / CHECKSUMS, lines)


def damage(folder: Path, part: int = 0, parts: int = 1) -> str | None:
    """Compare a checkpoint with its checksums; return None, or a text that names a damaged file.

    With several hosts, each host checks the contents of every `parts`-th file.
    """
    path = folder / CHECKSUMS
    if not path.exists():
        return f"{path}: missing, so the checkpoint is damaged or was not finished"
    *lines, rest = path.read_bytes().decode("latin-1").split("\n")
    expected = {name: checksum for checksum, _, name in (line.partition("  ") for line in lines)}
    found = set(_names(folder))
    for name in [rest] if rest else sorted(found - set(expected)):
        return f"{path}: damaged, it does not list {name}"
    for name in sorted(set(expected) - found):
        return f"{folder / name}: missing, though {CHECKSUMS} lists it"
    mine = sorted(found)[part::parts]
    with ThreadPoolExecutor() as threads:
        for name, checksum in zip(mine, threads.map(lambda name: _checksum(folder / name), mine)):
            if checksum != expected[name]:
                return f"{folder / name}: damaged, its checksum differs from {CHECKSUMS}"
    return None


def _names(folder: Path) -> list[str]:
    return [name for name in names_below(folder) if name not in _NOT_CHECKED]


def _checksum(path: Path) -> str:
    with plain_errors(), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
