"""Estimate roughly how long one call of a program takes, from its cost and the chip's peak rates."""

import dataclasses

from mugrpo_jax.planning.chips import Chip
from mugrpo_jax.planning.program_cost import Cost


@dataclasses.dataclass(frozen=True)
class Assumptions:
    """The shares of the published peaks that programs reach, and the mean lengths of prompts and responses.

    `compute` and `memory` are close to measurements on one H200: updates reached 55 % of the FLOP/s, counting
    attention and recomputed logits, and decoding reached 80 % of the bandwidth. The others are guesses.

    Attributes:
      compute: share of the peak FLOP/s that matrix products reach.
      memory: share of the memory's bandwidth.
      link: share of the bandwidth between chips.
      occupancy: share of the slots that are busy while a stage is generated.
      response: mean length of a response, as a share of the longest.
      prompt: mean length of a prompt, as a share of the longest.
    """

    compute: float = 0.55
    memory: float = 0.8
    link: float = 0.7
    occupancy: float = 0.9
    response: float = 0.5
    prompt: float = 0.25

    def __str__(self) -> str:
        return (
            f"{self.compute:.0%} of the peak FLOP/s, {self.memory:.0%} of the memory's and {self.link:.0%} "
            f"of the links' bandwidth, messages and memory hidden behind compute in updates, added to it in "
            f"decoding; {self.occupancy:.0%} of the slots busy, responses {self.response:.0%} and prompts "
            f"{self.prompt:.0%} of their longest"
        )


@dataclasses.dataclass(frozen=True)
class CallTime:
    """Seconds that one call of a program spends on matrix products, HBM traffic and collectives."""

    compute: float
    memory: float
    link: float

    @property
    def overlapped(self) -> float:
        """Seconds of the call if compute, memory traffic and collectives overlap: the longest time."""
        return max(self.compute, self.memory, self.link)

    @property
    def added(self) -> float:
        """Seconds of the call if nothing overlaps, as in a decode step: the sum of the three times."""
        return self.compute + self.memory + self.link

    @property
    def bound(self) -> str:
        """Return the name of the longest time: `compute`, `memory` or `link`."""
        return max(("compute", "memory", "link"), key=lambda name: getattr(self, name))


def call_time(cost: Cost, chip: Chip, assumed: Assumptions) -> CallTime | None:
    """Estimate the time of one call. Return None for a chip without published peak rates."""
    if chip.flops is None or chip.bandwidth is None or chip.link is None:
        return None
    return CallTime(
        compute=cost.flops / (chip.flops * assumed.compute),
        memory=cost.bytes / (chip.bandwidth * assumed.memory),
        link=cost.sent / (chip.link * assumed.link),
    )
