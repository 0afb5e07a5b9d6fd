"""Convert the docstrings of this package into the form that mkdocstrings understands.

Examples are `>>>` lines without a heading; they become blocks of code. Several arguments may share a line
(`low, high: bounds`); each gets its own line, so that mkdocstrings finds its type and default.
"""

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"(?:^|(?<=\n))>>> .*?(?=\n\s*\n|\Z)", re.S)  # from a prompt up to an empty line
_TOGETHER = re.compile(r"^( +)(\w+(?:, \w+)+): ", re.M)


_ARRAYS = ("logp", "behavior_logp", "advantages", "mask")


class Docstrings(griffe.Extension):
    """Rewrites every docstring, and shows objectives with the signature that callers see."""

    def on_function_instance(self, *, func: griffe.Function, **_: Any) -> None:
        """An objective is written as a formula of `tokens`, and called with arrays and shared knobs."""
        made = [d for d in func.decorators if str(d.value).startswith("objective(")]
        if not made:
            return
        average = str(made[0].value).removeprefix("objective(").removesuffix(")")
        word, named, rest = (
            griffe.ParameterKind.positional_or_keyword,
            griffe.ParameterKind.keyword_only,
            griffe.ParameterKind.var_keyword,
        )
        func.parameters = griffe.Parameters(
            *(griffe.Parameter(name, kind=word) for name in _ARRAYS),
            griffe.Parameter("denominator", kind=named, default="None"),
            *(parameter for parameter in func.parameters if parameter.name != "tokens"),
            griffe.Parameter("aggregation", kind=named, default=average),
            griffe.Parameter("shared", kind=rest),
        )

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called once for each module, class, function and attribute."""
        if obj.docstring is None:
            return
        text = _EXAMPLE.sub(lambda match: f"```pycon\n{match[0]}\n```", obj.docstring.value)
        obj.docstring.value = _TOGETHER.sub(_apart, text) if obj.is_function else text


def _apart(match: re.Match[str]) -> str:
    indent, names = match[1], match[2].split(", ")
    lines = [f"{indent}{name}: together with `{names[-1]}`.\n" for name in names[:-1]]
    return "".join(lines) + f"{indent}{names[-1]}: "
