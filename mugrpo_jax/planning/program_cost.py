"""Compute the FLOPs, HBM traffic and collectives of a compiled program on one device, from its HLO text.

The compiler's own cost analysis adds the cost of a loop body once, although a scan over the layers executes
the body once per layer. This module multiplies the cost of the body by the trip count, which follows from the
smallest limit on the loop counter. If a loop can also end for another reason, the cost of its body is added
once. So the cost of the decode loop is the cost of one decode step.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mugrpo_jax.planning.hlo_parser import Instruction, Shape, parse

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

_CALLS = re.compile(r"\b(calls|body|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_FREE = frozenset(
    {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "iota", "partition-id"}
    | {"replica-id", "while", "conditional", "call", "async-start", "opt-barrier", "domain"}
)
_IN_PLACE = {"dynamic-update-slice": 1, "scatter": 2}  # operation: index of the operand with the new values


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective operation of a program, such as an all-reduce, in which devices exchange data.

    Attributes:
      kind: one of `COLLECTIVES`.
      result: shapes of the outputs on one device.
      group: number of devices that exchange data with each other.
      count: how often one call of the program executes the collective.
    """

    kind: str
    result: tuple[Shape, ...]
    group: int
    count: int

    @property
    def sent(self) -> float:
        """Return the bytes that one device sends in one execution, assuming ring algorithms."""
        copies = self.group if self.kind == "reduce-scatter" else 1
        whole = sum(shape.bytes for shape in self.result) * copies
        rounds = {"all-reduce": 2.0, "collective-permute": self.group / max(self.group - 1, 1)}
        return rounds.get(self.kind, 1.0) * whole * (self.group - 1) / self.group


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of one call of a program on one device.

    Attributes:
      flops: FLOPs of matrix products and attention kernels; element-wise operations are left out.
      bytes: lower bound of the HBM traffic; the intermediate arrays of fusions are left out.
      collectives: all collectives that the program executes.
    """

    flops: float
    bytes: float
    collectives: tuple[Collective, ...]

    @property
    def sent(self) -> float:
        """Return the bytes that one device sends in all collectives of one call."""
        return sum(c.sent * c.count for c in self.collectives)

    def by_kind(self) -> dict[str, tuple[int, float]]:
        """Return {kind of collective: (number of executions, bytes that one device sends)}."""
        by_kind = {kind: [c for c in self.collectives if c.kind == kind] for kind in COLLECTIVES}
        return {
            kind: (sum(c.count for c in found), sum(c.sent * c.count for c in found))
            for kind, found in by_kind.items()
            if found
        }


class HloProgram:
    """A program that was compiled for a number of devices, parsed from its HLO text."""

    def __init__(self, text: str, devices: int) -> None:
        self.devices = devices
        self.entry, self.computations = parse(text)

    def cost(self) -> Cost:
        """Compute the cost of one call of the program."""
        flops = bytes_ = 0.0
        collectives: dict[Any, Collective] = {}
        overlapped: dict[Any, float] = {}  # the traffic of collectives inside fusions
        for instruction, table, count, fused in self._walk(self.entry, 1, False):
            flops += count * _flops(instruction, table)
            if not fused:
                bytes_ += count * self._traffic(instruction, table)
            if exchange := self._collective(instruction, count):
                # The text repeats a collective in each fusion that overlaps it, so add each channel once.
                channel = re.search(r"channel_id=\d+", instruction.attributes)
                shapes = tuple(shape.dims for shape in exchange.result)
                key = exchange.kind, shapes, channel[0] if channel else instruction.name
                if key not in collectives or exchange.count < collectives[key].count:
                    collectives[key] = exchange
                    overlapped[key] = count * self._traffic(instruction, table) if fused else 0.0
        return Cost(flops, bytes_ + sum(overlapped.values()), tuple(collectives.values()))

    def _walk(
        self, name: str, count: int, fused: bool
    ) -> Iterator[tuple[Instruction, Mapping[str, Instruction], int, bool]]:
        """Yield (instruction, its computation, number of executions, True if inside a fusion) recursively."""
        table = self.computations[name]
        for instruction in table.values():
            if instruction.op == "while":
                body = dict(_CALLS.findall(instruction.attributes))["body"]
                yield from self._walk(body, count * self._trips(instruction), fused)
            elif instruction.op == "fusion" and (scattered := self._fused_reduce_scatter(instruction)):
                yield scattered, table, count, fused
            elif instruction.op in ("fusion", "call", "async-start", "conditional"):
                for called in self._called(instruction):
                    yield from self._walk(called, count, fused or instruction.op == "fusion")
            yield instruction, table, count, fused

    def _called(self, instruction: Instruction) -> list[str]:
        named = [name for _, name in _CALLS.findall(instruction.attributes)]
        if branches := re.search(r"branch_computations=\{([^}]*)\}", instruction.attributes):
            named += re.findall(r"%?([\w.\-]+)", branches[1])
        return [name for name in named if name in self.computations]

    def _trips(self, loop: Instruction) -> int:
        if known := re.search(r'known_trip_count"?:\{"n":"(\d+)"', loop.attributes):
            return int(known[1])
        condition = re.search(r"condition=%?([\w.\-]+)", loop.attributes)
        bounds = list(self._bounds(condition[1])) if condition else []
        limits = [limit for _, limit in bounds if limit is not None]
        counters = {counter for counter, _ in bounds}
        if not limits or len(counters) > 1 or -1 in counters:
            return 1
        body = self.computations[dict(_CALLS.findall(loop.attributes))["body"]]
        return -(-min(limits) // self._stride(body, bounds[0][0]))

    def _bounds(
        self, name: str, given: Mapping[int, Instruction] | None = None
    ) -> Iterator[tuple[int, int | None]]:
        """Yield a tuple (index, limit) for each comparison in the loop condition `name`.

        `index` is -1 unless the comparison is `loop_state[index] < limit`. `limit` is None if the limit is
        not a constant. If `name` is a fusion, `given` maps its parameter numbers to its arguments.
        """
        table = self.computations[name]

        def meant(operand: str) -> Instruction:
            found = table[operand]
            outer = (given or {}).get(int(found.attributes)) if found.op == "parameter" else None
            return outer or found

        for instruction in table.values():
            if instruction.op == "compare":
                counter, limit = map(meant, instruction.operands)
                index = re.search(r"index=(\d+)", counter.attributes)
                less = "direction=LT" in instruction.attributes and counter.op == "get-tuple-element"
                whole = limit.op == "constant" and limit.attributes.isdigit()
                yield int(index[1]) if less and index else -1, int(limit.attributes) if whole else None
            elif instruction.op == "fusion":
                inner = {number: meant(operand) for number, operand in enumerate(instruction.operands)}
                yield from self._bounds(self._called(instruction)[0], inner)

    def _stride(self, body: Mapping[str, Instruction], index: int) -> int:
        """Return the increase of the counter per iteration: above 1 if the compiler unrolled the loop."""
        root = _root(body)
        added = body.get(root.operands[index]) if root is not None and root.op == "tuple" else None
        if added is None or added.op not in ("add", "fusion"):
            return 1
        inside = self.computations[self._called(added)[0]] if added.op == "fusion" else body
        sums = [added] if added.op == "add" else [i for i in inside.values() if i.op == "add"]
        terms = [inside[name] for i in sums for name in i.operands if name in inside]
        constants = [int(i.attributes) for i in terms if i.op == "constant" and i.attributes.isdigit()]
        return constants[0] if len(constants) == 1 and constants[0] > 0 else 1

    def _fused_reduce_scatter(self, fusion: Instruction) -> Instruction | None:
        """Return a reduce-scatter for a fusion of an all-reduce and a slice (used on TPU), otherwise None."""
        called = next(iter(self._called(fusion)), None)
        inner = list(self.computations[called].values()) if called else []
        reduce = next((i for i in inner if i.op == "all-reduce"), None)
        if reduce is None or fusion.bytes >= reduce.bytes:
            return None
        return dataclasses.replace(fusion, op="reduce-scatter", attributes=reduce.attributes)

    def _collective(self, instruction: Instruction, count: int) -> Collective | None:
        kind = instruction.op.removesuffix("-start")
        if kind not in COLLECTIVES:
            return None
        shapes = instruction.shapes
        if instruction.op.endswith("-start") and len(shapes) > 1:
            shapes = (max(shapes, key=lambda shape: shape.bytes),)  # the other outputs are operand and flags
        group = 2 if kind == "collective-permute" else _group(instruction.attributes, self.devices)
        return Collective(kind, shapes, group, count) if group > 1 else None

    def _traffic(self, instruction: Instruction, table: Mapping[str, Instruction]) -> float:
        if instruction.op in _FREE or instruction.op.endswith(("-done", "-update")):
            return 0
        if instruction.op in ("dynamic-slice", "gather", "slice"):
            read = instruction.bytes if table[instruction.operands[0]].main_bytes else 0
            return read + instruction.main_bytes
        if instruction.op in _IN_PLACE:
            return 2 * table[instruction.operands[_IN_PLACE[instruction.op]]].main_bytes
        operands = [table[name] for name in instruction.operands if name in table]
        if instruction.op == "fusion":
            return self._fusion_traffic(instruction, operands)
        if instruction.op.endswith("-start") and len(instruction.shapes) > 1:
            return instruction.main_bytes  # the outputs of an asynchronous operation include its operand
        return instruction.main_bytes + sum(operand.main_bytes for operand in operands)

    def _fusion_traffic(self, fusion: Instruction, operands: list[Instruction]) -> float:
        """Return the bytes read and written. If only a slice of an array is used, only the slice counts.

        Arrays of a collective that the fusion overlaps do not count here: `cost` adds them once.
        """
        called = next(iter(self._called(fusion)), None)
        if called is None:
            return fusion.main_bytes + sum(operand.main_bytes for operand in operands)
        inside = self.computations[called]
        parameters = [i for i in inside.values() if i.op == "parameter"]
        parameters.sort(key=lambda i: int(i.attributes))
        total = 0.0
        updates = [i for i in inside.values() if i.op in _IN_PLACE]
        others = _handed_on(inside)
        for parameter, operand in zip(parameters, operands):
            if parameter.name in others:
                continue
            users = [i for i in inside.values() if parameter.name in i.operands]
            if users and all(
                i.op in ("dynamic-slice", "gather") and i.operands[0] == parameter.name for i in users
            ):
                total += min(sum(i.bytes for i in users), operand.main_bytes)
            elif not any(i.bytes == parameter.bytes for i in updates):
                total += operand.main_bytes
        written = fusion.main_bytes
        if (root := _root(inside)) is not None and root.op == "tuple":
            kept = [shape for name, shape in zip(root.operands, root.shapes) if name not in others]
            written = sum(shape.bytes for shape in kept if shape.main)
        for update in updates:
            written -= min(update.bytes, written)
            written += 2 * inside[update.operands[_IN_PLACE[update.op]]].bytes
        return total + written


def _root(table: Mapping[str, Instruction]) -> Instruction | None:
    return next((i for i in table.values() if i.root), None)


def _handed_on(fused: Mapping[str, Instruction]) -> set[str]:
    """Return the arrays that a fusion does not touch: those of a collective, and parameters it returns."""
    exchanges = [i for i in fused.values() if i.op.removesuffix("-start") in COLLECTIVES]
    names = {name for i in exchanges for name in (i.name, *i.operands)}
    root = _root(fused)
    if root is not None and root.op == "tuple":
        names |= {name for name in root.operands if fused[name].op == "parameter"}
    return names


def _flops(instruction: Instruction, table: Mapping[str, Instruction]) -> float:
    if instruction.op == "dot":
        left = table[instruction.operands[0]].shapes[0].dims
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
        inner = math.prod(left[int(i)] for i in contracted[1].split(",") if i) if contracted else 1
        return 2.0 * instruction.shapes[0].size * inner
    if instruction.op == "convolution":
        return _convolution_flops(instruction, table)
    if instruction.op == "custom-call":
        return _kernel_flops(instruction, table)
    return 0.0


def _convolution_flops(instruction: Instruction, table: Mapping[str, Instruction]) -> float:
    """Compute the FLOPs of a convolution. TPU matrix products are convolutions with spatial batch axes."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    if labels is None:
        return 0.0
    left, kernel = (table[name].shapes[0].dims for name in instruction.operands)
    flops = 2.0 * instruction.shapes[0].size * kernel[labels[2].index("i")]
    for axis in filter(str.isdigit, labels[3]):
        outputs = instruction.shapes[0].dims[labels[3].index(axis)]
        entries, taps = left[labels[1].index(axis)], kernel[labels[2].index(axis)]
        flops *= _taps(instruction.attributes, int(axis), outputs, entries, taps) / outputs
    return flops


def _taps(attributes: str, axis: int, outputs: int, entries: int, taps: int) -> int:
    """Count the pairs (output entry, kernel entry) of a spatial axis that read an input, not padding."""

    def setting(name: str, default: str) -> str:
        found = re.search(rf"window=\{{[^}}]*\b{name}=([\dx_\-]+)", attributes)
        return found[1].split("x")[axis] if found else default

    stride, spread, dilation = (int(setting(n, "1")) for n in ("stride", "lhs_dilate", "rhs_dilate"))
    before = int(setting("pad", "0_0").split("_")[0])
    places = np.arange(outputs)[:, None] * stride + np.arange(taps) * dilation - before
    return int(((places >= 0) & (places <= (entries - 1) * spread) & (places % spread == 0)).sum())


def _kernel_flops(instruction: Instruction, table: Mapping[str, Instruction]) -> float:
    """Compute the FLOPs of an attention kernel from its operands; a causal kernel needs half of them.

    Splash lists the blocks of keys for each block of queries. If these are not all, it computes only a band.
    """
    products = next(
        (n for name, n in _KERNELS.items() if name in instruction.name + instruction.attributes), 0
    )
    if not products:
        return 0.0
    arrays = [table[name].shapes[0] for name in instruction.operands if name in table]
    rows = [a for a in arrays if a.dtype in ("bf16", "f16", "f32") and len(a.dims) >= 3]
    if len(rows) < 2:
        return 0.0
    queries, keys = rows[:2]
    length = max(keys.dims[1:-1])
    for blocks in (a.dims[1:] for a in arrays if a.dtype == "s8" and len(a.dims) == 3):
        if min(blocks) < max(blocks):
            return products * 2.0 * queries.size * length * min(blocks) / max(blocks)
    causal = max(queries.dims[1:-1]) == length
    return products * 2.0 * queries.size * length / (2 if causal else 1)


# {part of a kernel's name: number of matrix products (length × length × width) in the kernel}
_KERNELS = {
    "splash_mha_fwd": 2,
    "splash_mha_dq": 3,
    "splash_mha_dkv": 4,
    "fmhaSoftmaxBackward": 5,
    "fmhaSoftmax": 2,
}


def _group(attributes: str, devices: int) -> int:
    """Return the size of a replica group, written in one of three notations; `devices` if none matches."""
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", attributes):
        return listed[1].count(",") + 1
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]", attributes):
        return int(iota[1])
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\].*? \{('[^}]*)\}", attributes):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", mesh[2]))
    return devices
