"""The rollouts of a stage for one of several samplers, which writes only the shards that it has claimed."""

import dataclasses
from collections.abc import Sequence

from mugrpo_jax.rollouts import Group, RolloutFolder
from mugrpo_jax.runs import progress
from mugrpo_jax.runs.run_folder import SameRun
from mugrpo_jax.runs.sampler_claims import Claims, SignOfLife


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClaimedRollouts(RolloutFolder):
    """The folder with the rollouts of a stage. Nothing is written into the folder of another run."""

    same_run: SameRun
    sign: SignOfLife
    claims: Claims
    written: list[int] = dataclasses.field(default_factory=list)  # the shards that this process wrote

    def claim(self, shard: int) -> bool:
        """Claim a shard; return False if another sampler that is alive has it."""
        return self.claims.claim(_name(shard))

    def may_write(self, shard: int) -> bool:
        """Return whether a shard is still ours. It is lost if this sampler gave no sign of life."""
        if self.claims.holds(_name(shard)):
            return True
        progress.say(f"{self.path(shard)}: not written, another sampler took it over while this one hung")
        return False

    def write_shard(self, shard: int, groups: Sequence[Group]) -> bool:
        """Write the groups of one shard, if the shard is still ours; return whether it was written."""
        self.sign.moved()  # also if scoring takes long after the last token
        self.same_run.check()
        if written := super().write_shard(shard, groups):
            self.written.append(shard)
        return written

    def delete_damaged(self) -> None:
        """Delete the damaged shards, each under its claim, because another sampler may be faster."""
        there = [shard for shard in range(self.shards) if self.path(shard).exists()]
        try:
            for shard in self.problems(there):
                if self.claim(shard):
                    self.missing_shards([shard])  # looks at it again
        finally:
            self.claims.release()


def _name(shard: int) -> str:
    return f"{shard:05d}"
