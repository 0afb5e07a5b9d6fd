"""The open format of rollouts: one row per response, which stands by itself.

`FORMAT` is in every row. A reader refuses rows of a version that it does not know. The fields are in
`COLUMNS`; `docs/guides/rollout-files.md` explains them.
"""

import dataclasses
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from mugrpo_jax.rollouts.records import FINISH_REASONS, Group, Rollout
from mugrpo_jax.tasks.task import LARGEST_REWARD

FORMAT = "mugrpo-rollouts/1"
# The columns of a row and their Parquet types. In JSON, a list is a list, and a map is an object.
COLUMNS: Mapping[str, Any] = {
    "format": "string",
    "stage": {
        "index": "int32",
        "fingerprint": "string",
        "policy_stage": "int32",
        "policy_updates": "int32",
        "imported": "string",
        "left_out": "int32",
        "prompts_per_shard": "int32",
        "vocab_size": "int32",
    },
    "group": "int64",
    "sample": "int32",
    "problem": "string",
    "prompt": "list<int32>",
    "tokens": "list<int32>",
    "logprobs": "list<float32>",
    "reward": "double",
    "finish": "string",
    "status": "string",
    "malformed": "bool",
    "reward_parts": "map<double>",
    "behavior": "string",
    "mask": "list<bool>",
}
_OPTIONAL = ("malformed", "mask")
_IDENTITY = {"fingerprint": "fingerprint", "stage": "index"} | {
    name: name for name in ("policy_stage", "policy_updates", "imported", "left_out")
}  # the keys of a stage's identity, and their names in a row
_ABOVE_ZERO = 1e-3  # a log-prob may exceed 0 by rounding


class BadRow(ValueError):
    """A row that is no usable response; the message is the reason."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A response as a file has it, before it is checked.

    Attributes:
      group: responses with an equal key belong to the same prompt.
      sample: the order of the responses in their group; None keeps the order of the file.
      stage: what our own rows say about their stage; None in the files of other systems.
      The other attributes are those of `Rollout` and `Group`; `finish` None derives it from the last token.
    """

    group: Any
    prompt: Any
    tokens: Any
    logprobs: Any
    reward: Any
    finish: str | None = None
    problem: str | None = None
    status: str = "ok"
    malformed: bool | None = None
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    behavior: str | None = None
    mask: Any = None
    sample: int | None = None
    stage: Mapping[str, Any] | None = None


def stage_facts(
    identity: Mapping[str, Any], prompts_per_shard: int, vocab_size: int | None
) -> dict[str, Any]:
    """Return what a row says about its stage."""
    found = {name: identity.get(key) for key, name in _IDENTITY.items()}
    return found | {"prompts_per_shard": prompts_per_shard, "vocab_size": vocab_size}


def stage_identity(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the identity of the stage from what a row says about the stage.

    Without `index` and `policy_updates` it is stage 0, and the policy is that before the first update.
    """
    given = {name: value for name, value in facts.items() if value is not None}
    whole = {"index": 0, "policy_updates": 0} | given
    return {key: whole[name] for key, name in _IDENTITY.items() if name in whole}


def to_row(group: Group, sample: int, stage: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of one response; `stage` is what the row says about its stage, see `COLUMNS`."""
    rollout = group.rollouts[sample]
    return {
        "format": FORMAT,
        "stage": dict(stage),
        "group": group.index,
        "sample": sample,
        "problem": group.problem,
        "prompt": group.prompt.tolist(),
        "tokens": rollout.tokens.tolist(),
        "logprobs": rollout.logprobs.tolist(),
        "reward": float(rollout.reward),
        "finish": rollout.finish,
        "status": rollout.status,
        "malformed": rollout.malformed,
        "reward_parts": dict(rollout.parts),
        "behavior": rollout.behavior,
        "mask": None if rollout.mask is None else rollout.mask.tolist(),
    }


def from_row(row: Mapping[str, Any]) -> list[Candidate]:
    """Return the response in a row of our own format."""
    if row.get("format") != FORMAT:
        raise BadRow(f"format is {row.get('format')!r}; this version reads {FORMAT}")
    if missing := [name for name in COLUMNS if name not in row and name not in _OPTIONAL]:
        raise BadRow(f"no field {missing[0]!r}")
    if not isinstance(row["stage"], Mapping):
        raise BadRow("the field 'stage' has no keys and values")
    for name, kind in COLUMNS["stage"].items():
        value = row["stage"].get(name)
        if value is not None and type(value) is not (str if kind == "string" else int):
            raise BadRow(f"the field {name!r} of 'stage' is {value!r}")
    for name, kind in (("group", int), ("sample", int), ("problem", str), ("status", str), ("behavior", str)):
        if type(row[name]) is not kind:
            raise BadRow(f"the field {name!r} is {row[name]!r}")
    if row["finish"] not in FINISH_REASONS:
        raise BadRow(f"the field 'finish' is {row['finish']!r}; possible: {', '.join(FINISH_REASONS)}")
    return [
        Candidate(
            group=row["group"],
            prompt=row["prompt"],
            tokens=row["tokens"],
            logprobs=row["logprobs"],
            reward=row["reward"],
            finish=row["finish"],
            problem=row["problem"],
            status=row["status"],
            malformed=row.get("malformed"),
            parts=dict(row["reward_parts"] or {}),
            behavior=row["behavior"],
            mask=row.get("mask"),
            sample=row["sample"],
            stage=row["stage"],
        )
    ]


def check_response(
    found: Candidate, *, vocab_size: int, eos_ids: Collection[int], behavior: str
) -> tuple[np.ndarray, Rollout]:
    """Return the prompt and the response of a candidate; raise `BadRow` if the candidate cannot be used.

    Args:
      eos_ids: token ids that end a response, for candidates without a finish reason.
      behavior: name of the behavior of candidates that do not name one.
    """
    prompt = _tokens("the prompt", found.prompt, vocab_size)
    tokens = _tokens("the response", found.tokens, vocab_size)
    if not found.logprobs:
        raise BadRow("no log-probs; without them no ratio can be computed")
    name = found.behavior or behavior
    if not re.fullmatch(r"[\w.-]+", name):  # metrics are named after it
        raise BadRow(f"the behavior {name!r} has characters other than letters, digits, '.', '-' and '_'")
    logprobs = _logprobs(found.logprobs)
    if len(logprobs) != len(tokens):
        raise BadRow(f"{len(tokens)} response tokens, but {len(logprobs)} log-probs")
    mask = _mask(found.mask, len(tokens))
    return prompt, Rollout(
        tokens=tokens,
        logprobs=logprobs if mask is None else np.where(mask, logprobs, np.float32(0)),
        reward=_number("reward", found.reward),
        finish=_finish(found, tokens, eos_ids),
        status=str(found.status),
        malformed=None if found.malformed is None else bool(found.malformed),
        parts={name: _number(f"reward {name}", value) for name, value in found.parts.items()},
        behavior=name,
        mask=mask,
    )


def _mask(values: Any, length: int) -> np.ndarray | None:
    """Return which tokens the policy wrote, or None if it wrote all of them."""
    found = None if values is None else _array(values)
    if values is not None and (found is None or found.dtype.kind not in "bi"):
        raise BadRow("the mask is not a list of true and false")
    if found is None:
        return None
    if len(found) != length:
        raise BadRow(f"{length} response tokens, but {len(found)} entries in the mask")
    if found.all():
        return None
    if not found.any():
        raise BadRow("the mask says that the policy wrote no token of the response")
    return found.astype(bool)


def _tokens(what: str, values: Any, vocab_size: int) -> np.ndarray:
    ids = _array(values)
    if ids is None or (ids.size and ids.dtype.kind != "i"):
        raise BadRow(f"{what} has no token ids" if values is None else f"{what} is not a list of token ids")
    if not ids.size:
        raise BadRow(f"{what} has no tokens")
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if outside.size:
        raise BadRow(f"{what} has the token {outside[0]}, outside the vocabulary of {vocab_size}")
    return ids.astype(np.int32)


def _logprobs(values: Any) -> np.ndarray:
    found = _array(values)
    if found is None or found.dtype.kind not in "fi":
        raise BadRow("the log-probs are not a list of numbers")
    with np.errstate(over="ignore"):
        logprobs = found.astype(np.float32)
    wrong = found[~np.isfinite(logprobs) | (logprobs > _ABOVE_ZERO)]
    if wrong.size:
        raise BadRow(f"the log-prob {wrong[0]} is not a finite number of at most 0")
    return logprobs


def _array(values: Any) -> np.ndarray | None:
    """Return a list as a vector; None if it is no list, or a list of lists."""
    if not isinstance(values, Sequence) or isinstance(values, str):
        return None
    try:
        found = np.asarray(values)
    except (ValueError, OverflowError):
        return None
    return found if found.ndim == 1 else None


def _number(what: str, value: Any) -> float:
    if value is None:
        raise BadRow(f"no {what}")
    try:
        number = float(value) if isinstance(value, (int, float)) else math.nan
    except OverflowError:  # an integer with hundreds of digits
        number = math.inf
    if not abs(number) <= LARGEST_REWARD:
        most = f", at most {LARGEST_REWARD:g}" if math.isfinite(number) else ""
        raise BadRow(f"the {what} {repr(value)[:40]} is not a finite number{most}")
    return number


def _finish(found: Candidate, tokens: np.ndarray, eos_ids: Collection[int]) -> str:
    if found.finish is None:
        return FINISH_REASONS[int(tokens[-1]) not in eos_ids]
    return found.finish if found.finish in FINISH_REASONS else "length"
