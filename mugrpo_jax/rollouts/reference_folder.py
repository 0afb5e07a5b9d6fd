"""Store the log-probs of the reference policy for the rollouts of a stage, one file per shard:

    reference/stage-000/
      shard-00000.arrayrecord   one record per response: the float32 log-probs of its tokens
      shard-00000.json          the reference policy, and the checksums of this file and of the shard

The files are not part of the rollouts, so a replay with another reference policy leaves the rollouts as they
are. A file is valid only together with the very shard for which it was computed.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mugrpo_jax.rollouts.record_files import holds_records, read_json, write_records
from mugrpo_jax.rollouts.rollout_folder import RolloutFolder


@dataclasses.dataclass(frozen=True)
class ReferenceFolder:
    """The folder with the reference log-probs of one stage.

    Attributes:
      identity: what determines the log-probs, beside the rollouts: the reference policy, the dtype
        and the temperature.
      rollouts: the rollouts of the stage, which must be complete.
    """

    folder: Path
    identity: Mapping[str, Any]
    rollouts: RolloutFolder

    def path(self, shard: int) -> Path:
        """Return the path of the log-probs of a shard."""
        return self.folder / self.rollouts.path(shard).name

    def missing_shards(self, shards: Sequence[int] | None = None) -> list[int]:
        """Return those of `shards` (None: all) whose log-probs are missing, damaged or of other rollouts."""
        return [s for s in (range(self.rollouts.shards) if shards is None else shards) if not self._valid(s)]

    def write_shard(self, shard: int, logprobs: Sequence[np.ndarray]) -> None:
        """Write the log-probs of all responses of a shard, in the order of the responses."""
        records = [values.astype("<f4").tobytes() for values in logprobs]
        write_records(self.path(shard), records, self._origin(shard))

    def _origin(self, shard: int) -> dict[str, Any]:
        summary = read_json(self.rollouts.path(shard).with_suffix(".json"))
        return {"identity": dict(self.identity), "shard_sha256": summary["sha256"]}

    def _valid(self, shard: int) -> bool:
        return holds_records(self.path(shard), self._origin(shard))
