"""Small files that name the process that owns something: the lock of a run, and what its samplers work on.

The owner changes its file every few seconds. If the owner was on this machine, the process table says whether
it is alive. If it was on another machine, it is dead once its file has not changed for some time on our own
clock: clocks of two machines are never compared.
"""

import contextlib
import json
import os
import secrets
import socket
import time
from pathlib import Path
from typing import Any

from mugrpo_jax.files import create, is_remote, plain_errors, replace_object, write_atomically

_GUARD_S = 5.0  # a takeover takes milliseconds, unless the process is killed in it


def this_process() -> dict[str, Any]:
    """Return what names this process as an owner; every call returns another `token`."""
    owner = {"host": socket.gethostname(), "machine": _machine(), "pid": os.getpid()}
    return owner | {"started": started(os.getpid()), "token": secrets.token_hex(8)}


def text_of(owner: dict[str, Any], beats: int = 0) -> bytes:
    """Return the content of an owner's file, which has the same length for all numbers of heartbeats."""
    return json.dumps(owner | {"beats": f"{beats:012d}"}).encode()


def alive_here(owner: dict[str, Any]) -> bool | None:
    """Return whether an owner on this machine is alive; None if it is on another machine."""
    if owner.get("machine") != _machine():
        return None
    return started(owner["pid"]) == owner["started"]


def _machine() -> str:
    """Return an id of this machine since its start, and of the container if process ids are its own."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def started(pid: int) -> str | None:
    """Return when a process of this machine was started, or None if it has ended."""
    stat = Path(f"/proc/{pid}/stat")
    if not Path("/proc/self/stat").exists():  # not Linux
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            pass
        return "running"
    try:
        fields = stat.read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]  # a zombie has ended too


def name(content: bytes | None) -> str:
    """Return a text that names the owner in a file's content."""
    owner = parse(content)
    return f"process {owner['pid']} on {owner['host']}" if owner else "another process"


def parse(content: bytes | None) -> dict[str, Any]:
    """Return the owner in a file's content; {} if the file is not readable, for example half written."""
    try:
        owner = json.loads(content or b"")
        return owner if {"host", "machine", "pid", "started", "token"} <= owner.keys() else {}
    except (ValueError, AttributeError):
        return {}


def read(path: Path) -> bytes | None:
    """Return the content of an owner's file, or None if there is no file."""
    try:
        with plain_errors():
            return path.read_bytes()
    except FileNotFoundError:
        return None


def rewrite(path: Path, content: bytes, new: bytes) -> None:
    """Change our file in place, if its content is still this one; the file then is still ours.

    The length stays the same, so this works on a full disk too. A process that takes the file over puts
    another file in its place. So even if it does that in between, we write into the old file.
    """
    if is_remote(path):
        replace_object(path, content, new)
        return
    with path.open("r+b") as file:
        if file.read() == content:
            file.seek(0)
            file.write(new)


def remove(path: Path) -> None:
    """Remove an owner's file, if it is there."""
    with plain_errors():
        path.unlink(missing_ok=True)


def give_up(path: Path, owner: dict[str, Any]) -> None:
    """Remove our file, unless another process has taken it over."""
    if parse(read(path)).get("token") == owner["token"]:
        remove(path)


def take(path: Path, content: bytes, new: bytes) -> bool:
    """Replace the file of a dead owner by ours; return False if another process was faster.

    A second file makes sure that one process at a time does this. The file itself is never missing meanwhile.
    In a bucket, the storage service makes sure of it.
    """
    if is_remote(path):
        return replace_object(path, content, new)
    guard = path.with_name(path.name + ".takeover")
    if not create(guard, new):
        _wait_for_guard(guard)
        return False
    try:
        if read(path) != content:
            return False
        write_atomically(path, new)
        return True
    finally:
        guard.unlink(missing_ok=True)


def _wait_for_guard(guard: Path) -> None:
    """Wait until the process that takes over is done; remove the file of one that was killed meanwhile."""
    first, end = read(guard), time.monotonic() + _GUARD_S
    while first is not None and read(guard) == first:
        if time.monotonic() > end:
            guard.unlink(missing_ok=True)
        time.sleep(0.01)
