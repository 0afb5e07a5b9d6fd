"""Read the rollouts that other systems write: verl, TRL, prime-rl and vLLM.

Each function takes one row of a file, and returns the responses in it. `open_format.check_response` checks
them. `docs/guides/rollout-files.md` says which fields of which system are read.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mugrpo_jax.rollouts.open_format import BadRow, Candidate, from_row

Row = Mapping[str, Any]


def verl(row: Row) -> list[Candidate]:
    """Read a row with the field names of verl's `DataProto`; masks remove its padding.

    verl pads prompts on the left. Only `attention_mask` says which of their tokens are padding.
    The JSONL dump of `trainer.rollout_data_dir` has only texts and scores, so its rows have no log-probs.
    """
    if "responses" not in row:
        raise BadRow("no token ids and no log-probs (fields prompts, responses, rollout_log_probs of verl)")
    prompt, response = list(row["prompts"]), list(row["responses"])
    if row.get("attention_mask") is None:
        raise BadRow("no 'attention_mask'; without it padding cannot be told from tokens")
    attention, split = (
        _flags("attention_mask", row["attention_mask"], len(prompt) + len(response)),
        len(prompt),
    )
    prompt = [token for token, kept in zip(prompt, attention[:split], strict=True) if kept]
    masks = {name: row.get(name) for name in ("response_mask", "loss_mask")}
    length, wrote = _written(masks | {"attention_mask": attention[split:]}, len(response))
    scores = row.get("token_level_scores")  # the reward is on the last token, which a tool may have written
    if scores is not None:
        scores = [score for score, kept in zip(scores, attention[split:]) if kept]
    return [
        Candidate(
            group=row.get("uid", tuple(prompt)),
            prompt=prompt,
            tokens=response[:length],
            logprobs=_cut(row.get("rollout_log_probs"), length, len(response)),
            reward=_first(row.get("score"), None if scores is None else float(sum(scores))),
            problem=_text(row.get("uid")),
            mask=wrote,
        )
    ]


_TRL_MASKS = ("env_mask", "tool_mask", "completion_mask")


def trl(row: Row) -> list[Candidate]:
    """Read what a `rollout_func` of TRL returns, with rewards: one response, or lists over a batch."""
    if "completion_ids" not in row:
        raise BadRow("no field 'completion_ids'; the completions that TRL logs have no token ids")
    batch = bool(row["completion_ids"]) and isinstance(row["completion_ids"][0], Sequence)
    fields = ("prompt_ids", "completion_ids", "logprobs", "logprob_token_ids", *_TRL_MASKS)
    rewards = _first(row.get("reward"), row.get("rewards"))
    if not batch:
        return [_trl_response({name: row.get(name) for name in fields}, rewards, row)]
    count = len(row["completion_ids"])
    columns = {name: row.get(name) or [None] * count for name in fields}
    columns["reward"] = rewards if isinstance(rewards, Sequence) else [None] * count
    if wrong := [name for name, column in columns.items() if len(column) != count]:
        raise BadRow(f"{count} completions, but {len(columns[wrong[0]])} entries in {wrong[0]!r}")
    rows = [{name: column[i] for name, column in columns.items()} for i in range(count)]
    return [_trl_response(one, one["reward"], row) for one in rows]


def _trl_response(one: Row, reward: Any, row: Row) -> Candidate:
    length, wrote = _written({name: one[name] for name in _TRL_MASKS}, len(one["completion_ids"]))
    logprobs = one["logprobs"]
    if logprobs and isinstance(logprobs[0], Sequence):
        logprobs = _of_sampled(one["completion_ids"], logprobs, one["logprob_token_ids"])
    return Candidate(
        group=(row.get("step"), tuple(one["prompt_ids"] or ())),
        prompt=one["prompt_ids"],
        tokens=one["completion_ids"][:length],
        logprobs=_cut(logprobs, length, len(one["completion_ids"])),
        reward=reward,
        mask=wrote,
    )


def _of_sampled(tokens: Sequence[int], logprobs: Sequence[Any], ids: Any) -> list[Any]:
    """Return the log-prob of the sampled token at each position, from those of the likeliest tokens."""
    if len(logprobs) != len(tokens):
        raise BadRow(f"{len(tokens)} response tokens, but {len(logprobs)} log-probs")
    if ids is None and all(len(choices) == 1 for choices in logprobs):
        return [choices[0] for choices in logprobs]
    if ids is None or list(map(len, ids)) != list(map(len, logprobs)):
        raise BadRow("several log-probs for each token, but no 'logprob_token_ids' to choose by")
    places = zip(tokens, ids, logprobs, strict=True)
    found = [dict(zip(row, values, strict=True)).get(token) for token, row, values in places]
    if None in found:
        raise BadRow("a sampled token is not among those with log-probs")
    return found


def prime_rl(row: Row) -> list[Candidate]:
    """Read a rollout that prime-rl saves (of verifiers, with its trajectory), or a `TrainingSample`."""
    tokens: Any = row
    if "trajectory" in row:
        turns = row["trajectory"] or [{}]
        if len(turns) > 1:
            raise BadRow(f"{len(turns)} turns; only one response to one prompt can be trained on")
        tokens = turns[0].get("tokens") or {}
    if row.get("error"):
        raise BadRow(f"its rollout failed: {str(row['error'])[:60]}")
    if "completion_ids" not in tokens:
        raise BadRow("no token ids (field completion_ids of prime-rl, in 'trajectory' or beside it)")
    mask = {"completion_mask": tokens.get("completion_mask")}
    length, wrote = _written(mask, len(tokens["completion_ids"]))
    key = row.get("example_id")
    names = [row[name] for name in ("env_name", "task") if row.get(name) is not None]
    truncated = row.get("is_truncated", tokens.get("is_truncated"))
    return [
        Candidate(
            group=tuple(tokens.get("prompt_ids") or ()) if key is None else (*names, key),
            prompt=tokens.get("prompt_ids"),
            tokens=tokens["completion_ids"][:length],
            logprobs=_cut(tokens.get("completion_logprobs"), length, len(tokens["completion_ids"])),
            reward=row.get("reward"),
            finish=None if truncated is None else ("length" if truncated else "stop"),
            problem=_text(key),
            mask=wrote,
        )
    ]


def vllm(row: Row) -> list[Candidate]:
    """Read a `RequestOutput` of vLLM, a completion of its server, or a line of `vllm run-batch`.

    vLLM gives no rewards: put `reward` into each output, or a list `rewards` into the row.
    """
    key = row.get("custom_id", row.get("request_id", row.get("id")))
    body = (row.get("response") or {}).get("body") if "response" in row else row
    outputs = (body or {}).get("outputs") or (body or {}).get("choices")
    if not body or not outputs:
        raise BadRow("no outputs (fields outputs or choices of vLLM)")
    rewards = row.get("rewards", body.get("rewards")) or [None] * len(outputs)
    if len(rewards) != len(outputs):
        raise BadRow(f"{len(outputs)} outputs, but {len(rewards)} rewards")
    found = []
    for output, reward in zip(outputs, rewards):
        prompt = output.get("prompt_token_ids") or body.get("prompt_token_ids")
        if output.get("token_ids") is None:
            raise BadRow("no token ids; ask the server for them with return_token_ids=true")
        found.append(
            Candidate(
                group=key if key is not None else tuple(prompt or ()),
                prompt=prompt,
                tokens=output["token_ids"],
                logprobs=_vllm_logprobs(output["token_ids"], output.get("logprobs")),
                reward=output.get("reward", reward),
                finish=output.get("finish_reason"),
                problem=_text(key),
            )
        )
    return found


def _vllm_logprobs(tokens: Sequence[int], found: Any) -> Any:
    """Return the log-probs of the sampled tokens, from a list of dicts by token id or from OpenAI's forms."""
    if isinstance(found, Mapping):
        content = found.get("content")
        if content is None:
            return found.get("token_logprobs")
        _same_length(content, tokens)
        for token, entry in zip(tokens, content, strict=True):
            named = str(entry.get("token", ""))
            if named.startswith("token_id:") and named != f"token_id:{token}":
                raise BadRow(f"the log-prob of {named} stands at the token {token}")
        return [entry["logprob"] for entry in content]
    if not found or not isinstance(found[0], Mapping):
        return found
    _same_length(found, tokens)
    entries = [
        choices.get(str(token), choices.get(token)) for token, choices in zip(tokens, found, strict=True)
    ]
    if None in entries:
        raise BadRow("a sampled token is not among those with log-probs")
    return [entry["logprob"] if isinstance(entry, Mapping) else entry for entry in entries]


def _same_length(logprobs: Sequence[Any], tokens: Sequence[int]) -> None:
    if len(logprobs) != len(tokens):
        raise BadRow(f"{len(tokens)} response tokens, but {len(logprobs)} log-probs")


def _flags(name: str, mask: Any, length: int) -> list[bool]:
    """Return a mask as booleans; raise `BadRow` if it has another length or other values than 0 and 1."""
    if len(mask) != length:
        raise BadRow(f"{length} tokens, but {len(mask)} entries in the mask {name!r}")
    if any(value not in (0, 1) for value in mask):
        raise BadRow(f"the mask {name!r} has other values than 0 and 1")
    return [bool(value) for value in mask]


def _written(masks: Mapping[str, Any], length: int) -> tuple[int, list[bool] | None]:
    """Return the length up to the last token that the policy wrote, and which of these tokens it wrote.

    The policy wrote a token if all masks that are not None say so. What follows the last one is padding.
    Tokens before it that are not the policy's are of a tool or user.
    """
    known = [_flags(name, mask, length) for name, mask in masks.items() if mask is not None]
    if not known:
        return length, None
    wrote = [all(flags) for flags in zip(*known, strict=True)]
    if not any(wrote):
        raise BadRow("the mask says that the policy wrote no token of the response")
    end = max(place for place, written in enumerate(wrote) if written) + 1
    return end, wrote[:end]


def _cut(logprobs: Any, written: int, length: int) -> Any:
    """Return the log-probs of the tokens that the policy wrote, if there is one for each of all tokens."""
    return logprobs[:written] if logprobs and len(logprobs) == length else logprobs


def _first(*values: Any) -> Any:
    """Return the first value that is not None."""
    return next((value for value in values if value is not None), None)


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def detect(row: Row) -> str:
    """Return which system wrote a row, by its fields."""
    if "format" in row:
        return "mugrpo"
    signs = {
        "verl": ("responses", "rollout_log_probs", "gts"),
        "prime-rl": ("trajectory", "completion_logprobs", "example_id"),
        "trl": ("completion_ids", "completion"),
        "vllm": ("outputs", "choices", "response"),
    }
    for system, names in signs.items():
        if any(name in row for name in names):
            return system
    raise BadRow(f"unknown fields ({', '.join(map(str, list(row)[:6]))}); name the system with --from")


READERS: Mapping[str, Callable[[Row], list[Candidate]]] = {
    "mugrpo": from_row,
    "verl": verl,
    "trl": trl,
    "prime-rl": prime_rl,
    "vllm": vllm,
}
SYSTEMS = ("auto", *READERS)


def read(row: Any, system: str) -> tuple[str, list[Candidate]]:
    """Return the name of the system that wrote a row, and the responses in the row."""
    if isinstance(row, ValueError):
        raise BadRow(str(row))
    if not isinstance(row, Mapping):
        raise BadRow(f"a {type(row).__name__}, not an object with fields")
    found = detect(row) if system == "auto" else system
    try:
        candidates = READERS[found](row)
        for candidate in candidates:
            hash(candidate.group)  # raises TypeError if it cannot be the key of a group
        return found, candidates
    except BadRow:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise BadRow(f"not as {found} writes it ({type(error).__name__}: {error})") from None
