"""The lock on the folder of a run, so that only one process, or one group of hosts, writes to the run.

The lock is a small file in the folder. A thread of its owner changes the file every few seconds. If the owner
was on this machine, the process table says whether it is alive. If it was on another machine, it is dead once
the file has not changed for `_DEAD_S` seconds on our own clock: clocks of two machines are never compared.
"""

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import Any

from mugrpo_jax import distributed
from mugrpo_jax.config import ConfigError
from mugrpo_jax.files import create, is_remote, make_folder, plain_errors, replace_object, write_atomically
from mugrpo_jax.runs import progress

_BEAT_S = 10.0  # seconds between two signs of life
_GUARD_S = 5.0  # a takeover takes milliseconds, unless the process is killed in it
_DEAD_S = 60.0  # seconds without a sign of life after which an owner on another machine is dead


class RunLock:
    """Holds the lock in a `with` block; raises an error if another process that is alive holds it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "lock.json"
        self._owner: dict[str, Any] = {
            "host": socket.gethostname(),
            "machine": _machine(),
            "pid": os.getpid(),
        }
        self._owner |= {"started": _started(os.getpid()), "token": secrets.token_hex(8)}
        self._released, self._changing = threading.Event(), threading.RLock()

    def __enter__(self) -> "RunLock":
        try:
            make_folder(self.path.parent)
            self._acquire()
        except OSError as error:
            raise ConfigError(f"{self.path.parent}: cannot be written ({error.strerror or error})") from None
        threading.Thread(target=self._beat, daemon=True, name="lock").start()
        distributed.at_end(self.release)
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Remove the lock, if it is still ours. More calls do nothing.

        If the storage is away, the lock stays there, and the next process finds that this one has ended.
        """
        with self._changing, contextlib.suppress(OSError):
            if self._released.is_set():
                return
            self._released.set()
            if _parse(_read(self.path)).get("token") == self._owner["token"]:
                _remove(self.path)

    def _acquire(self) -> None:
        while not create(self.path, self._text(0)):
            content = _read(self.path)
            alive = None if content is None else self._alive(content)
            if content is None or alive is None:
                continue  # released in the meantime
            if alive:
                raise ConfigError(
                    f"{self.path.parent}: {_name(content)} is training here ({self.path.name}); wait until "
                    "it ends, or use another --out"
                )
            if _take(self.path, content, self._text(0)):
                progress.say(f"{self.path.parent}: {_name(content)} is gone, this process takes its lock")
                return

    def _text(self, beats: int) -> bytes:
        return json.dumps(self._owner | {"beats": f"{beats:012d}"}).encode()  # always the same length

    def _alive(self, content: bytes) -> bool | None:
        """Return whether the owner of the lock is alive; None if the lock was released meanwhile."""
        owner = _parse(content)
        if owner.get("machine") == self._owner["machine"]:
            return _started(owner["pid"]) == owner["started"]
        progress.say(
            f"{self.path}: {_name(content)} holds the lock; waiting up to {_DEAD_S:g} s for a sign of life"
        )
        end = time.monotonic() + _DEAD_S
        while time.monotonic() < end:
            time.sleep(min(1.0, _DEAD_S / 10))
            if (now := _read(self.path)) != content:
                return None if now is None else True
        return False

    def _beat(self) -> None:
        """Give signs of life. If another process took the lock, because we gave none, end this process."""
        beats = 0
        while not self._released.wait(_BEAT_S):
            beats += 1
            with self._changing, contextlib.suppress(OSError):  # the file system may be away for a while
                if not self._released.is_set():
                    self._give_sign(self._text(beats))

    def _give_sign(self, text: bytes) -> None:
        content = _read(self.path)
        owner = _parse(content)
        if content is None:
            create(self.path, text)
        elif owner.get("token") == self._owner["token"]:
            _write(self.path, content, text)
        elif owner:
            self._released.set()
            distributed.end_process(2, f"{self.path}: {_name(content)} has taken over this run")


def _machine() -> str:
    """Return an id of this machine since its start, and of the container if process ids are its own."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def _started(pid: int) -> str | None:
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


def _name(content: bytes) -> str:
    owner = _parse(content)
    return f"process {owner['pid']} on {owner['host']}" if owner else "another process"


def _parse(content: bytes | None) -> dict[str, Any]:
    """Return the owner in a lock file; {} if the file is not readable, for example half written."""
    try:
        owner = json.loads(content or b"")
        return owner if {"host", "machine", "pid", "started", "token"} <= owner.keys() else {}
    except (ValueError, AttributeError):
        return {}


# All access to the lock file is below, and in `files.create`.


def _read(path: Path) -> bytes | None:
    try:
        with plain_errors():
            return path.read_bytes()
    except FileNotFoundError:
        return None


def _write(path: Path, content: bytes, new: bytes) -> None:
    """Change our lock file in place. The length stays the same, so this works on a full disk too."""
    if is_remote(path):
        replace_object(path, content, new)
        return
    with path.open("r+b") as file:
        file.write(new)


def _remove(path: Path) -> None:
    with plain_errors():
        path.unlink(missing_ok=True)


def _take(path: Path, content: bytes, new: bytes) -> bool:
    """Replace the lock of a dead owner by ours; return False if another process was faster.

    A second file makes sure that one process at a time does this. The lock itself is never missing meanwhile.
    In a bucket, the storage service makes sure of it.
    """
    if is_remote(path):
        return replace_object(path, content, new)
    guard = path.with_name(path.name + ".takeover")
    if not create(guard, new):
        _wait_for_guard(guard)
        return False
    try:
        if _read(path) != content:
            return False
        write_atomically(path, new)
        return True
    finally:
        guard.unlink(missing_ok=True)


def _wait_for_guard(guard: Path) -> None:
    """Wait until the process that takes over is done; remove the file of one that was killed meanwhile."""
    first, end = _read(guard), time.monotonic() + _GUARD_S
    while first is not None and _read(guard) == first:
        if time.monotonic() > end:
            guard.unlink(missing_ok=True)
        time.sleep(0.01)
