"""Compute the reward `math`: is the final answer of a response mathematically equal to the problem's answer?

`final_answer` finds the final answer in the response. This module compares plain numbers and words, exactly
and fast. The library math-verify compares all other answers. Conventions:

- The final answer is the last boxed answer. Without a box it is the text after the last `####`, without
  `####` the text after the last "answer is", and without "answer is" the last number.
- Units and currencies are ignored: `5 cm`, `$5` and `5` are equal.
- A percent sign may be written out or left out: `25%`, `25` and `0.25` are equal, `0.5%` and `0.5` are not.
- A decimal equals a fraction or root if they agree to six places, as `1/3` and `0.333333` do.
"""

import functools
import logging
import re
from fractions import Fraction
from typing import Any

from mugrpo_jax.tasks.task import Problem

_LONGEST_ANSWER = 500  # most characters of a final answer
_TAIL = 4000  # without `####` or box, the answer is searched in the last 4000 characters


def math_reward(response: str, problem: Problem) -> float:
    """Return 1.0 if the final answer of the response equals the problem's answer, otherwise 0.0.

    Raise a `ValueError` if the problem's own answer cannot be parsed.

    >>> math_reward("so we get \\\\boxed{\\\\frac{2}{4}}", Problem("1", "", "0.5"))
    1.0
    >>> math_reward("2 + 2 = 5\\n#### 5", Problem("1", "", "4"))
    0.0
    """
    try:
        gold = _read_gold(problem.answer)
    except ValueError as error:
        raise ValueError(f"problem {problem.id}: {error}") from error
    answer = final_answer(response)
    return float(answer is not None and _same(gold, _normalized(answer)))


def fast_math_reward(response: str, problem: Problem) -> float | None:
    """Compute `math_reward` in microseconds if both answers are plain numbers or words; else return None.

    >>> fast_math_reward("#### 1,200 apples", Problem("1", "", "1200"))
    1.0
    >>> fast_math_reward("so \\boxed{x + 1}", Problem("1", "", "1 + x")) is None
    True
    """
    gold = _normalized(problem.answer)
    if len(response) > _TAIL or not gold or (_number(gold) is None and _word(gold) is None):
        return None
    answer = final_answer(response)
    same = False if answer is None else _same_without_algebra(gold, _normalized(answer))
    return None if same is None else float(same)


def same_answer(gold: str, answer: str) -> bool:
    """Return whether two answers are equal. Raise a `ValueError` if the right answer `gold` cannot be parsed.

    >>> same_answer("1,234", "1234 apples"), same_answer("(1, 2]", "[1, 2]")
    (True, False)
    """
    return _same(_read_gold(gold), _normalized(answer))


def final_answer(response: str) -> str | None:
    """Return the text of the final answer in a response, or None if the response has no final answer.

    >>> final_answer("3 + 4 = 7. The answer is 7."), final_answer("I do not know"), final_answer("#### 1,200")
    ('7', None, '1,200')
    """
    if "\\boxed" in response:
        return boxed_answer(response)
    _, mark, after = response.rpartition("####")
    if mark:
        return _nonempty(after.strip().split("\n")[0])
    tail = response[-_TAIL:]
    anchors = list(_ANCHOR.finditer(tail))
    if anchors:
        sentence = _SENTENCE_END.split(tail[anchors[-1].end() :].strip().split("\n")[0])[0]
        said = re.split(r"(?<![<>!\\])=", sentence)[-1].strip(" *:")
        found = _ANSWER_IN_TEXT.search(said)
        return found[0] if found else _nonempty(said.rstrip("."))
    found_all = list(_ANSWER_IN_TEXT.finditer(tail))
    return found_all[-1][0] if found_all else None


def vote_answer(response: str) -> str | None:
    """Return the final answer or None, for majority votes. Equal numbers are returned in the same spelling.

    >>> vote_answer("#### 1,200 apples"), vote_answer("The answer is 1200.0")
    ('1200', '1200')
    """
    answer = final_answer(response)
    if answer is None:
        return None
    number = _number(_normalized(answer)) if len(answer) <= _LONGEST_ANSWER else None
    return _normalized(answer) if number is None else f"{number[0]}{'%' if number[1] else ''}"


def boxed_answer(text: str) -> str | None:
    """Return the content of the last `\\boxed{...}`, or None if there is no box or its brace never closes."""
    _, box, after = text.rpartition("\\boxed")
    return _braced(after[: 2 * _LONGEST_ANSWER]) if box else None


_GROUPED = r"\d{1,3}(?:[, ]\d{3})+(?!\d)|\d+"
_DECIMAL = rf"(?:(?:{_GROUPED})(?:\.\d+)?|\.\d+)"
_ANCHOR = re.compile(r"(?i)\banswer\b(?:\s+is\b|\W*?:)[\s:*]*")
_SENTENCE_END = re.compile(r"\.(?:\s|\**$)")
_ANSWER_IN_TEXT = re.compile(
    r"\$\$.+?\$\$|\\\[.+?\\\]|\\\(.+?\\\)|\$[^$\s](?:[^$\n]*[^$\s])?\$(?!\d)"
    rf"|(?<![\w)\]}}.])-?[$€£]?{_DECIMAL}(?:\s?/\s?\d+)?\s?\\?%?",
    re.DOTALL,
)


def _nonempty(text: str) -> str | None:
    return text.strip() or None


def _braced(text: str) -> str | None:
    """Return the content of the brace at the start of `text`, or None if the brace never closes.

    Without a brace, as after `\\boxed` in `\\boxed 7`, the content is the first character.
    """
    text = text.lstrip()
    if not text.startswith("{"):
        return _nonempty(text[:1])
    depth = 0
    for i, character in enumerate(text):
        if text[i - 1 : i] == "\\":
            continue
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return _nonempty(text[1:i])
    return None


def _read_gold(answer: str) -> str:
    gold = _normalized(answer)
    if not gold:
        raise ValueError(f"answer {answer!r} is empty")
    if _number(gold) is None and _word(gold) is None and not _parse(gold)[0]:
        raise ValueError(f"answer {answer[:80]!r} cannot be read as mathematics")
    return gold


def _same_without_algebra(gold: str, answer: str) -> bool | None:
    """Return whether two answers are equal, or None if only computer algebra can decide this."""
    if gold == answer:
        return True
    if not answer or len(answer) > _LONGEST_ANSWER:
        return False
    a, b = _number(gold), _number(answer)
    if a is not None and b is not None:
        return _same_number(a, b)
    word = _word(gold)
    if word is not None:
        return word == _letters(answer)
    return False if _bases_differ(gold, answer) or _unbalanced(answer) else None


def _same(gold: str, answer: str) -> bool:
    if (same := _same_without_algebra(gold, answer)) is not None:
        return same
    from math_verify import verify

    return verify(
        list(_parse(gold)[1]),
        list(_parse(answer)[1]),
        allow_set_relation_comp=True,
        timeout_seconds=None,
        raise_on_error=True,
    )


@functools.lru_cache(maxsize=1024)
def _parse(text: str) -> tuple[bool, tuple[Any, ...]]:
    """Parse an answer with math-verify. Return whether it is mathematics, and all possible parse results.

    math-verify's own time limits are off, because they use signals, which only work in the main thread. The
    scoring pool has a deadline instead.
    """
    from math_verify import LatexExtractionConfig, parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # no warning about disabled time limits
    boxed = [LatexExtractionConfig(boxed_match_priority=0)]
    read = parse(f"\\boxed{{{text}}}", extraction_config=boxed, parsing_timeout=None, raise_on_error=True)
    return any(not isinstance(reading, str) for reading in read), tuple(read)


_SPELLINGS = {"−": "-", "–": "-", "×": "\\times ", "·": "\\cdot ", "÷": "/", "π": "\\pi ", "∞": "\\infty "}
_SPELLINGS |= {"≤": "\\le ", "≥": "\\ge ", "∪": "\\cup ", "°": "^\\circ "}
_WRAPPERS = (
    *(r"\$\$(.+)\$\$", r"\$(.+)\$", r"\\\((.+)\\\)", r"\\\[(.+)\\\]"),
    *(r"\\boxed\{(.+)\}", r"\*\*(.+)\*\*"),
)


@functools.lru_cache(maxsize=4096)  # many responses to one problem have the same answer
def _normalized(text: str) -> str:
    """Remove `$`, box or other wrapping from an answer, and write signs and spaces in one standard way."""
    for sign, spelling in _SPELLINGS.items():
        text = text.replace(sign, spelling)
    text = text.replace("{,}", ",").replace("\\%", "%").replace("\\$", "$ ")
    text = re.sub(r"(?<!\\)\\[,;:! ]|~", " ", text).strip()
    for wrapper in _WRAPPERS:
        if match := re.fullmatch(wrapper, text, re.DOTALL):
            text = match[1].strip()
    text = re.sub(r"(?<!\\)\b(sqrt)\(([^()]*)\)", r"\\sqrt{\2}", text).replace("**", "^")
    text = re.sub(r"(?<!\\)\bpi\b", r"\\pi ", text)
    text = re.sub(r"^\$\s*|^([-+])\s*\$\s*", r"\1", text)
    return re.sub(r"\s+", " ", text).strip().removesuffix(".")


_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|textrm|mbox)\s*\{([^{}]*)\}")
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9}
_NUMBER = re.compile(
    rf"(?P<sign>[-+]?)\s*(?:[$€£]\s*)?(?:(?P<whole>\d+)?\s*\\[dt]?frac\{{(?P<n1>\d+)\}}\{{(?P<d1>\d+)\}}"
    rf"|(?:(?P<whole2>\d+)\s+)?(?P<n2>\d+)\s?/\s?(?P<d2>\d+)"
    rf"|(?P<repeated>\d*\.\d*)\\overline\{{(?P<period>\d+)\}}"
    rf"|(?P<decimal>{_DECIMAL})(?:[eE](?P<exponent>[-+]?\d{{1,3}}))?)"
    r"(?P<percent>\s?(?:%|percent\b))?(?P<unit>(?:\s|(?=[(]))[()A-Za-z][A-Za-z. /()^0-9]+)?"
)


@functools.lru_cache(maxsize=4096)
def _number(text: str) -> tuple[Fraction, bool, bool] | None:
    """Parse a plain number, perhaps with a unit; return None for any other text.

    Return the value, whether the number has a percent sign, and whether it is written as a decimal.
    """
    match = _NUMBER.fullmatch(_TEXT.sub(r" \1", text).strip())
    if match is None:
        return None
    part = match.groupdict()
    if part["decimal"]:
        value = Fraction(re.sub("[, ]", "", part["decimal"])) * Fraction(10) ** int(part["exponent"] or 0)
    elif part["repeated"]:
        digits = len(part["repeated"].partition(".")[2])
        period = Fraction(int(part["period"]), 10 ** len(part["period"]) - 1)
        value = Fraction(part["repeated"].rstrip(".") or 0) + period / 10**digits
    else:
        denominator = int(part["d1"] or part["d2"])
        if denominator == 0:
            return None
        numerator = int(part["n1"] or part["n2"])
        value = int(part["whole"] or part["whole2"] or 0) + Fraction(numerator, denominator)
    words = (part["unit"] or "").lower().split()
    if words and words[0] in _SCALES:
        value *= _SCALES[words[0]]
    elif any(word in ("and", "or", "to", "pi", "if", "mod") for word in words):
        return None
    value = -value if part["sign"] == "-" else value
    return value, bool(part["percent"] or "percent" in words), bool(part["decimal"])


def _same_number(a: tuple[Fraction, bool, bool], b: tuple[Fraction, bool, bool]) -> bool:
    (x, x_percent, x_decimal), (y, y_percent, y_decimal) = a, b
    readings = [(x, y)]
    if x_percent != y_percent:
        signed, plain = (x, y) if x_percent else (y, x)
        readings = [(signed / 100, plain)] + ([(signed, plain)] if abs(plain) >= 1 else [])
    if x_decimal != y_decimal:
        readings = [(round(p, 6), round(q, 6)) for p, q in readings]
    return any(p == q for p, q in readings)


def _letters(text: str) -> str:
    return re.sub(r"[\s()]+", " ", _TEXT.sub(r"\1", text)).strip().casefold()


def _word(text: str) -> str | None:
    """Return a word in lower case if the answer is `\\text{...}` or has at least four letters, else None."""
    letters = _letters(text)
    plain = _TEXT.fullmatch(text) or re.fullmatch(r"[A-Za-z][A-Za-z' -]{3,}", text)
    return letters if plain and re.fullmatch(r"[a-z][a-z' -]*", letters) else None


def _unbalanced(text: str) -> bool:
    """Return whether some brackets never close. Parsing such a text would take seconds."""
    return sum(map(text.count, "([{")) != sum(map(text.count, ")]}"))


def _bases_differ(gold: str, answer: str) -> bool:
    """Return whether both texts are numerals with different bases. math-verify would ignore the bases."""
    bases = [re.fullmatch(r"[\dA-F]+_\{?(\d+)\}?", text) for text in (gold, answer)]
    return all(bases) and len({match[1] for match in bases if match}) > 1
