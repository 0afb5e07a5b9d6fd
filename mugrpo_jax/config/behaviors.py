"""The policies that write the responses of a run: the current one, or several with a share each."""

import dataclasses
import math
import re
from typing import NamedTuple

from mugrpo_jax.config.settings import ConfigError, Section, required, setting

CURRENT = "current"
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclasses.dataclass(frozen=True)
class BehaviorSection(Section):
    """One of several policies that write responses, with its temperature."""

    source: str = required(
        "`current`, the checkpoint RUN@UPDATES of a run, or another model with the same tokenizer, named as "
        "in model.source"
    )
    share: float = required("share of the responses to each prompt; all shares add up to 1")
    temperature: float | None = setting(
        None, "divides the logits while sampling; null: sampling.temperature", above=0
    )


class Behavior(NamedTuple):
    """A policy and a temperature with which responses are sampled.

    `name` is stored with every response. It has no slash, because metrics are named after it.
    """

    name: str
    source: str
    share: float
    temperature: float


def check_behaviors(listed: tuple[BehaviorSection, ...] | None) -> None:
    """Raise an error if the list in a config is empty, or if its shares are wrong."""
    if listed is None:
        return
    if not listed:
        raise ConfigError("behaviors: the list is empty; name a behavior, or leave the key out")
    for number, behavior in enumerate(listed):
        if not 0 < behavior.share <= 1:
            raise ConfigError(
                f"behaviors[{number}].share: must be above 0 and at most 1, got {behavior.share}"
            )
    total = math.fsum(behavior.share for behavior in listed)
    if abs(total - 1) > 1e-6:
        raise ConfigError(f"behaviors: the shares add up to {total:.6g}; they must add up to 1")


def behaviors_of(listed: tuple[BehaviorSection, ...] | None, temperature: float) -> tuple[Behavior, ...]:
    """Return the behaviors in a config with their names; None means the current policy alone.

    >>> one, two = (BehaviorSection("current", 0.75), BehaviorSection("runs/big@512", 0.25, 0.6))
    >>> [behavior.name for behavior in behaviors_of((one, two), temperature=1.0)]
    ['current', 'big-512-t0.6']

    Two different behaviors never have the same name: the second one gets a number.
    """
    if listed is None:
        return (Behavior(CURRENT, CURRENT, 1.0, temperature),)
    short: dict[str, set[str]] = {CURRENT: {CURRENT}}
    for behavior in listed:
        short.setdefault(_last_part(behavior.source), set()).add(behavior.source)
    found: list[Behavior] = []
    named: dict[str, tuple[str, float]] = {}
    for behavior in listed:
        last = _last_part(behavior.source)
        name = re.sub(r"[^\w.-]+", "-", last if len(short[last]) == 1 else behavior.source).strip("-")
        own = temperature if behavior.temperature is None else behavior.temperature
        name = (name or "model") + ("" if own == temperature else f"-t{own:g}")
        plain, number = name, 2
        while named.setdefault(name, (behavior.source, own)) != (behavior.source, own):
            name, number = f"{plain}-{number}", number + 1
        found.append(Behavior(name, behavior.source, behavior.share, own))
    return tuple(found)


def _last_part(source: str) -> str:
    return source.rstrip("/").rpartition("/")[2]


def assign(behaviors: tuple[Behavior, ...], prompt: int, responses: int) -> list[Behavior]:
    """Return the behavior of each response to a prompt, in the order of the list in the config.

    A share that is no whole number of responses is rounded up for some prompts and down for others, so that
    it is right on average. Which prompts these are follows from `prompt`, the index in the stage.

    >>> half = (Behavior("a", "a", 0.5, 1.0), Behavior("b", "b", 0.5, 1.0))
    >>> [[behavior.name for behavior in assign(half, prompt, 3)] for prompt in (0, 1)]
    [['a', 'a', 'b'], ['a', 'b', 'b']]
    """
    offset, total = prompt * _GOLDEN % 1.0, math.fsum(behavior.share for behavior in behaviors)
    chosen: list[Behavior] = []
    for number, behavior in enumerate(behaviors, 1):
        share = math.fsum(before.share for before in behaviors[:number]) / total
        until = math.ceil(round(share * responses, 6) - offset)
        chosen += [behavior] * (until - len(chosen))
    return chosen
