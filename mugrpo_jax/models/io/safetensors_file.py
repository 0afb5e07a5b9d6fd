"""Read and write safetensors files. Headers are checked before any tensor is read.

The format is eight bytes of header length, a JSON header (name -> dtype, shape, byte range), then the bytes.
This module parses the format itself because the `safetensors` package returns bfloat16 only as torch tensors.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_HEADER_LIMIT = 100_000_000  # set by the format; a larger number means that this is another kind of file


@dataclasses.dataclass(frozen=True)
class LazyTensor:
    """A tensor whose data is loaded only by calling `read()`. Error messages name the file `origin`."""

    origin: str
    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        """Return the size of the data in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def tensors_in_file(path: Path) -> dict[str, LazyTensor]:
    """Return the tensors in a file by name. Only the header is read, and all byte ranges are checked."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _HEADER_LIMIT):
            raise ValueError(f"{path}: truncated or not a safetensors file ({size} bytes)")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError):
            raise ValueError(f"{path}: not a safetensors file (its header is not JSON)") from None
    if not isinstance(header, dict):
        raise ValueError(f"{path}: not a safetensors file (its header is not a table of tensors)")
    header.pop("__metadata__", None)
    start, ranges = 8 + length, []
    tensors = {}
    for name, entry in header.items():
        tensors[name], begin, end = _tensor(path, name, entry, start, size - start)
        ranges.append((begin, end, name))
    ranges.sort()
    for (_, end, name), (begin, _, following) in itertools.pairwise(ranges):
        if begin < end:
            raise ValueError(f"{path}: tensors {name} and {following} overlap")
    return tensors


def _tensor(path: Path, name: str, entry: Any, start: int, data_bytes: int) -> tuple[LazyTensor, int, int]:
    """Return the tensor of a header entry, and the begin and end of its bytes."""
    try:
        code, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        numbers = [*shape, begin, end]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{path}: header entry of {name!r} is malformed") from None
    if not isinstance(code, str) or not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"{path}: header entry of {name!r} is malformed")
    if code not in DTYPES:
        raise ValueError(f"{path}: {name} has dtype {code}; supported: {', '.join(DTYPES)}")
    dtype = DTYPES[code]
    if end > data_bytes:
        raise ValueError(f"{path}: truncated: {name} ends at byte {end} of {data_bytes}")
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(
            f"{path}: {name} has {end - begin} bytes, which is not its shape {list(shape)} in {code}"
        )

    def read() -> np.ndarray:
        # One memory map per tensor, closed with its array, so that pages of earlier tensors can be freed.
        return np.memmap(path, dtype, mode="r", offset=start + begin, shape=shape)

    return LazyTensor(str(path), shape, dtype, read), begin, end


def write_tensors(path: Path, tensors: Mapping[str, LazyTensor]) -> None:
    """Write tensors to a safetensors file in the given order. Memory holds one tensor at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": (offset, end)}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the data starts at a multiple of 8 bytes
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            data = np.ascontiguousarray(tensor.read())
            file.write(data.reshape(-1).view(np.uint8).data)
