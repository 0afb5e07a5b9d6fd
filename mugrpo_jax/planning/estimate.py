"""How long programs take, from what they cost and what a chip can do: a rule of thumb, spelled out."""

import dataclasses

from mugrpo_jax.planning.chips import Chip
from mugrpo_jax.planning.costs import Cost


@dataclasses.dataclass(frozen=True)
class Assumptions:
    """The shares of the published peaks that programs reach, and how long answers are.

    The first two are near what the update (55 % with attention and recomputed logits counted) and decoding
    (four fifths of the bandwidth) were measured to reach on one H200; the others are guesses.

    Attributes:
      compute: of the FLOP/s, in matrix products.
      memory: of the memory's bandwidth.
      link: of the bandwidth between chips.
      occupancy: share of the slots that are busy while a stage is generated.
      response: mean length of a response, as a share of the longest.
      prompt: mean length of a prompt, likewise.
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
class Seconds:
    """Time of one call by what it waits for."""

    compute: float
    memory: float
    link: float

    @property
    def overlapped(self) -> float:
        """Where the three go on at the same time: the longest of them."""
        return max(self.compute, self.memory, self.link)

    @property
    def added(self) -> float:
        """Where they follow each other, as in a decode step of small products."""
        return self.compute + self.memory + self.link

    @property
    def bound(self) -> str:
        """What the call waits for."""
        return max(("compute", "memory", "link"), key=lambda name: getattr(self, name))


def seconds(cost: Cost, chip: Chip, assumed: Assumptions) -> Seconds | None:
    """Time of one call; None on a chip without published peaks."""
    if chip.flops is None or chip.bandwidth is None or chip.link is None:
        return None
    return Seconds(
        compute=cost.flops / (chip.flops * assumed.compute),
        memory=cost.bytes / (chip.bandwidth * assumed.memory),
        link=cost.sent / (chip.link * assumed.link),
    )
