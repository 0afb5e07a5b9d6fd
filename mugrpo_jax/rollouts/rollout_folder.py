"""Write and read the folder with the rollouts of a stage. The rollouts are stored in shards:

    stage-000/
      shard-00000.arrayrecord   the groups of consecutive prompts, sorted by prompt index
      shard-00000.json          the summary of the shard: counts, rewards, token totals, index, checksum
      index.npz                 lengths and rewards of all responses of the stage, see `StageIndex`
      manifest.json             the totals of all shards; this file exists only if the stage is complete

Each file is written under a temporary name, flushed and then renamed. A shard is renamed after its summary.
So every shard with its final name is complete, and a SIGKILL loses only the shards not yet renamed.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mugrpo_jax.files import flush, wait_for
from mugrpo_jax.rollouts.record_files import (
    DamagedRollouts,
    RolloutError,
    read_json,
    read_records,
    sha256,
    write_file,
    write_json,
    write_records,
)
from mugrpo_jax.rollouts.records import Group, decode, encode
from mugrpo_jax.rollouts.stage_index import StageIndex
from mugrpo_jax.rollouts.summaries import summarise, total


@dataclasses.dataclass(frozen=True)
class RolloutFolder:
    """The folder with the rollouts of one stage, which has `prompts` prompts.

    Attributes:
      identity: what determines the rollouts: a hash of the settings, the stage, and the number of updates of
        the policy. If the files in the folder have another identity, reading them raises an error.
      prompts_per_shard: number of prompts in one shard; the last shard may hold fewer.
      patience_s: how many seconds to wait for a file that another host has written, see `files.wait_for`.
    """

    folder: Path
    identity: Mapping[str, Any]
    prompts: int
    prompts_per_shard: int
    patience_s: float = 0.0

    @property
    def shards(self) -> int:
        """Number of shards in the complete stage."""
        return -(-self.prompts // self.prompts_per_shard)

    def shard_prompts(self, shard: int) -> range:
        """Return the indices of the prompts in a shard."""
        start = shard * self.prompts_per_shard
        return range(start, min(start + self.prompts_per_shard, self.prompts))

    def path(self, shard: int) -> Path:
        """Return the path of a shard."""
        return self.folder / f"shard-{shard:05d}.arrayrecord"

    def missing_shards(self, shards: Sequence[int] | None = None) -> list[int]:
        """Return those of `shards` (None: all) that are missing or damaged. Damaged shards are deleted."""
        problems = self.problems(shards)
        for shard, problem in problems.items():
            if self.path(shard).exists():
                print(f"{problem}; it will be generated again")
                self.path(shard).unlink(missing_ok=True)
        return list(problems)

    def problems(self, shards: Sequence[int] | None = None) -> dict[int, str]:
        """Return those of `shards` (None: all) that are missing or damaged, each with a text about it."""
        found = {}
        for shard in range(self.shards) if shards is None else shards:
            path = self.path(shard)
            problem = _damage(path, self.identity) if path.exists() else "missing"
            if problem is not None:
                found[shard] = f"{path}: {problem}"
        return found

    def may_write(self, shard: int) -> bool:
        """Return whether this process may write a shard; False if another process does it."""
        return True

    def write_shard(self, shard: int, groups: Sequence[Group]) -> bool:
        """Write the groups of one shard, sorted by prompt index, and the summary of the shard.

        Returns whether it was written: a shard that is there is never replaced.
        """
        expected = list(self.shard_prompts(shard))
        if [group.index for group in groups] != expected:
            raise ValueError(
                f"shard {shard}: expected prompts {expected[0]}..{expected[-1]} in order, "
                f"got {[group.index for group in groups]}"
            )
        summary = {
            **summarise(groups),
            "identity": dict(self.identity),
            "index": StageIndex.of(groups).columns(),
        }
        records = [record for group in groups for record in encode(group)]
        return write_records(
            self.path(shard), records, summary, replace=False, allowed=lambda: self.may_write(shard)
        )

    def commit(self, seconds: Mapping[str, float] | None = None) -> dict[str, Any]:
        """Write and return the manifest; all shards must exist. `seconds` is stored in the manifest."""
        summaries = self._summaries()
        index = StageIndex.join([summary["index"] for summary in summaries]).to_bytes()
        write_file(self.folder / "index.npz", index)
        manifest = {
            "identity": dict(self.identity),
            "prompts": self.prompts,
            "prompts_per_shard": self.prompts_per_shard,
            **total(summaries),
            "seconds": dict(seconds or {}),
            "sha256": [summary["sha256"] for summary in summaries],
            "index_sha256": hashlib.sha256(index).hexdigest(),
        }
        flush(self.folder)  # the names of the shards must be on disk before the manifest
        write_json(self.folder / "manifest.json", manifest)
        flush(self.folder)
        return manifest

    def content_hash(self) -> str:
        """Return a hash of all prompts and responses of a complete stage."""
        shards = (self.manifest() or {})["sha256"]
        return hashlib.sha256("".join(shards).encode()).hexdigest()

    def index(self) -> StageIndex:
        """Return the index of the stage, made from the summaries of its shards, which must all exist."""
        return StageIndex.join([summary["index"] for summary in self._summaries()])

    def _summaries(self) -> list[dict[str, Any]]:
        paths = [self.path(shard).with_suffix(".json") for shard in range(self.shards)]
        return [read_json(path, patience_s=self.patience_s) for path in paths]

    def manifest(self, *, complete: bool = False) -> dict[str, Any] | None:
        """Return the manifest, or None if the stage is incomplete; raise an error if the identity differs.

        Set `complete` if another host has said that the stage is complete: then a manifest that is not seen
        here yet is waited for.
        """
        path = self.folder / "manifest.json"
        if not complete and not path.exists():
            return None
        manifest = read_manifest(path, patience_s=self.patience_s)
        if manifest["identity"] != dict(self.identity):
            raise RolloutError(
                f"{path}: rollouts of {manifest['identity']}, expected {dict(self.identity)}; "
                "use another run folder or remove the stage"
            )
        return manifest


def open_stage(folder: Path, *, share: tuple[int, int] = (0, 1), patience_s: float = 0.0) -> RolloutFolder:
    """Open the rollouts of a complete stage, and check shards against the checksums in the manifest.

    With `share=(i, n)`, host `i` of `n` hosts checks every n-th shard, so that all hosts together check all.
    `patience_s` is that of `RolloutFolder`.
    """
    path = folder / "manifest.json"
    if not path.exists():
        raise RolloutError(f"{path}: not found; the stage is not complete, let mugrpo train finish it")
    manifest = read_manifest(path)
    stage = RolloutFolder(
        folder,
        manifest["identity"],
        manifest["prompts"],
        manifest["prompts_per_shard"],
        patience_s=patience_s,
    )
    if len(manifest["sha256"]) != stage.shards:
        raise DamagedRollouts(f"{path}: damaged, it has {len(manifest['sha256'])} checksums")
    for shard in range(share[0], stage.shards, share[1]):
        shard_path, checksum = stage.path(shard), manifest["sha256"][shard]
        try:
            found = wait_for(functools.partial(sha256, shard_path), shard_path, patience_s)
        except FileNotFoundError:
            raise DamagedRollouts(f"{shard_path}: missing, though {path.name} lists it") from None
        if found != checksum:
            raise DamagedRollouts(f"{shard_path}: damaged, its checksum differs from {path.name}")
    return stage


def read_index(stage: RolloutFolder) -> StageIndex:
    """Read the index of a complete stage. If the file is damaged, make the index from the summaries again."""
    path = stage.folder / "index.npz"
    manifest = read_json(stage.folder / "manifest.json", patience_s=stage.patience_s)
    data = path.read_bytes() if path.exists() else b""
    if hashlib.sha256(data).hexdigest() != manifest["index_sha256"]:
        data = stage.index().to_bytes()
    if hashlib.sha256(data).hexdigest() != manifest["index_sha256"]:
        raise RolloutError(
            f"{path}: its checksum differs from manifest.json; the file is damaged, restore it"
        )
    return StageIndex.from_bytes(data)


def read_groups(stage: RolloutFolder, shards: Sequence[int] | None = None) -> Iterator[Group]:
    """Yield the groups of some shards (None: all), which must exist, in the order of their prompts."""
    for shard in range(stage.shards) if shards is None else shards:
        records = read_records(stage.path(shard))
        size = len(records) // len(stage.shard_prompts(shard))
        for start in range(0, len(records), size):
            yield decode(records[start : start + size])


def _damage(path: Path, identity: Mapping[str, Any]) -> str | None:
    summary_path = path.with_suffix(".json")
    if not summary_path.exists():
        return "its summary is missing"
    try:
        summary = read_json(summary_path)
        missing = {"identity", "sha256", *summarise(())} - summary.keys()
    except (RolloutError, AttributeError):
        return "its summary is damaged"
    if missing:
        return f"its summary is damaged, {min(missing)} is missing"
    if summary["identity"] != dict(identity):
        raise RolloutError(
            f"{path}: rollouts of {summary['identity']}, expected {dict(identity)}; use another run folder"
        )
    try:
        return None if summary["sha256"] == sha256(path) else "its checksum differs, the file is damaged"
    except FileNotFoundError:  # another process has found the damage and removed the file
        return "missing"


def read_manifest(path: Path, *, patience_s: float = 0.0) -> dict[str, Any]:
    """Return the manifest of a stage; raise `DamagedRollouts` if something in it is missing."""
    manifest = read_json(path, patience_s=patience_s)
    expected = {"identity", "prompts", "prompts_per_shard", "seconds", "sha256", *summarise(())}
    if not isinstance(manifest, dict) or not expected <= manifest.keys():
        raise DamagedRollouts(f"{path}: damaged, a part of it is missing")
    return manifest
