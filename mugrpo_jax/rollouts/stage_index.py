"""The index of a stage: lengths and rewards of all its responses, without their tokens.

Every host reads the whole index, which is small, and computes the same updates from it. Then each host reads
only the responses that its own devices need.
"""

import dataclasses
import functools
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mugrpo_jax.rollouts.records import FINISH_REASONS, Group, Rollout


@dataclasses.dataclass(frozen=True)
class StageIndex:
    """One entry per group, in the order of the prompts. All groups have the same number of responses.

    Attributes:
      prompts: `[groups]` int32, the number of tokens in each prompt.
      lengths: `[groups, responses]` int32, the number of tokens in each response.
      rewards: `[groups, responses]` float64, the reward of each response.
      truncated: `[groups, responses]` bool, whether a response reached the maximum length.
      written: `[groups, responses]` int32, the number of tokens in each response that the model wrote.
    """

    prompts: np.ndarray
    lengths: np.ndarray
    rewards: np.ndarray
    truncated: np.ndarray
    written: np.ndarray

    @classmethod
    def of(cls, groups: Sequence[Group]) -> "StageIndex":
        """Return the index of some groups."""
        rollouts = [group.rollouts for group in groups]
        return cls(
            prompts=np.array([len(group.prompt) for group in groups], np.int32),
            lengths=np.array([[len(r.tokens) for r in row] for row in rollouts], np.int32),
            rewards=np.array([[r.reward for r in row] for row in rollouts], np.float64),
            truncated=np.array([[r.finish == "length" for r in row] for row in rollouts], bool),
            written=np.array([[r.written for r in row] for row in rollouts], np.int32),
        )

    @classmethod
    def join(cls, parts: Sequence[Mapping[str, Any]]) -> "StageIndex":
        """Return one index from the `columns` of several, in their order."""
        dtypes = {"prompts": np.int32, "lengths": np.int32, "rewards": np.float64, "truncated": bool}
        dtypes["written"] = np.int32
        return cls(
            **{
                name: np.concatenate([np.array(part[name], dtype) for part in parts])
                for name, dtype in dtypes.items()
            }
        )

    def columns(self) -> dict[str, list[Any]]:
        """Return the index as lists, for a JSON file."""
        columns = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: column.tolist() for name, column in columns.items()}

    def to_bytes(self) -> bytes:
        """Return the content of the file `index.npz`."""
        file = io.BytesIO()
        np.savez(
            file,
            prompts=self.prompts,
            lengths=self.lengths,
            rewards=self.rewards,
            truncated=self.truncated,
            written=self.written,
        )
        return file.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> "StageIndex":
        """Return the index in the content of a file `index.npz`."""
        with np.load(io.BytesIO(data), allow_pickle=False) as columns:
            return cls(**columns)

    def outline(self, group: int) -> Group:
        """Return a group with its lengths, rewards and finish reasons; tokens and log-probs are all 0.

        A mask has the right number of tokens that the model wrote, but all of them in front.
        """
        tokens, logprobs = self._zeros
        columns = (column[group].tolist() for column in (self.lengths, self.rewards, self.truncated))
        rollouts = tuple(
            Rollout(
                tokens[:length],
                logprobs[:length],
                reward,
                FINISH_REASONS[truncated],
                mask=None if written == length else np.arange(length) < written,
            )
            for length, reward, truncated, written in zip(*columns, self.written[group].tolist())
        )
        return Group(group, "", tokens[: self.prompts[group]], rollouts)

    @functools.cached_property
    def _zeros(self) -> tuple[np.ndarray, np.ndarray]:
        longest = max(self.lengths.max(), self.prompts.max())
        return np.zeros(longest, np.int32), np.zeros(longest, np.float32)
