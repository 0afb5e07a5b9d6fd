"""Read single responses of a stage from its shards."""

import collections
import functools
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from array_record.python.array_record_module import ArrayRecordReader

from mugrpo_jax.files import is_remote, local_copy, scratch_folder, wait_for
from mugrpo_jax.rollouts.micro_batches import Row
from mugrpo_jax.rollouts.records import decode_prompt, decode_rollout
from mugrpo_jax.rollouts.rollout_folder import RolloutError, RolloutFolder

_OPEN = 256  # most shards that are open at the same time
_DOWNLOADS = 16  # most shards that are downloaded at the same time


class RowReader:
    """Completes rows that have only an `origin` and an advantage: reads their prompts and responses.

    Several threads may call the reader at the same time. `responses` is the number of responses per prompt.
    """

    def __init__(self, stage: RolloutFolder, responses: int) -> None:
        self._stage, self._size = stage, 1 + responses
        # A run in a bucket: shards are downloaded into this folder, which is removed with this object.
        self._copies = (
            tempfile.TemporaryDirectory(dir=scratch_folder(), ignore_cleanup_errors=True)
            if is_remote(stage.folder)
            else None
        )
        place = stage.folder if self._copies is None else Path(self._copies.name)
        self._open = functools.lru_cache(_OPEN)(functools.partial(_open_shard, stage, place))

    def __call__(self, rows: Sequence[Row]) -> list[Row]:
        """Return the complete rows. Rows of a group share one prompt array."""
        prompts = {group: group * self._size for group, _ in (row.origin for row in rows)}
        places = [prompts[group] + 1 + sample for group, sample in (row.origin for row in rows)]
        records = self._read({*prompts.values(), *places})
        tokens = {group: decode_prompt(records[place]) for group, place in prompts.items()}
        complete = []
        for row, place in zip(rows, places):
            found = decode_rollout(records[place])
            complete.append(
                row._replace(
                    prompt=tokens[row.origin[0]], response=found.tokens, behavior_logp=found.logprobs
                )
            )
        return complete

    def _read(self, places: Iterable[int]) -> dict[int, bytes]:
        """Return the records at these places of the stage, counted over all its shards."""
        per_shard = self._stage.prompts_per_shard * self._size
        wanted: dict[int, list[int]] = collections.defaultdict(list)
        for place in sorted(places):
            wanted[place // per_shard].append(place)
        if self._copies is not None:
            with ThreadPoolExecutor(_DOWNLOADS) as pool:
                list(pool.map(self._open, wanted))
        found: dict[int, bytes] = {}
        for shard, inside in wanted.items():
            records = self._open(shard).read([place % per_shard for place in inside])
            found.update(zip(inside, records))
        return found


def _open_shard(stage: RolloutFolder, place: Path, shard: int) -> Any:
    path = stage.path(shard)
    return wait_for(lambda: _open(local_copy(path, place)), path, stage.patience_s)


def _open(path: Path) -> Any:
    # These options are for random access: nothing is read ahead.
    options = "readahead_buffer_size:0,max_parallelism:0"
    reader = ArrayRecordReader(str(path), options, file_reader_buffer_size=32_768)
    if not reader.ok():
        raise RolloutError(f"{path}: missing or damaged; restore it, and run the same command again")
    return reader
