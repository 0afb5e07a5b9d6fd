"""Make a stage from files of rollouts, in the open format or as another system writes them.

All rows are checked before anything is written. They are kept in memory, 8 bytes per token.
"""

import collections
import dataclasses
import hashlib
import secrets
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mugrpo_jax.rollouts.open_format import BadRow, Candidate, check_response, stage_identity
from mugrpo_jax.rollouts.other_formats import read
from mugrpo_jax.rollouts.record_files import RolloutError
from mugrpo_jax.rollouts.records import Group, Rollout, encode
from mugrpo_jax.rollouts.rollout_folder import RolloutFolder
from mugrpo_jax.rollouts.table_files import read_rows

_PROMPTS_PER_SHARD = 64


@dataclasses.dataclass(frozen=True)
class Imported:
    """The result of an import: the new stage, who wrote the files, and the rows left out with the reason."""

    stage: RolloutFolder
    system: str
    responses: int
    left_out: collections.Counter[str]
    examples: Mapping[str, str]

    def __str__(self) -> str:
        kept = f"{self.stage.folder}: {self.responses:,} responses to {self.stage.prompts:,} prompts"
        lines = [f"{kept}, written by {self.system}"]
        for reason, count in self.left_out.most_common():
            lines.append(f"  left out {count:,}: {reason} (first: {self.examples[reason]})")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class _Response:
    place: str
    system: str
    candidate: Candidate
    prompt: np.ndarray
    rollout: Rollout


class _Complaints:
    """Raises an error for a bad row or, with `skip_bad`, counts it."""

    def __init__(self, skip_bad: bool) -> None:
        self.skip_bad, self.counts = skip_bad, collections.Counter[str]()
        self.examples: dict[str, str] = {}

    def add(self, place: str, reason: str, responses: int = 1) -> None:
        if not self.skip_bad:
            raise RolloutError(f"{place}: {reason}; mend it, or leave such rows out with --skip-bad")
        self.counts[reason] += responses
        self.examples.setdefault(reason, place)


def import_rollouts(
    files: Sequence[Path],
    out: Path,
    *,
    system: str = "auto",
    vocab_size: int | None = None,
    eos_ids: Collection[int] = (),
    behavior: str | None = None,
    skip_bad: bool = False,
) -> Imported:
    """Check the rows of some files and write them to `out` as a stage.

    Args:
      system: who wrote the files, one of `other_formats.SYSTEMS`.
      vocab_size: number of tokens of the model; None: as the rows of our own format say.
      eos_ids: token ids that end a response, for rows without a finish reason.
      behavior: name of the policy that wrote the responses; None: as the rows of our own format say, or the
        name of the system.
      skip_bad: leave out rows and groups that cannot be used, and count them, instead of raising an error.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RolloutError(f"{out}: exists already; choose another --out")
    if len({file.resolve() for file in files}) < len(files):
        raise RolloutError(f"{out}: one of the files is named twice; its responses would count twice")
    complaints, systems = _Complaints(skip_bad), collections.Counter[str]()
    found: dict[Any, list[_Response]] = collections.defaultdict(list)
    for place, kind, candidate, key in _candidates(files, system, complaints):
        known = vocab_size or (candidate.stage or {}).get("vocab_size")
        if known is None:
            raise RolloutError(f"{place}: the size of the vocabulary is unknown; name the model with --model")
        if behavior and candidate.behavior and candidate.behavior != behavior:
            raise RolloutError(
                f"{place}: the row says that the behavior {candidate.behavior!r} wrote it, not {behavior!r}; "
                "leave --behavior out"
            )
        try:
            checked = check_response(candidate, vocab_size=known, eos_ids=eos_ids, behavior=behavior or kind)
        except BadRow as error:
            complaints.add(place, str(error))
            continue
        systems[kind] += 1
        found[key].append(_Response(place, kind, candidate, *checked))
    facts = _facts(found)  # before the groups, because groups of two stages have the same numbers
    groups = _groups(found, complaints)
    if not groups:
        raise RolloutError(f"{files[0]}: no usable group of responses{_why(complaints)}")
    name = ", ".join(systems)
    stage = _write(groups, out, name, facts, sum(complaints.counts.values()))
    responses = sum(len(group.rollouts) for group in groups)
    return Imported(stage, name, responses, complaints.counts, complaints.examples)


def _candidates(
    files: Sequence[Path], system: str, complaints: _Complaints
) -> Iterator[tuple[str, str, Candidate, Any]]:
    """Yield place, system, response and the key of its group, for every response in the files."""
    for file in files:
        for number, row in read_rows(file):
            place = f"{file}:{number}"
            try:
                kind, candidates = read(row, system)
            except BadRow as error:
                complaints.add(place, str(error))
                continue
            for candidate in candidates:
                # In other systems, the same key in another file is another step.
                yield place, kind, candidate, (None if kind == "mugrpo" else file, candidate.group)


def _groups(found: Mapping[Any, list[_Response]], complaints: _Complaints) -> list[Group]:
    """Return the groups with the most frequent number of responses, in order and numbered from 0."""
    counts = collections.Counter(len(members) for members in found.values() if len(members) > 1)
    common = max(counts, key=lambda size: (counts[size], size), default=0)
    parts = collections.Counter(tuple(m.rollout.parts) for members in found.values() for m in members)
    chosen = []
    for members in found.values():
        reason = _wrong(members, common, parts.most_common(1)[0][0])
        if reason is not None:
            complaints.add(members[0].place, reason, len(members))
        else:
            chosen.append(members)
    if all(members[0].candidate.stage is not None for members in chosen):
        chosen.sort(key=lambda members: members[0].candidate.group)
    return [_group(index, members) for index, members in enumerate(chosen)]


def _wrong(members: Sequence[_Response], common: int, parts: tuple[str, ...]) -> str | None:
    """Return why a group cannot be used; None if it can."""
    if len(members) == 1:
        return "the only response of its group; an advantage needs at least two"
    if len(members) != common:
        return f"a group of {len(members)} responses; most groups here have {common}"
    if any(not np.array_equal(member.prompt, members[0].prompt) for member in members):
        return "the responses of its group have different prompts"
    samples = [member.candidate.sample for member in members]
    if None not in samples and len(set(samples)) != len(samples):
        return "two responses of its group have the same sample number"
    if any(tuple(member.rollout.parts) != parts for member in members):
        return f"its rewards are not {', '.join(parts) or 'a single one'}, as in most rows here"
    return None


def _group(index: int, members: list[_Response]) -> Group:
    if all(member.candidate.sample is not None for member in members):
        members = sorted(members, key=lambda member: member.candidate.sample or 0)
    first = members[0]
    problem = str(index) if first.candidate.problem is None else first.candidate.problem
    if first.candidate.stage is None:  # so that it is not taken for a problem of the task
        problem = f"{first.system}:{problem}"
    return Group(index, problem, first.prompt, tuple(member.rollout for member in members))


def _facts(found: Mapping[Any, list[_Response]]) -> Mapping[str, Any] | None:
    """Return what the rows say about their stage; None for the rows of other systems."""
    first: _Response | None = None
    for member in (member for members in found.values() for member in members):
        first = first or member
        if member.candidate.stage != first.candidate.stage:
            raise RolloutError(
                f"{member.place}: of another stage than {first.place}; import each stage into its own folder"
            )
    return None if first is None else first.candidate.stage


def _write(
    groups: Sequence[Group], out: Path, system: str, facts: Mapping[str, Any] | None, left_out: int
) -> RolloutFolder:
    """Write the stage under a temporary name, and give it its name once it is complete."""
    if facts is None:
        digest = hashlib.sha256(b"".join(record for group in groups for record in encode(group)))
        name = digest.hexdigest()[:12]
        identity: dict[str, Any] = {"fingerprint": name, "stage": 0, "policy_updates": 0, "imported": system}
    else:
        identity = stage_identity(facts)
    if left_out:
        identity["left_out"] = left_out + identity.get("left_out", 0)
    per_shard = (facts or {}).get("prompts_per_shard") or _PROMPTS_PER_SHARD
    temporary = out.with_name(f"{out.name}.{secrets.token_hex(4)}.tmp")
    stage = RolloutFolder(temporary, identity, len(groups), per_shard)
    try:
        for shard in range(stage.shards):
            stage.write_shard(shard, [groups[index] for index in stage.shard_prompts(shard)])
        stage.commit()
        if out.exists():
            out.rmdir()
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # after an error
    return dataclasses.replace(stage, folder=out)


def _why(complaints: _Complaints) -> str:
    if not complaints.counts:
        return "; the files are empty"
    reason, count = complaints.counts.most_common(1)[0]
    return f"; {count} responses: {reason} (first: {complaints.examples[reason]})"
