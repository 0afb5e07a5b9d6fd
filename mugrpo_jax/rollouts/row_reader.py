"""Read single responses of a stage from its shards."""

import collections
import functools
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader

from mugrpo_jax.files import is_remote, local_copy, scratch_folder, wait_for
from mugrpo_jax.rollouts.micro_batches import Row
from mugrpo_jax.rollouts.record_files import RolloutError
from mugrpo_jax.rollouts.records import decode_prompt, decode_rollout
from mugrpo_jax.rollouts.reference_folder import ReferenceFolder
from mugrpo_jax.rollouts.rollout_folder import RolloutFolder

_OPEN = 256  # most shards that are open at the same time
_DOWNLOADS = 16  # most shards that are downloaded at the same time


class RowReader:
    """Completes rows that have only an `origin` and an advantage: reads their prompts and responses.

    Several threads may call the reader at the same time. `responses` is the number of responses per prompt.
    With `reference`, the rows also get the log-probs of the reference policy. With `behaviors`, the names of
    all behaviors of the stage, they get the number of their behavior in this list.
    """

    def __init__(
        self,
        stage: RolloutFolder,
        responses: int,
        reference: ReferenceFolder | None = None,
        behaviors: Sequence[str] = (),
    ) -> None:
        self._behaviors = {name: number for number, name in enumerate(behaviors)}
        self._size = 1 + responses
        self._rollouts = _Shards(stage, stage.path, self._size)
        self._reference = None if reference is None else _Shards(stage, reference.path, responses)

    def __call__(self, rows: Sequence[Row]) -> list[Row]:
        """Return the complete rows. Rows of a group share one prompt array."""
        prompts = {group: group * self._size for group, _ in (row.origin for row in rows)}
        places = [prompts[group] + 1 + sample for group, sample in (row.origin for row in rows)]
        records = self._rollouts.read({*prompts.values(), *places})
        tokens = {group: decode_prompt(records[place]) for group, place in prompts.items()}
        references = self._read_references(rows)
        complete = []
        for row, place, reference in zip(rows, places, references):
            found = decode_rollout(records[place])
            complete.append(
                row._replace(
                    prompt=tokens[row.origin[0]],
                    response=found.tokens,
                    behavior_logp=found.logprobs,
                    reference_logp=reference,
                    behavior=self._behaviors[found.behavior] if self._behaviors else None,
                    wrote=found.mask,
                )
            )
        return complete

    def _read_references(self, rows: Sequence[Row]) -> list[np.ndarray | None]:
        if self._reference is None:
            return [None] * len(rows)
        places = [group * (self._size - 1) + sample for group, sample in (row.origin for row in rows)]
        records = self._reference.read(set(places))
        return [np.frombuffer(records[place], "<f4") for place in places]


class _Shards:
    """Reads single records from the shard files of a stage; each prompt has `per_prompt` records."""

    def __init__(self, stage: RolloutFolder, path: Callable[[int], Path], per_prompt: int) -> None:
        self._per_shard = stage.prompts_per_shard * per_prompt
        # A run in a bucket: shards are downloaded into this folder, which is removed with this object.
        self._copies = (
            tempfile.TemporaryDirectory(dir=scratch_folder(), ignore_cleanup_errors=True)
            if is_remote(path(0))
            else None
        )
        place = path(0).parent if self._copies is None else Path(self._copies.name)

        def open_shard(shard: int) -> Any:
            return wait_for(lambda: _open(local_copy(path(shard), place)), path(shard), stage.patience_s)

        self._open = functools.lru_cache(_OPEN)(open_shard)

    def read(self, places: Iterable[int]) -> dict[int, bytes]:
        """Return the records at these places, counted over all shards."""
        wanted: dict[int, list[int]] = collections.defaultdict(list)
        for place in sorted(places):
            wanted[place // self._per_shard].append(place)
        if self._copies is not None:
            with ThreadPoolExecutor(_DOWNLOADS) as pool:
                list(pool.map(self._open, wanted))
        found: dict[int, bytes] = {}
        for shard, inside in wanted.items():
            records = self._open(shard).read([place % self._per_shard for place in inside])
            found.update(zip(inside, records))
        return found


def _open(path: Path) -> Any:
    # These options are for random access: nothing is read ahead.
    options = "readahead_buffer_size:0,max_parallelism:0"
    reader = ArrayRecordReader(str(path), options, file_reader_buffer_size=32_768)
    if not reader.ok():
        raise RolloutError(f"{path}: missing or damaged; restore it, and run the same command again")
    return reader
