"""The lock on the folder of a run, so that only one process, or one group of hosts, trains there.

Samplers of the run (`mugrpo sample`) do not take the lock. How a dead owner is recognised: `owned_files`.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

from mugrpo_jax import distributed
from mugrpo_jax.config import ConfigError
from mugrpo_jax.files import create, make_folder
from mugrpo_jax.runs import owned_files, progress

LOCK = "lock.json"

_BEAT_S = 10.0  # seconds between two signs of life
_DEAD_S = 60.0  # seconds without a sign of life after which an owner on another machine is dead


def trainer_sign(folder: Path) -> bytes | None:
    """Return the sign of life of the trainer in a run's folder, which changes while it is alive."""
    return owned_files.read(folder / LOCK)


def watch_trainer(folder: Path, before: bytes | None, stopped: Callable[[], bool] = lambda: False) -> None:
    """Raise an error if a trainer that samples itself is alive, or has been started since sign `before`.

    One on another machine, of which nothing else is known, is watched until it gives a sign of life, or is
    dead, or until `stopped` returns True.
    """
    end, told = time.monotonic() + _DEAD_S, False
    while (content := refuse_beside_trainer(folder, before=before or b"")) is not None:
        owner = owned_files.parse(content)
        elsewhere = bool(owner) and owned_files.alive_here(owner) is None
        if not owner.get("samples") or not elsewhere or time.monotonic() > end or stopped():
            return
        if not told:
            told, name = True, owned_files.name(content)
            progress.say(f"{folder}: waiting up to {_DEAD_S:g} s for a sign of life of the trainer ({name})")
        time.sleep(min(1.0, _DEAD_S / 10))


def refuse_beside_trainer(folder: Path, *, before: bytes | None = None) -> bytes | None:
    """Raise an error if a trainer samples itself, because this process wants to sample.

    Returns the trainer's sign of life. A trainer on another machine is known to be alive once its sign is not
    the one from `before`.
    """
    content = trainer_sign(folder)
    owner = owned_files.parse(content)
    alive = owned_files.alive_here(owner) if owner else False
    if owner.get("samples") and (alive or (alive is None and before not in (None, content))):
        raise ConfigError(
            f"{folder}: {owned_files.name(content)} trains here and samples itself; stop it, and start it "
            "with --rollouts wait"
        )
    return content


class RunLock:
    """Holds the lock in a `with` block; raises an error if another process that is alive holds it.

    `samples` tells samplers that this trainer needs none.
    """

    def __init__(self, folder: Path, *, samples: bool = False) -> None:
        self.path = folder / LOCK
        self._owner = owned_files.this_process() | {"samples": samples}
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
            owned_files.give_up(self.path, self._owner)

    def _acquire(self) -> None:
        while not create(self.path, owned_files.text_of(self._owner)):
            content = owned_files.read(self.path)
            alive = None if content is None else self._alive(content)
            if content is None or alive is None:
                continue  # released in the meantime
            if alive:
                raise ConfigError(
                    f"{self.path.parent}: {owned_files.name(content)} is training here ({self.path.name}); "
                    "wait until it ends, or use another --out"
                )
            if owned_files.take(self.path, content, owned_files.text_of(self._owner)):
                progress.say(
                    f"{self.path.parent}: {owned_files.name(content)} is gone, this process takes its lock"
                )
                return

    def _alive(self, content: bytes) -> bool | None:
        """Return whether the owner of the lock is alive; None if the lock was released meanwhile."""
        if (here := owned_files.alive_here(owned_files.parse(content))) is not None:
            return here
        progress.say(
            f"{self.path}: {owned_files.name(content)} holds the lock; waiting up to {_DEAD_S:g} s for a "
            "sign of life"
        )
        end = time.monotonic() + _DEAD_S
        while time.monotonic() < end:
            time.sleep(min(1.0, _DEAD_S / 10))
            if (now := owned_files.read(self.path)) != content:
                return None if now is None else True
        return False

    def _beat(self) -> None:
        """Give signs of life. If another process took the lock, because we gave none, end this process."""
        beats = 0
        while not self._released.wait(_BEAT_S):
            beats += 1
            with self._changing, contextlib.suppress(OSError):  # the file system may be away for a while
                if not self._released.is_set():
                    self._give_sign(owned_files.text_of(self._owner, beats))

    def _give_sign(self, text: bytes) -> None:
        content = owned_files.read(self.path)
        owner = owned_files.parse(content)
        if content is None:
            create(self.path, text)
        elif owner.get("token") == self._owner["token"]:
            owned_files.rewrite(self.path, content, text)
        elif owner:
            self._released.set()
            distributed.end_process(2, f"{self.path}: {owned_files.name(content)} has taken over this run")
