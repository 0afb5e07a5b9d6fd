"""Store the responses of one behavior, until the responses of all behaviors are there and become shards.

The models of the behaviors are on the device one after the other. So the first model writes its part of every
shard before the second one starts:

    stage-000/
      part-0-shard-00000.arrayrecord   the groups of the shard, with the responses of the first model only
      part-1-shard-00000.arrayrecord

A part survives a kill, like a shard. Once a shard is written, its parts are deleted. Parts have no folders of
their own, because several processes write one stage: one would remove a folder that another one needs.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgpack

from mugrpo_jax.rollouts.record_files import DamagedRollouts, holds_records, read_records, write_records
from mugrpo_jax.rollouts.records import Group, Rollout, decode, encode
from mugrpo_jax.rollouts.rollout_folder import RolloutFolder


@dataclasses.dataclass(frozen=True)
class PartFolder:
    """The responses of one source, of which a prompt may have any number, also none.

    Attributes:
      number: position of the source in the list of sources.
      source: names the model that writes the part.
      stage: the stage that the part belongs to.
    """

    number: int
    source: str
    stage: RolloutFolder

    @property
    def prompts_per_shard(self) -> int:
        """Number of prompts in one shard."""
        return self.stage.prompts_per_shard

    def shard_prompts(self, shard: int) -> range:
        """Return the indices of the prompts in a shard."""
        return self.stage.shard_prompts(shard)

    def path(self, shard: int) -> Path:
        """Return the path of the part of a shard."""
        shard_path = self.stage.path(shard)
        return shard_path.with_name(f"part-{self.number}-{shard_path.name}")

    def missing_shards(self, shards: Sequence[int]) -> list[int]:
        """Return those of `shards` of which this part is missing or damaged."""
        return [shard for shard in shards if not self._valid(shard)]

    def write_shard(self, shard: int, groups: Sequence[Group]) -> bool:
        """Write the part of a shard; return whether it was written."""
        records = [record for group in groups for record in encode(group)]
        identity = {"identity": self._identity}
        return write_records(self.path(shard), records, identity, allowed=lambda: self.stage.may_write(shard))

    def read_shard(self, shard: int) -> dict[int, Group]:
        """Return the groups of a part by their prompt index."""
        groups: list[list[bytes]] = []
        for record in read_records(self.path(shard)):
            if "prompt" in msgpack.unpackb(record):
                groups.append([])
            groups[-1].append(record)
        return {group.index: group for group in map(decode, groups)}

    def remove_shard(self, shard: int) -> None:
        """Delete the part of a shard."""
        for path in (self.path(shard), self.path(shard).with_suffix(".json")):
            path.unlink(missing_ok=True)

    @property
    def _identity(self) -> dict[str, Any]:
        return {**self.stage.identity, "source": self.source}

    def _valid(self, shard: int) -> bool:
        return holds_records(self.path(shard), {"identity": self._identity})


def join_parts(
    parts: Sequence[PartFolder], shard: int, samples: Mapping[int, Sequence[Sequence[int]]]
) -> None:
    """Write a shard from its parts, then delete the parts. Another process may have done so instead of us.

    `samples` says for each prompt which sample numbers each part has.
    """
    stage = parts[0].stage
    prompts = stage.shard_prompts(shard)
    wanted = [any(samples[index][part.number] for index in prompts) for part in parts]
    try:
        found = [part.read_shard(shard) if some else {} for part, some in zip(parts, wanted)]
    except DamagedRollouts:
        if stage.may_write(shard):
            raise
        return  # the parts are gone
    groups = []
    for index in prompts:
        numbered: dict[int, Rollout] = {}
        for groups_of, numbers in zip(found, samples[index]):
            if numbers:
                whole = groups_of[index]
                numbered |= dict(zip(numbers, whole.rollouts, strict=True))
        groups.append(dataclasses.replace(whole, rollouts=tuple(numbered[n] for n in sorted(numbered))))
    if stage.write_shard(shard, groups):
        for part in parts:
            part.remove_shard(shard)
