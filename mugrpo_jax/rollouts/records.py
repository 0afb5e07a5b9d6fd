"""Define the records for one response and for a group of responses, and convert groups to bytes and back.

A group is stored as 1 + n records: its prompt, then its n responses. So a host can read single responses.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack
import numpy as np

# Why a response ended. The last three are only possible with an environment: the model used up its turns, the
# environment did not reply in time, or it failed.
FINISH_REASONS = ("stop", "length", "turns", "timeout", "environment")
CURRENT = "current"  # the behavior's name if the policy that is trained wrote the response


@dataclasses.dataclass(frozen=True)
class Rollout:
    """One response with its reward.

    Attributes:
      tokens: `[n]` int32, the n tokens of the response, including the end token.
      logprobs: `[n]` float32, the log-prob of each token in the distribution from which it was sampled.
      finish: `stop` if the response ended with an end token, `length` if it reached the maximum length; with
        an environment, also another of `FINISH_REASONS`.
      status: `ok`, or why the response could not be scored (`timeout`, `crash`, `error`, `invalid`).
      malformed: whether the response ended, but has no answer that can be read; None if nobody looked.
      parts: with several rewards, the value of each, without its weight; `reward` is their weighted sum.
      behavior: name of the policy and temperature with which the response was sampled.
      mask: `[n]` bool, False in messages of an environment, whose log-probs are 0 and never used; None means
        that the model wrote all tokens.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    reward: float
    finish: str
    status: str = "ok"
    malformed: bool | None = None
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    behavior: str = CURRENT
    mask: np.ndarray | None = None

    @property
    def wrote(self) -> np.ndarray:
        """`[n]` bool, True on the tokens that the model wrote."""
        return np.ones(len(self.tokens), bool) if self.mask is None else self.mask

    @property
    def written(self) -> int:
        """Number of tokens that the model wrote."""
        return len(self.tokens) if self.mask is None else int(self.mask.sum())


@dataclasses.dataclass(frozen=True)
class Group:
    """One prompt and all its responses. Groups are shuffled as a whole.

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


def encode(group: Group) -> list[bytes]:
    """Convert a group to its records. Equal groups give equal bytes."""
    prompt = {"index": group.index, "problem": group.problem, "prompt": group.prompt.astype("<i4").tobytes()}
    responses = [
        {
            "tokens": r.tokens.astype("<i4").tobytes(),
            "logprobs": r.logprobs.astype("<f4").tobytes(),
            "reward": float(r.reward),
            "finish": r.finish,
            "status": r.status,
            "malformed": r.malformed,
            **({"parts": dict(r.parts)} if r.parts else {}),
            **({"behavior": r.behavior} if r.behavior != CURRENT else {}),
            **({"mask": np.packbits(r.mask).tobytes()} if r.mask is not None else {}),
        }
        for r in group.rollouts
    ]
    return [msgpack.packb(record) for record in (prompt, *responses)]


def decode(records: Sequence[bytes]) -> Group:
    """Convert the records from `encode` back to a group."""
    raw: dict[str, Any] = msgpack.unpackb(records[0])
    rollouts = tuple(decode_rollout(record) for record in records[1:])
    return Group(raw["index"], raw["problem"], decode_prompt(records[0]), rollouts)


def decode_prompt(record: bytes) -> np.ndarray:
    """Return the prompt tokens in the first record of a group."""
    return np.frombuffer(msgpack.unpackb(record)["prompt"], "<i4")


def decode_rollout(record: bytes) -> Rollout:
    """Convert one of the later records of a group to a response."""
    raw: dict[str, Any] = msgpack.unpackb(record)
    tokens, mask = np.frombuffer(raw["tokens"], "<i4"), None
    if "mask" in raw:
        mask = np.unpackbits(np.frombuffer(raw["mask"], np.uint8), count=len(tokens)).astype(bool)
    return Rollout(
        tokens=tokens,
        logprobs=np.frombuffer(raw["logprobs"], "<f4"),
        reward=raw["reward"],
        finish=raw["finish"],
        status=raw["status"],
        malformed=raw.get("malformed"),
        parts=raw.get("parts", {}),
        behavior=raw.get("behavior", CURRENT),
        mask=mask,
    )
