"""Keep the tokens that the last device loops sampled, until their responses are finished."""

import numpy as np

from mugrpo_jax.sampling.programs import Emitted
from mugrpo_jax.sampling.sampler_plan import SamplerPlan


class RecentTokens:
    """A buffer of the tokens sampled in the latest steps: one row per slot, one column per step.

    The tokens of a finished response are a slice of one row.
    """

    def __init__(self, plan: SamplerPlan) -> None:
        self.kept = plan.max_length + plan.steps  # columns to keep; all unfinished responses began in them
        self.tokens = np.empty((plan.slots, 2 * self.kept), np.int32)
        self.logprobs = np.empty((plan.slots, 2 * self.kept), np.float32)
        self.first = 0  # the step in column 0
        self.filled = 0
        self.ends: list[int] = []  # the column after each slot's last token

    def add(self, emitted: Emitted) -> int:
        """Append the output of a device loop; return how many tokens the loop sampled."""
        steps = int(emitted.state[-1])
        if self.filled + steps > self.tokens.shape[1]:
            drop = self.filled - self.kept
            for array in (self.tokens, self.logprobs):
                array[:, : self.kept] = array[:, drop : self.filled]
            self.first, self.filled = self.first + drop, self.kept
        new = slice(self.filled, self.filled + steps)
        self.tokens[:, new] = np.asarray(emitted.tokens)[:steps].T
        self.logprobs[:, new] = np.asarray(emitted.logprobs)[:steps].T
        # A slot samples from the start of the loop until its response ends, and is then free in this loop.
        sampled = (self.tokens[:, new] >= 0).sum(1)
        self.ends = (self.filled + sampled).tolist()
        self.filled += steps
        return int(sampled.sum())

    def keep(self, slots: np.ndarray) -> None:
        """Continue with fewer slots: row i becomes what row `slots[i]` was."""
        self.tokens, self.logprobs = self.tokens[slots], self.logprobs[slots]

    def since(self, step: int, slot: int) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and log-probs of the response that began at `step` and ended in the latest loop."""
        columns = slice(step - self.first, self.ends[slot])
        return self.tokens[slot, columns].copy(), self.logprobs[slot, columns].copy()
