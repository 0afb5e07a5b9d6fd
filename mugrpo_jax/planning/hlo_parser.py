"""Parse the text of a compiled program (HLO) into computations and their instructions."""

import dataclasses
import math
import re

_SIZES = {
    **dict.fromkeys(("pred", "s8", "u8", "s4", "u4", "f8e4m3fn", "f8e5m2", "f8e4m3", "f8e3m4"), 1),
    **dict.fromkeys(("bf16", "f16", "s16", "u16"), 2),
    **dict.fromkeys(("f32", "s32", "u32"), 4),
    **dict.fromkeys(("f64", "s64", "u64", "c64"), 8),
    "c128": 16,
}
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")


@dataclasses.dataclass(frozen=True)
class Shape:
    """The dtype and dimensions of an array. `main` is True if the array is in main memory (HBM)."""

    dtype: str
    dims: tuple[int, ...]
    main: bool

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Return the size in bytes, without the padding of a tiled layout."""
        return self.size * _SIZES.get(self.dtype, 0)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation. `shapes` are its outputs; `root` is True for the computation's result."""

    name: str
    op: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    attributes: str
    root: bool

    @property
    def bytes(self) -> int:
        """Return the bytes of the instruction's outputs."""
        return sum(shape.bytes for shape in self.shapes)

    @property
    def main_bytes(self) -> int:
        """Return the bytes of the instruction's outputs that are in main memory (HBM)."""
        return sum(shape.bytes for shape in self.shapes if shape.main)


def parse(text: str) -> tuple[str, dict[str, dict[str, Instruction]]]:
    """Return the name of the entry computation, and a dict `{computation: {name: instruction}}`."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = computations.setdefault(header[2], {})
            entry = header[2] if header[1] else entry
        elif line == "}":
            current = None
        elif current is not None and line.startswith("  ") and " = " in line:
            instruction = _instruction(line)
            for operand in instruction.operands:
                if "#" in operand and operand not in current:
                    current[operand] = _element(current, operand)
            current[instruction.name] = instruction
    return entry, computations


def _instruction(line: str) -> Instruction:
    left, _, rest = line.strip().partition(" = ")
    root = left.startswith("ROOT ")
    kind, rest = _take(rest) if rest.startswith("(") else rest.split(" ", 1)
    op, _, rest = rest.strip().partition("(")
    inside, attributes = _take("(" + rest)
    operands = tuple(re.findall(r"%([\w.\-]+(?:#\d+)?)", inside))
    shapes = tuple(
        Shape(dtype, tuple(int(d) for d in dims.split(",") if d), "S(" not in (layout or ""))
        for dtype, dims, layout in _SHAPE.findall(kind)
    )
    # The number of a parameter and the value of a constant are written in place of operands.
    attributes = inside[1:-1] if op in ("parameter", "constant") else attributes
    return Instruction(left.removeprefix("ROOT ").lstrip("%"), op, shapes, operands, attributes, root)


def _element(table: dict[str, Instruction], operand: str) -> Instruction:
    """Return a get-tuple-element for an operand `%tuple#2`, as newer TPU compilers write tuple elements."""
    name, _, index = operand.partition("#")
    shapes = table[name].shapes[int(index) : int(index) + 1]
    return Instruction(operand, "get-tuple-element", shapes, (name,), f", index={index}", False)


def _take(text: str) -> tuple[str, str]:
    """Split `text` after the `)` that closes the `(` at its beginning."""
    depth = 0
    for place, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return text[: place + 1], text[place + 1 :]
    return text, ""
