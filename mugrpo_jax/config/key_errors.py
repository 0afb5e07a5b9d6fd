"""Say in an error where a config key was set, and which key the user may have meant."""

import dataclasses
import difflib
import re
import typing
from collections.abc import Collection, Mapping

from mugrpo_jax.config.settings import ConfigError


class UnknownKeyError(ConfigError):
    """A key that its section does not have; `known` are the keys of the section."""

    def __init__(self, key: str, known: Collection[str]) -> None:
        super().__init__(key)
        self.key, self.known = key, known


def place_of(key: str, source: str, overrides: Mapping[str, str]) -> str:
    """Return where a key was set: an override that set the key, a part of it or its section, or the file.

    >>> place_of("batch.stages", "mine.yaml", {"batch.stages": "batch.stages=two"})
    "override 'batch.stages=two'"
    >>> place_of("batch.lag", "mine.yaml", {"batch.stages": "batch.stages=two"})
    'mine.yaml'
    """
    for name, override in overrides.items():
        if _begins_with(key, name) or _begins_with(name, key):
            return f"override {override!r}"
    return source


def place_of_error(text: str, source: str, overrides: Mapping[str, str]) -> str:
    """Return where the values in an error come from; its text begins with a key and may name others.

    >>> text = "batch.lag: 3 is not below batch.stages=2"
    >>> place_of_error(text, "mine.yaml", {"batch.lag": "batch.lag=3"})
    "override 'batch.lag=3'"
    >>> place_of_error(text, "mine.yaml", {"batch.stages": "batch.stages=2"})
    "mine.yaml with override 'batch.stages=2'"
    """
    key = re.split("[: ]", text, maxsplit=1)[0]
    for name, override in overrides.items():
        if _begins_with(key, name):
            return f"override {override!r}"
    words = re.findall(r"[\w.]+", text)
    others = [name for name in overrides if name in words or _begins_with(name, key)]
    return " with ".join([source, *(f"override {overrides[name]!r}" for name in others)])


def _begins_with(key: str, first: str) -> bool:
    """Return whether a key is `first`, or a part of its value: `a.b` and `a[0]` are parts of `a`."""
    return key == first or key.startswith((f"{first}.", f"{first}["))


def near_key(error: UnknownKeyError, cls: type) -> str:
    """Return a hint to the key that the user may have meant, in its section or elsewhere in the config."""
    *section, wrong = error.key.split(".")
    here = {name: ".".join([*section, name]) for name in error.known}
    elsewhere = {name.rsplit(".", 1)[-1]: name for name in reversed(_keys(cls))}
    for names, likeness in ((here, 0.8), (elsewhere, 0.8), (here, 0.6)):
        if (near := near_name(wrong, names, likeness)) is not None:
            return f"did you mean {names[near]}?"
    return f"known: {', '.join(error.known)}"


def near_name(wrong: str, known: Collection[str], likeness: float = 0.6) -> str | None:
    """Return the known name that is most like a wrong one, or has it as initials; None if there is none.

    >>> near_name("stage", ["stages", "lag"]), near_name("lr", ["eps", "learning_rate"])
    ('stages', 'learning_rate')
    """
    near = difflib.get_close_matches(wrong, known, n=1, cutoff=likeness)
    initials = (name for name in known if "".join(word[:1] for word in name.split("_")) == wrong)
    return near[0] if near else next(initials, None)


def _keys(cls: type, prefix: str = "") -> list[str]:
    """Return the dotted names of all keys of a config, without those of its sections."""
    out = []
    for name, hint in typing.get_type_hints(cls).items():
        is_section = isinstance(hint, type) and dataclasses.is_dataclass(hint)
        out += _keys(hint, f"{prefix}{name}.") if is_section else [f"{prefix}{name}"]
    return out
