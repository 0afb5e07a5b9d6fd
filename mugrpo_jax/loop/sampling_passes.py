"""Sample the shards of a stage, in one pass for each model that writes responses.

Only one of these models is on the device at a time. With one model, its pass writes whole shards. With
several, each pass writes its part of every shard, and the parts are joined at the end, see
`rollouts.behavior_parts`. The seed of a response depends on its number and not on its behavior, so two
behaviors that are the same policy give the responses of one.
"""

import collections
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mugrpo_jax import distributed
from mugrpo_jax.compiling.compile_clock import compile_clock
from mugrpo_jax.config.behaviors import CURRENT, Behavior, assign
from mugrpo_jax.loop.failed_rewards import answer_reader
from mugrpo_jax.loop.sampling_context import SamplingContext
from mugrpo_jax.rollouts import RolloutFolder
from mugrpo_jax.rollouts.behavior_parts import PartFolder, join_parts
from mugrpo_jax.rollouts.generate_rollouts import (
    StageRequests,
    stage_requests,
    training_problem,
    write_shards,
)
from mugrpo_jax.rollouts.shard_writer import ShardFolder
from mugrpo_jax.runs import progress
from mugrpo_jax.sampling import Request, Sampler
from mugrpo_jax.setup.sizes import rollout_settings
from mugrpo_jax.tasks import Problem

Seconds = dict[str, float]

_SHARDS_AT_ONCE = 8


def sample_shards(
    run: SamplingContext, params: Any, rollouts: RolloutFolder, stage: int, shards: Sequence[int]
) -> tuple[Seconds, dict[str, str]]:
    """Sample, score and write some shards. All hosts call this together, each with its own shards.

    Returns:
      Seconds and counts for the journal, and a dict from each failed status to a text about one example.
    """
    sources = _sources(run)
    if len(sources) == 1:
        return _sample(run, params, rollouts, stage, shards, sources[0])
    parts = [PartFolder(number, source, rollouts) for number, source in enumerate(sources)]
    found: list[Seconds] = []
    examples: dict[str, str] = {}
    for part in parts:
        some = [s for s in shards if any(_behaviors(run, part.source, i) for i in rollouts.shard_prompts(s))]
        missing = part.missing_shards(some)
        if not any(distributed.gather("part", bool(missing))):
            continue
        seconds, failed = _sample(run, params, part, stage, missing, part.source)
        found.append(seconds)
        examples = failed | examples
        if any(distributed.gather("sampled", run.stop.requested)):
            return _add(found), examples  # the parts that are written stay
    for shard in shards:
        samples = {
            index: [list(_behaviors(run, source, index)) for source in sources]
            for index in rollouts.shard_prompts(shard)
        }
        join_parts(parts, shard, samples)
    return _add(found), examples


def sample_claimed(
    run: SamplingContext, params: Any, rollouts: RolloutFolder, stage: int, claimed: Iterator[int]
) -> tuple[Seconds, dict[str, str]]:
    """Sample, score and write the shards of `claimed`, an iterator that claims a shard when it is asked.

    It is asked when the sampler has room for more requests. So samplers share a stage by how fast they are.
    With several models, a few shards are claimed at once, because each pass needs all of them.
    """
    sources = _sources(run)
    if len(sources) > 1:
        return sample_shards(run, params, rollouts, stage, list(itertools.islice(claimed, _SHARDS_AT_ONCE)))
    problems: dict[int, Problem] = {}

    def requests() -> Iterator[Request]:
        for shard in claimed:
            part = _requests(run, stage, rollouts.shard_prompts(shard), sources[0])
            for request in part.requests:
                problems[request.index] = part.problems[request.index]
                yield request

    left = [
        i for s in range(rollouts.shards) if not rollouts.path(s).exists() for i in rollouts.shard_prompts(s)
    ]
    total = len(left) * run.config.batch.responses_per_prompt  # others may write some of them
    made = StageRequests(requests(), problems)
    return _write(run, params, rollouts, stage, made, sources[0], total)


def prepare_next(run: SamplingContext, rollouts: RolloutFolder, stage: int, shards: Sequence[int]) -> None:
    """Start to make the requests of the next stage, which has the same size, if there is only one pass."""
    sources = _sources(run)
    if len(sources) == 1:
        key = stage, _prompts(rollouts, shards)
        run.next_requests = key, _requests(run, *key, sources[0])


def _sample(
    run: SamplingContext, params: Any, folder: ShardFolder, stage: int, shards: Sequence[int], source: str
) -> tuple[Seconds, dict[str, str]]:
    """Sample the responses of one source, then free the memory of the sampler."""
    key = stage, _prompts(folder, shards)
    ahead, run.next_requests = run.next_requests, None
    requests = ahead[1] if ahead is not None and ahead[0] == key else _requests(run, *key, source)
    total = sum(len(_behaviors(run, source, i)) for i in key[1])
    return _write(run, params, folder, stage, requests, source, total)


def _write(
    run: SamplingContext,
    params: Any,
    folder: ShardFolder,
    stage: int,
    requests: StageRequests,
    source: str,
    total: int,
) -> tuple[Seconds, dict[str, str]]:
    wanted = functools.partial(_behaviors, run, source)
    by = "" if source == CURRENT else f" with {source}"
    with (
        _sampler(run, params, source) as sampler,
        progress.bar(total, f"stage {stage}: generate{by}", "resp") as bar,
    ):
        compiled = compile_clock().seconds
        seconds, examples = write_shards(
            sampler,
            folder,
            requests,
            run.scorer,
            behaviors=wanted,
            tokenizer=run.setup.tokenizer,
            conversations=run.conversations,
            answer_of=answer_reader(run.config, run.task),
            stopped=lambda: run.stop.requested,
            bar=bar,
        )
    return seconds | {"compile": compile_clock().seconds - compiled}, examples


def _sampler(run: SamplingContext, params: Any, source: str) -> Sampler:
    return run.setup.sampler(params) if source == CURRENT else run.setup.behavior_sampler(source)


def _sources(run: SamplingContext) -> tuple[str, ...]:
    """Return the models that write responses, each once, in the order of their behaviors."""
    return tuple(dict.fromkeys(behavior.source for behavior in run.config.sampling.all_behaviors))


def _assigned(run: SamplingContext, prompt: int) -> list[Behavior]:
    return assign(run.config.sampling.all_behaviors, prompt, run.config.batch.responses_per_prompt)


def _behaviors(run: SamplingContext, source: str, prompt: int) -> Mapping[int, str]:
    """Return the sample numbers of a prompt that a source writes, with the names of their behaviors."""
    assigned = enumerate(_assigned(run, prompt))
    return {number: behavior.name for number, behavior in assigned if behavior.source == source}


def _prompts(folder: ShardFolder, shards: Sequence[int]) -> tuple[int, ...]:
    return tuple(i for shard in shards for i in folder.shard_prompts(shard))


def _requests(run: SamplingContext, stage: int, prompts: Sequence[int], source: str) -> StageRequests:
    """Return requests for some prompts of a stage. The training data continues where the last stage ended."""
    first = stage * run.config.prompts_per_stage

    def split(prompt: int) -> list[tuple[list[int], float]]:
        by_temperature: dict[float, list[int]] = collections.defaultdict(list)
        for number, behavior in enumerate(_assigned(run, prompt)):
            if behavior.source == source:
                by_temperature[behavior.temperature].append(number)
        return [(numbers, temperature) for temperature, numbers in by_temperature.items()]

    return stage_requests(
        stage,
        prompts,
        lambda index: training_problem(run.task.train, run.config.seed, first + index),
        run.setup.prompt_tokens,
        rollout_settings(run.config),
        stop=run.setup.stop_ids,
        thread=run.request_thread,
        split=split,
    )


def _add(found: Sequence[Mapping[str, Any]]) -> Seconds:
    """Add up the seconds and counts of several passes; the occupancy is that of all their slots."""
    total = {name: sum(seconds[name] for seconds in found) for name in (found[0] if found else ())}
    if total.get("slot_steps"):
        filled = sum(seconds["occupancy"] * seconds["slot_steps"] for seconds in found)
        total["occupancy"] = filled / total["slot_steps"]
    return total
