"""How several samplers share the shards of a stage: claims, and the signs of life of those who hold them.

    samplers/TOKEN.json                 a sampler's sign of life, which it changes every few seconds
    samplers/claims/stage-003/00005     the sampler that works on a shard
    samplers/last_error                 the error with which a sampler ended, until one is started again

If several samplers try to create the same claim, only one of them succeeds (`files.create`). A sampler that
finds the claim of a dead one takes it over. If a sampler that was thought to be dead goes on, it finds that
the claim is not its own any more (`Claims.holds`), and does not write the shard.
"""

import contextlib
import textwrap
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mugrpo_jax.config import ConfigError
from mugrpo_jax.distributed import Absent
from mugrpo_jax.files import create, make_folder, plain_errors, publish, remove_folder
from mugrpo_jax.runs import owned_files, progress
from mugrpo_jax.runs.stop import Stopped
from mugrpo_jax.runs.time_left import duration

_BEAT_S = 5.0  # seconds between two signs of life
_DEAD_S = 60.0  # seconds without a sign of life after which a sampler is dead
_STUCK_S = 3600.0  # seconds without a step of its work after which a sampler gives no more signs of life
_LAST_ERROR = "last_error"
_LONGEST_ERROR = 500  # characters


class SignOfLife:
    """Tells other processes, in a `with` block, that this sampler of a run is alive.

    It is alive as long as `moved` is called now and then. A sampler whose work hangs gives no more signs, so
    that others take over. If the block ends with an error, the error is left in the folder for the trainer.
    """

    def __init__(self, run: Path) -> None:
        self.folder, self.owner = run / "samplers", owned_files.this_process()
        self._path = self.folder / f"{self.owner['token']}.json"
        self._ended, self._moved = threading.Event(), time.monotonic()

    def moved(self) -> None:
        """Note that the work of this sampler goes on."""
        self._moved = time.monotonic()

    def __enter__(self) -> "SignOfLife":
        try:
            make_folder(self.folder)
            for path in self.folder.glob("*.json"):
                if (other := owned_files.parse(owned_files.read(path))) and owned_files.alive_here(
                    other
                ) is False:
                    owned_files.remove(path)  # of a sampler that was killed
            create(self._path, owned_files.text_of(self.owner))
            owned_files.remove(self.folder / _LAST_ERROR)
        except OSError as error:
            raise ConfigError(f"{self._path}: cannot be written ({error.strerror or error})") from None
        self._thread = threading.Thread(target=self._beat, daemon=True, name="sign of life")
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._ended.set()
        self._thread.join()
        if isinstance(error, Exception) and not isinstance(error, (Absent, Stopped)):
            with contextlib.suppress(OSError), plain_errors():
                self._leave(error)
        with contextlib.suppress(OSError):
            owned_files.remove(self._path)

    def _leave(self, error: Exception) -> None:
        """Write the error into our file, and rename the file. This needs no more room on a full disk."""
        line = textwrap.shorten(str(error) or type(error).__name__, _LONGEST_ERROR, placeholder=" …")
        if (content := owned_files.read(self._path)) is not None:
            owned_files.rewrite(self._path, content, owned_files.text_of(self.owner | {"error": line}))
            publish(self._path, self.folder / _LAST_ERROR)

    def _beat(self) -> None:
        beats, told = 0, False
        while not self._ended.wait(_BEAT_S):
            if (idle := time.monotonic() - self._moved) > _STUCK_S:
                if not told:
                    progress.say(
                        f"{self.folder.parent}: this sampler hangs, it did nothing for {duration(idle)}"
                    )
                told = True
                continue
            beats, told = beats + 1, False
            with contextlib.suppress(OSError):  # the file system may be away for a while
                if (content := owned_files.read(self._path)) is not None:
                    owned_files.rewrite(self._path, content, owned_files.text_of(self.owner, beats))


def signs_of_life(run: Path, *, but: SignOfLife | None = None) -> dict[str, bytes | None]:
    """Return the signs of life of all samplers of a run, by file name. They differ while one is alive.

    That of the sampler `but` is left out.
    """
    own = "" if but is None else f"{but.owner['token']}.json"
    with contextlib.suppress(OSError):
        paths = [path for path in (run / "samplers").glob("*.json") if path.name != own]
        return {path.name: owned_files.read(path) for path in paths}
    return {}


def last_error(run: Path) -> str | None:
    """Return the error with which a sampler ended, and who it was; None if one was started since."""
    with contextlib.suppress(OSError):
        content = owned_files.read(run / "samplers" / _LAST_ERROR)
        if error := owned_files.parse(content).get("error"):
            return f"{owned_files.name(content)} ended: {error}"
    return None


class SamplerWatch:
    """Tells which samplers are dead.

    Keep the object: it remembers since when the signs of life of samplers have not changed.
    """

    def __init__(self) -> None:
        self._seen: dict[str, tuple[bytes | None, float]] = {}

    def dead(self, owner: dict[str, Any], sign: bytes | None) -> bool:
        """Return whether a sampler is dead, with the sign of life that it gives now."""
        if owner and owned_files.alive_here(owner) is False:
            return True
        # On another machine, or here: a process that is there may hang.
        before, since = self._seen.get(str(owner.get("token")), (b"", 0.0))
        if sign != before:
            self._seen[str(owner.get("token"))] = sign, time.monotonic()
            return False
        return time.monotonic() - since > _DEAD_S

    def living(self, signs: Mapping[str, bytes | None]) -> int:
        """Return how many samplers are alive, of those with these signs of life."""
        found = [sign for sign in signs.values() if sign is not None]
        return sum(not self.dead(owned_files.parse(sign), sign) for sign in found)

    def silent_s(self) -> float | None:
        """Return how many seconds ago a sign of life was last seen to change; None if none was ever seen."""
        changes = [since for _, since in self._seen.values()]
        return time.monotonic() - max(changes) if changes else None


def refuse_samplers(run: Path, remedy: str = "stop it, or add --rollouts wait") -> None:
    """Raise an error with a `remedy` if a sampler of the run is alive, because it would be in the way."""
    found = {
        path: content for path in (run / "samplers").glob("*.json") if (content := owned_files.read(path))
    }
    end, told = time.monotonic() + _DEAD_S, False
    while found:
        for path, content in list(found.items()):
            alive = owned_files.alive_here(owned_files.parse(content)) if owned_files.parse(content) else None
            if alive or owned_files.read(path) not in (content, None):
                name = owned_files.name(content)
                raise ConfigError(f"{run}: {name} samples for this run (mugrpo sample); {remedy}")
            if alive is False or time.monotonic() > end:
                owned_files.remove(path)
                del found[path]
        if found:  # of other machines
            if not told:
                told, names = True, ", ".join(map(owned_files.name, found.values()))
                progress.say(f"{run}: waiting up to {_DEAD_S:g} s for a sign of life of samplers ({names})")
            time.sleep(min(1.0, _DEAD_S / 10))


def remove_claims(run: Path, stage: int) -> None:
    """Remove all claims of a stage, because it is complete."""
    with contextlib.suppress(OSError):
        remove_folder(_claims_folder(run, stage))


def _claims_folder(run: Path, stage: int) -> Path:
    return run / "samplers" / "claims" / f"stage-{stage:03d}"


class Claims:
    """The shards of one stage that this sampler works on, and those of others.

    Keep the object: it remembers since when the signs of life of other samplers have not changed.
    """

    def __init__(self, sampler: SignOfLife, stage: int) -> None:
        self._sampler, self._stage = sampler, stage
        self.folder = _claims_folder(sampler.folder.parent, stage)
        self._watch = SamplerWatch()
        self._mine: set[str] = set()
        self._taken: set[str | None] = set()  # whose work was taken over

    def claim(self, work: str) -> bool:
        """Claim a piece of work; return False if another sampler that is alive has it."""
        path, text = self.folder / work, owned_files.text_of(self._sampler.owner)
        try:
            make_folder(self.folder)
            got = create(path, text)
            content = None if got else owned_files.read(path)
            got = got or self._is_mine(content)  # after an error of the storage, a claim may be forgotten
            if (
                not got
                and content is not None
                and self._dead(content)
                and owned_files.take(path, content, text)
            ):
                self._say_taken(content)
                got = True
        except FileNotFoundError:
            return False  # the stage is complete, and its claims were removed just now
        except OSError as error:
            raise ConfigError(
                f"{path}: cannot be written ({error.strerror or error}); the same command continues"
            ) from None
        if got:
            self._mine.add(work)
        return got

    def _say_taken(self, content: bytes) -> None:
        """Print once that the work of a sampler is taken over."""
        owner = owned_files.parse(content)
        if owner.get("token") not in self._taken:
            self._taken.add(owner.get("token"))
            why = "is gone" if owned_files.alive_here(owner) is False else "gave no sign of life"
            who = owned_files.name(content)
            progress.say(
                f"{self.folder}: {who} {why}, this sampler takes over its work on stage {self._stage}"
            )

    def holds(self, work: str) -> bool:
        """Return whether this sampler still has a claim. One that gave no sign of life may have lost it."""
        return self._is_mine(owned_files.read(self.folder / work))

    def _is_mine(self, content: bytes | None) -> bool:
        return owned_files.parse(content).get("token") == self._sampler.owner["token"]

    def release(self) -> None:
        """Give up all claims of this sampler, also those on shards that are complete now."""
        while self._mine:
            path = self.folder / self._mine.pop()
            with contextlib.suppress(OSError):
                owned_files.give_up(path, self._sampler.owner)

    def remove(self) -> None:
        """Remove all claims, because the stage is complete."""
        self._mine.clear()
        remove_claims(self._sampler.folder.parent, self._stage)

    def _dead(self, content: bytes) -> bool:
        owner: dict[str, Any] = owned_files.parse(content)
        sign = owned_files.read(self._sampler.folder / f"{owner.get('token')}.json") if owner else content
        return self._watch.dead(owner, sign)
