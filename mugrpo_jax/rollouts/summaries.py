"""Count and add up the rollouts of a shard, and of all shards of a stage."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mugrpo_jax.rollouts.records import CURRENT, Group, Rollout


def summarise(groups: Sequence[Group]) -> dict[str, Any]:
    """Return counts and sums over the groups, and the length of the longest response."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return {
        "groups": len(groups),
        "responses": len(rollouts),
        "prompt_tokens": sum(len(group.prompt) for group in groups),
        "response_tokens": sum(rollout.written for rollout in rollouts),
        "reward": float(sum(rollout.reward for rollout in rollouts)),
        "longest_response": max((len(rollout.tokens) for rollout in rollouts), default=0),
        "equal_groups": sum(len(set(group.rewards.tolist())) == 1 for group in groups),
        "finish": dict(sorted(Counter(rollout.finish for rollout in rollouts).items())),
        "status": dict(sorted(Counter(rollout.status for rollout in rollouts).items())),
        **_turns(rollouts),
        **_largest_token(groups),
        **_malformed(rollouts),
        **_reward_parts(rollouts),
        **_behaviors(rollouts),
    }


def _turns(rollouts: Sequence[Rollout]) -> dict[str, int]:
    """Return how many messages of an environment the responses have, and in how many responses they are.

    Nothing if no response has one.
    """
    masks = [rollout.mask for rollout in rollouts if rollout.mask is not None]
    if not masks:
        return {}
    messages = sum(int((np.diff(mask.astype(np.int8)) < 0).sum()) for mask in masks)
    return {
        "answered_responses": len(masks),
        "messages": messages,
        "message_tokens": sum(int((~mask).sum()) for mask in masks),
    }


def _largest_token(groups: Sequence[Group]) -> dict[str, int]:
    """Return the largest token id, with which a replay checks that its model has all tokens."""
    largest = [max([g.prompt.max(), *(r.tokens.max() for r in g.rollouts)]) for g in groups]
    return {"largest_token": int(max(largest))} if largest else {}


def _behaviors(rollouts: Sequence[Rollout]) -> dict[str, dict[str, dict[str, float]]]:
    """Return counts and sums for each behavior, or nothing if the current policy wrote all responses."""
    names = sorted({rollout.behavior for rollout in rollouts})
    if names in ([], [CURRENT]):
        return {}
    found = {name: [rollout for rollout in rollouts if rollout.behavior == name] for name in names}
    return {"behaviors": {name: _behavior_sums(members) for name, members in found.items()}}


def _behavior_sums(rollouts: Sequence[Rollout]) -> dict[str, float]:
    return {
        "responses": len(rollouts),
        "response_tokens": sum(rollout.written for rollout in rollouts),
        "reward": float(sum(rollout.reward for rollout in rollouts)),
        "truncated": sum(rollout.finish == "length" for rollout in rollouts),
    }


def _malformed(rollouts: Sequence[Rollout]) -> dict[str, int]:
    """Return the number of malformed responses, or nothing if nobody looked for answers in them."""
    known = [rollout.malformed for rollout in rollouts if rollout.malformed is not None]
    return {"malformed": sum(known)} if known else {}


def _reward_parts(rollouts: Sequence[Rollout]) -> dict[str, dict[str, float]]:
    """Return the sum of each of several rewards, or nothing if the rollouts have a single reward."""
    names = rollouts[0].parts if rollouts else ()
    sums = {name: float(sum(rollout.parts[name] for rollout in rollouts)) for name in names}
    return {"reward_parts": sums} if sums else {}


def total(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Combine the summaries of all shards to that of the stage."""
    whole: dict[str, Any] = {}
    for name, first in summaries[0].items():
        if name == "behaviors" or not all(name in summary for summary in summaries):
            continue  # shards may have different behaviors, see below
        values = [summary[name] for summary in summaries]
        if name in ("longest_response", "largest_token"):
            whole[name] = max(values)
        elif name == "reward_parts":  # a Counter would leave out sums that are not above 0
            whole[name] = {part: sum(value[part] for value in values) for part in first}
        elif isinstance(first, Mapping) and name not in ("identity", "index"):
            whole[name] = dict(sum(map(Counter, values), Counter()))
        elif isinstance(first, (int, float)):
            whole[name] = sum(values)
    for name in ("answered_responses", "messages", "message_tokens"):
        if any(name in summary for summary in summaries):
            whole[name] = sum(summary.get(name, 0) for summary in summaries)
    return whole | _total_behaviors(summaries)


def _total_behaviors(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Add up the sums of each behavior. A shard without a list of behaviors is all of the current policy."""
    if not any("behaviors" in summary for summary in summaries):
        return {}
    added: dict[str, dict[str, float]] = {}
    for summary in summaries:
        whole = {name: summary[name] for name in ("responses", "response_tokens", "reward")}
        current = whole | {"truncated": summary["finish"].get("length", 0)}
        for name, sums in summary.get("behaviors", {CURRENT: current}).items():
            before = added.setdefault(name, dict.fromkeys(sums, 0))
            added[name] = {key: before[key] + value for key, value in sums.items()}
    return {"behaviors": dict(sorted(added.items()))}
