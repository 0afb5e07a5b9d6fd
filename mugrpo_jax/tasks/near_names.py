"""Say in an error which names are possible, and which one the user may have meant."""

import difflib
from collections.abc import Iterable


def possible_names(wrong: str, known: Iterable[str]) -> str:
    """Return text about the known names, beginning with the one that is most like the wrong one.

    >>> possible_names("exakt", ["exact", "math"]), possible_names("x", ["exact", "math"])
    ('did you mean exact? possible: exact, math', 'possible: exact, math')
    """
    names = list(known)
    return f"{did_you_mean(wrong, names)}possible: {', '.join(names)}"


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """Return a question about the known name that is most like a wrong one, with a space; or nothing."""
    near = difflib.get_close_matches(wrong, list(known), n=1)
    return f"did you mean {near[0]}? " if near else ""
