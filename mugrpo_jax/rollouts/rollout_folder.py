"""Write and read the folder with the rollouts of a stage. The rollouts are stored in shards:

    stage-000/
      shard-00000.arrayrecord   the groups of consecutive prompts, sorted by prompt index
      shard-00000.json          the summary of the shard: counts, rewards, token totals, checksum
      manifest.json             the totals of all shards; this file exists only if the stage is complete

Each file is written under a temporary name, flushed and then renamed. A shard is renamed after its summary.
So every shard with its final name is complete, and a SIGKILL loses only the shards not yet renamed.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

from mugrpo_jax.files import flush, write_atomically
from mugrpo_jax.rollouts.records import Group, decode, encode


class RolloutError(ValueError):
    """Raised if rollouts cannot be read, written or used. The message names the file and says what to do."""


@dataclasses.dataclass(frozen=True)
class RolloutFolder:
    """The folder with the rollouts of one stage, which has `prompts` prompts.

    Attributes:
      identity: what determines the rollouts: a hash of the settings, the stage, and the number of updates of
        the policy. If the files in the folder have another identity, reading them raises an error.
      prompts_per_shard: number of prompts in one shard; the last shard may hold fewer.
    """

    folder: Path
    identity: Mapping[str, Any]
    prompts: int
    prompts_per_shard: int

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
        missing = []
        for shard in range(self.shards) if shards is None else shards:
            path = self.path(shard)
            if not path.exists():
                missing.append(shard)
            elif (problem := _damage(path, self.identity)) is not None:
                print(f"{path}: {problem}; it will be generated again")
                path.unlink()
                missing.append(shard)
        return missing

    def write_shard(self, shard: int, groups: Sequence[Group]) -> None:
        """Write the groups of one shard, sorted by prompt index, and the summary of the shard."""
        expected = list(self.shard_prompts(shard))
        if [group.index for group in groups] != expected:
            raise ValueError(
                f"shard {shard}: expected prompts {expected[0]}..{expected[-1]} in order, "
                f"got {[group.index for group in groups]}"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        summary = {**summarise(groups), "identity": dict(self.identity)}
        write_records(self.path(shard), map(encode, groups), summary)

    def commit(self, seconds: Mapping[str, float] | None = None) -> dict[str, Any]:
        """Write and return the manifest; all shards must exist. `seconds` is stored in the manifest."""
        summaries = [read_json(self.path(shard).with_suffix(".json")) for shard in range(self.shards)]
        manifest = {
            "identity": dict(self.identity),
            "prompts": self.prompts,
            "prompts_per_shard": self.prompts_per_shard,
            **_total(summaries),
            "seconds": dict(seconds or {}),
            "sha256": [summary["sha256"] for summary in summaries],
        }
        flush(self.folder)  # the names of the shards must be on disk before the manifest
        write_json(self.folder / "manifest.json", manifest)
        flush(self.folder)
        return manifest

    def manifest(self) -> dict[str, Any] | None:
        """Return the manifest, or None if the stage is incomplete; raise an error if the identity differs."""
        path = self.folder / "manifest.json"
        if not path.exists():
            return None
        manifest = read_json(path)
        if manifest["identity"] != dict(self.identity):
            raise RolloutError(
                f"{path}: rollouts of {manifest['identity']}, expected {dict(self.identity)}; "
                "use another run folder or remove the stage"
            )
        return manifest


def open_stage(folder: Path) -> RolloutFolder:
    """Open the rollouts of a complete stage, and check every shard against the checksums in the manifest."""
    path = folder / "manifest.json"
    if not path.exists():
        raise RolloutError(f"{path}: not found; the stage is not complete, run the same command to finish it")
    manifest = read_json(path)
    stage = RolloutFolder(folder, manifest["identity"], manifest["prompts"], manifest["prompts_per_shard"])
    for shard, checksum in enumerate(manifest["sha256"]):
        shard_path = stage.path(shard)
        if not shard_path.exists():
            raise RolloutError(
                f"{shard_path}: missing, though {path.name} lists it; restore it from a backup"
            )
        if sha256(shard_path) != checksum:
            raise RolloutError(
                f"{shard_path}: its checksum differs from {path.name}; the file is damaged, restore it, "
                f"or remove {folder} and restart from the stage's first checkpoint"
            )
    return stage


def read_groups(stage: RolloutFolder, shards: Sequence[int] | None = None) -> Iterator[Group]:
    """Yield the groups of some shards (None: all) of a complete stage, in the order of their prompts."""
    for shard in range(stage.shards) if shards is None else shards:
        with contextlib.closing(ArrayRecordReader(str(stage.path(shard)))) as reader:
            for record in reader.read_all():
                yield decode(record)


def summarise(groups: Sequence[Group]) -> dict[str, Any]:
    """Return counts and sums over the groups, and the length of the longest response."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return {
        "groups": len(groups),
        "responses": len(rollouts),
        "prompt_tokens": sum(len(group.prompt) for group in groups),
        "response_tokens": sum(len(rollout.tokens) for rollout in rollouts),
        "reward": float(sum(rollout.reward for rollout in rollouts)),
        "longest_response": max((len(rollout.tokens) for rollout in rollouts), default=0),
        "equal_groups": sum(len(set(group.rewards.tolist())) == 1 for group in groups),
        "finish": dict(sorted(Counter(rollout.finish for rollout in rollouts).items())),
        "status": dict(sorted(Counter(rollout.status for rollout in rollouts).items())),
    }


def _total(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    total: dict[str, Any] = {}
    for name, first in summaries[0].items():
        values = [summary[name] for summary in summaries]
        if name == "longest_response":
            total[name] = max(values)
        elif isinstance(first, Mapping) and name != "identity":
            total[name] = dict(sum(map(Counter, values), Counter()))
        elif isinstance(first, (int, float)):
            total[name] = sum(values)
    return total


def _damage(path: Path, identity: Mapping[str, Any]) -> str | None:
    summary_path = path.with_suffix(".json")
    if not summary_path.exists():
        return "its summary is missing"
    summary = read_json(summary_path)
    if summary["identity"] != dict(identity):
        raise RolloutError(
            f"{path}: rollouts of {summary['identity']}, expected {dict(identity)}; use another run folder"
        )
    return None if summary["sha256"] == sha256(path) else "its checksum differs, the file is damaged"


def write_records(path: Path, records: Iterable[bytes], summary: Mapping[str, Any]) -> None:
    """Write an ArrayRecord file and, in a JSON file beside it, `summary` with the checksum of the records.

    Both files are written under a temporary name and renamed, the records last.
    """
    temporary = path.with_suffix(".tmp")
    try:
        writer = ArrayRecordWriter(str(temporary), "group_size:1")
        for record in records:
            writer.write(record)
        writer.close()
        flush(temporary)
    except (OSError, RuntimeError) as error:  # the ArrayRecord writer raises RuntimeError
        raise RolloutError(f"{path}: cannot be written ({error}); the same command continues") from None
    write_json(path.with_suffix(".json"), {**summary, "sha256": sha256(temporary)})
    os.replace(temporary, path)


def write_json(path: Path, value: Any) -> None:
    """Write `value` to a JSON file atomically; raise `RolloutError` if the file cannot be written."""
    try:
        write_atomically(path, json.dumps(value, indent=1))
    except OSError as error:
        raise RolloutError(
            f"{path}: cannot be written ({error.strerror}); the same command continues"
        ) from None


def read_json(path: Path) -> Any:
    """Return the value in a JSON file; raise `RolloutError` if the file is not valid JSON."""
    try:
        return json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise RolloutError(f"{path}: not valid JSON ({error}); the file is damaged") from None


def sha256(path: Path) -> str:
    """Return the SHA-256 checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
