"""Find the program in a response, and compare what a program gave with what a test expects."""

import ast
import functools
import math
import re
from collections.abc import Callable
from typing import Any

_FENCE = re.compile(r"^[ \t]*(```+|~~~+)[ \t]*([\w+#.-]*)[^\n`]*$", re.MULTILINE)
_PYTHON = ("", "python", "python3", "py")
_CLOSE = 1e-6  # relative and absolute tolerance of floating-point numbers


def program_of(response: str) -> str | None:
    """Return the last fenced block of Python, or else the last one without a language; None without a block.

    A block ends at a fence like its first, or at the end of the response.

    >>> program_of("So:\\n```python\\nprint(1)\\n```\\nDone.")
    'print(1)\\n'
    >>> program_of("print(1)") is None
    True
    """
    blocks: list[tuple[str, str]] = []
    opened: re.Match[str] | None = None
    for fence in _FENCE.finditer(response):
        if opened is None:
            opened = fence
        elif fence[1].startswith(opened[1]) and not fence[2]:
            blocks.append((opened[2].lower(), response[opened.end() + 1 : fence.start()]))
            opened = None
    if opened is not None:
        blocks.append((opened[2].lower(), response[opened.end() + 1 :]))
    blocks = [block for block in blocks if block[0] in _PYTHON and block[1].strip()]
    named = [text for language, text in blocks if language]
    found = named or [text for _, text in blocks]
    return found[-1] if found else None


def same_output(printed: str, expected: str) -> bool:
    """Compare printed text line by line. White space at the ends and between words does not count.

    Numbers with a decimal point may differ by a millionth.

    >>> same_output("1  2 \\n0.3333333\\n\\n", "1 2\\n0.33333333"), same_output("1\\n2", "1 2")
    (True, False)
    """
    lines, right = (text.rstrip().split("\n") for text in (printed, expected))
    return len(lines) == len(right) and all(map(_same_line, lines, right))


def _same_line(line: str, right: str) -> bool:
    words, expected = line.split(), right.split()
    return len(words) == len(expected) and all(map(_same_word, words, expected))


def _same_word(word: str, right: str) -> bool:
    if word == right:
        return True
    if "." not in right or len(word) > 100:
        return False
    try:
        return math.isclose(float(word), float(right), rel_tol=_CLOSE, abs_tol=_CLOSE)
    except ValueError:
        return False


def same_value(literal: str, expected: Any, *, rel_tol: float = _CLOSE, abs_tol: float = _CLOSE) -> bool:
    """Compare a value, written as a Python literal, with the expected one. Lists and tuples are alike.

    Floating-point numbers are compared with `math.isclose` and these tolerances.

    >>> same_value("(1, 2.0000000001)", [1, 2.0]), same_value("[2, 1]", [1, 2]), same_value("os", 1)
    (True, False, False)
    """
    try:
        value = ast.literal_eval(literal)
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return False
    return _same(value, expected, functools.partial(math.isclose, rel_tol=rel_tol, abs_tol=abs_tol))


def _same(value: Any, expected: Any, close: Callable[[float, float], bool]) -> bool:
    if isinstance(value, (list, tuple)) and isinstance(expected, (list, tuple)):
        pairs = zip(value, expected)
        return len(value) == len(expected) and all(_same(one, right, close) for one, right in pairs)
    if isinstance(value, dict) and isinstance(expected, dict):
        if value.keys() != expected.keys():
            return False
        return all(_same(value[key], expected[key], close) for key in value)
    if isinstance(value, float) or isinstance(expected, float):
        if not isinstance(value, (int, float)) or not isinstance(expected, (int, float)):
            return False
        try:
            return value == expected or close(value, expected)
        except OverflowError:
            return False
    return bool(value == expected)
