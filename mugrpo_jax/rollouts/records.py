"""Define the records for one response and for a group of responses, and convert groups to bytes and back."""

import dataclasses
from typing import Any

import msgpack
import numpy as np

FINISH_REASONS = ("stop", "length")


@dataclasses.dataclass(frozen=True)
class Rollout:
    """One response with its reward.

    Attributes:
      tokens: `[n]` int32, the n tokens of the response, including the end token.
      logprobs: `[n]` float32, the log-prob of each token in the distribution from which it was sampled.
      finish: `stop` if the response ended with an end token, `length` if it reached the maximum length.
      status: `ok`, or why the response could not be scored (`timeout`, `crash`, `error`, `invalid`).
      reference_logprobs: `[n]` float32, the log-probs of the reference policy, or None. `encode` leaves them
        out, because `reference_folder` stores them in files of their own.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    reward: float
    finish: str
    status: str = "ok"
    reference_logprobs: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Group:
    """One prompt and all its responses. A group is stored as one record, and groups are shuffled as a whole.

    Attributes:
      index: position of the prompt in its stage, from 0.
      problem: the `Problem.id` of the problem from which the prompt was made.
      prompt: `[p]` int32, the p tokens of the prompt.
      rollouts: the responses with their rewards, sorted by `Response.sample`.
    """

    index: int
    problem: str
    prompt: np.ndarray
    rollouts: tuple[Rollout, ...]

    @property
    def rewards(self) -> np.ndarray:
        """The rewards of the responses, `[responses]` float32."""
        return np.array([rollout.reward for rollout in self.rollouts], np.float32)

    @property
    def response_tokens(self) -> int:
        """Total number of tokens in the responses of the group."""
        return sum(len(rollout.tokens) for rollout in self.rollouts)


def encode(group: Group) -> bytes:
    """Convert a group to bytes. Equal groups give equal bytes."""
    return msgpack.packb(
        {
            "index": group.index,
            "problem": group.problem,
            "prompt": group.prompt.astype("<i4").tobytes(),
            "rollouts": [
                {
                    "tokens": r.tokens.astype("<i4").tobytes(),
                    "logprobs": r.logprobs.astype("<f4").tobytes(),
                    "reward": float(r.reward),
                    "finish": r.finish,
                    "status": r.status,
                }
                for r in group.rollouts
            ],
        }
    )


def decode(data: bytes) -> Group:
    """Convert bytes from `encode` back to a group."""
    raw: dict[str, Any] = msgpack.unpackb(data)
    return Group(
        index=raw["index"],
        problem=raw["problem"],
        prompt=np.frombuffer(raw["prompt"], "<i4"),
        rollouts=tuple(
            Rollout(
                tokens=np.frombuffer(r["tokens"], "<i4"),
                logprobs=np.frombuffer(r["logprobs"], "<f4"),
                reward=r["reward"],
                finish=r["finish"],
                status=r["status"],
            )
            for r in raw["rollouts"]
        ),
    )
