"""Import a function of the user's own, which a config names as `module:function`."""

import hashlib
import importlib
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from mugrpo_jax.tasks.near_names import did_you_mean, possible_names


def own_function(kind: str, name: str, built_in: Iterable[str], arguments: str) -> Callable[..., Any]:
    """Return the function that `name` means; a `ValueError` says in one line why it cannot be imported.

    Args:
      kind: what the function is for, at the start of the error: `reward` or `environment`.
      built_in: the names that need no module, for the error.
      arguments: the arguments of such a function, for the error.
    """
    module_name, colon, attribute = name.partition(":")
    if not (colon and module_name and attribute):
        raise ValueError(f"{kind} is {name!r}; {possible_names(name, built_in)} or module:function")
    module_name = module_name.removesuffix(".py")
    # The function may be in the working folder. The folder goes last, so that no file in it hides a package.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        hint = _module_hint(module_name) if error.name == module_name else ""
        raise ValueError(f"{kind} {name!r}: cannot import {module_name!r}: {error!r}{hint}") from error
    except (Exception, SystemExit) as error:
        raise ValueError(f"{kind} {name!r}: cannot import {module_name!r}: {error!r}") from error
    function = getattr(module, attribute, None)
    if function is None:
        functions = (key for key, value in vars(module).items() if callable(value))
        hint = f"; {did_you_mean(attribute, functions)}".rstrip("; ")
        raise ValueError(f"{kind} {name!r}: the module has no {attribute!r}{hint}")
    if not callable(function):
        raise ValueError(f"{kind} {name!r} is a {type(function).__name__}; possible: a function {arguments}")
    return function


def code_digests(names: Iterable[str]) -> dict[str, str]:
    """Return a hash of the file of each function of the user's own among `names`; they were imported before.

    >>> list(code_digests(["exact", "mugrpo_jax.tasks.own_functions:own_function"]))
    ['mugrpo_jax.tasks.own_functions:own_function']
    """
    found = {}
    for name in (name for name in names if ":" in name):
        module = sys.modules[name.partition(":")[0].removesuffix(".py")]
        if (file := getattr(module, "__file__", None)) is not None:
            found[name] = hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12]
    return found


def _module_hint(wrong: str) -> str:
    """Return where a module is looked for, and which file in the working folder has a similar name."""
    files = (path.stem for path in Path().glob("*.py"))
    return f"; {did_you_mean(wrong, files)}it must be in this folder, {os.getcwd()}, or be installed"
