"""Estimate roughly how long one call of a program takes, from its cost and the chip's peak rates."""

import dataclasses

from mugrpo_jax.planning.chips import Chip
from mugrpo_jax.planning.program_cost import Cost
from mugrpo_jax.setup.auto_settings import MEAN_PROMPT, MEAN_RESPONSE


@dataclasses.dataclass(frozen=True)
class Assumptions:
    """Assumptions of the time estimates: shares of the published peak rates, busy slots and mean lengths.

    `compute` and `memory` are close to measurements on one H200: updates reached 55 % of the FLOP/s, with
    attention and recomputed logits, and decoding reached 80 % of the bandwidth. All other values are guesses.

    Attributes:
      compute: share of the peak FLOP/s that matrix products reach.
      memory: share of the published memory bandwidth that programs reach.
      link: share of the published bandwidth between chips that collectives reach.
      occupancy: share of the slots that are busy during generation.
      response: mean length of a response divided by the maximum length.
      prompt: mean length of a prompt divided by the maximum length.
    """

    compute: float = 0.55
    memory: float = 0.8
    link: float = 0.7
    occupancy: float = 0.9
    response: float = MEAN_RESPONSE
    prompt: float = MEAN_PROMPT

    def __str__(self) -> str:
        return (
            f"{self.compute:.0%} of the peak FLOP/s, {self.memory:.0%} of the memory's and {self.link:.0%} "
            "of the links' bandwidth; collectives and memory overlap with compute in updates, and are added "
            f"to it in decoding; {self.occupancy:.0%} of the slots busy, responses {self.response:.0%} and "
            f"prompts {self.prompt:.0%} of their longest"
        )


@dataclasses.dataclass(frozen=True)
class CallTime:
    """Estimated seconds that one call of a program needs for matrix products, HBM traffic and collectives."""

    compute: float
    memory: float
    link: float

    @property
    def overlapped(self) -> float:
        """Return the longest of the three times: the time of the call if they overlap completely."""
        return max(self.compute, self.memory, self.link)

    @property
    def added(self) -> float:
        """Return the sum of the three times: the time of the call without overlap, as in a decode step."""
        return self.compute + self.memory + self.link

    @property
    def bound(self) -> str:
        """Return the name of the longest time: `compute`, `memory` or `link`."""
        return max(("compute", "memory", "link"), key=lambda name: getattr(self, name))


def call_time(cost: Cost, chip: Chip, assumed: Assumptions) -> CallTime | None:
    """Estimate the times of one call of a program; None if the chip's peak rates are not known."""
    if chip.flops is None or chip.bandwidth is None or chip.link is None:
        return None
    return CallTime(
        compute=cost.flops / (chip.flops * assumed.compute),
        memory=cost.bytes / (chip.bandwidth * assumed.memory),
        link=cost.sent / (chip.link * assumed.link),
    )
