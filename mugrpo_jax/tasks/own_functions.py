"""Import a function of the user's own, which a config names as `module:function`."""

import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from mugrpo_jax.tasks.near_names import did_you_mean, possible_names

_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep


def own_function(kind: str, name: str, built_in: Iterable[str], arguments: str) -> Callable[..., Any]:
    """Return the function that `name` means; a `ValueError` says in one line why it cannot be imported.

    Args:
      kind: what the function is for, at the start of the error: `reward` or `environment`.
      built_in: the names that need no module, for the error.
      arguments: the arguments of such a function, for the error.
    """
    place, colon, attribute = name.partition(":")
    if not (colon and place and attribute):
        raise ValueError(f"{kind} is {name!r}; {possible_names(name, built_in)} or module:function")
    try:
        module = _imported(place)
    except ValueError as error:
        raise ValueError(f"{kind} {name!r}: cannot import {place!r}: {error}") from error
    function = getattr(module, attribute, None)
    if function is None:
        hint = f"; {did_you_mean(attribute, _functions(module))}".rstrip("; ")
        raise ValueError(f"{kind} {name!r}: the module has no {attribute!r}{hint}")
    if not callable(function):
        raise ValueError(f"{kind} {name!r} is a {type(function).__name__}; possible: a function {arguments}")
    return function


def code_digests(names: Iterable[str]) -> dict[str, str]:
    """Return a hash of the file of each function of the user's own; all were imported before.

    >>> list(code_digests(["mugrpo_jax.tasks.own_functions:own_function"]))
    ['mugrpo_jax.tasks.own_functions:own_function']
    """
    found = {}
    for name in names:
        module = sys.modules[_module_name(name.partition(":")[0])]
        if (file := getattr(module, "__file__", None)) is not None:
            found[name] = hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12]
    return found


def line_of(error: BaseException) -> str:
    """Return the line of the user's file where an error came up, as ` (file.py:3)`; "" if it is not known.

    The function that caught the error must have called the user's code, or imported it. Files of the user are
    those below the working folder; if there are none, it is the file that was called.
    """
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename[:1] != "<"]
    passed = (importlib.__file__, __file__)  # on the way to the user's code
    called = [frame for frame in frames[1:] if frame.filename not in passed]
    if not called or called[0].filename.startswith(_PACKAGE):
        return ""
    last = [frame for frame in called if frame.filename == called[0].filename or _is_own(frame.filename)][-1]
    return f" ({os.path.basename(last.filename)}:{last.lineno})"


def _is_own(file: str) -> bool:
    below = file.startswith(os.getcwd() + os.sep)
    return below and not file.startswith(_PACKAGE) and "site-packages" not in file


def _imported(place: str) -> types.ModuleType:
    """Return the module with this name, or in this file; a `ValueError` says why it cannot be imported."""
    # A module may be in the working folder. The folder goes last, so that no file in it hides a package.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    name = _module_name(place)
    if os.sep in place and not os.path.isfile(name):
        raise ValueError(f"no such file: {name}")
    try:
        if os.sep not in place:
            return importlib.import_module(name)
        return sys.modules.get(name) or _from_file(name)
    except (Exception, SystemExit) as error:
        why = f"{error!r}{line_of(error)}"
        if isinstance(error, SyntaxError) and error.filename and Path(error.filename).is_file():
            why = f"{error.filename}:{error.lineno}: {error.msg}"
        elif isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            if place.endswith(".py") and os.path.isfile(place):
                why = f"a name with dots needs a path, ./{place}"
            else:
                why = (f"no such file: {place}" if place.endswith(".py") else why) + _module_hint(name)
        raise ValueError(why) from error


def _from_file(file: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(file, file)
    assert spec is not None and spec.loader is not None  # the file ends with .py
    module = sys.modules[file] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[file]
        raise
    return module


def _module_name(place: str) -> str:
    """Return the name under which a module is imported; a file that is given by its path has this path.

    >>> _module_name("rewards.mine"), _module_name("mine.py"), _module_name("/home/me/mine.py")
    ('rewards.mine', 'mine', '/home/me/mine.py')
    """
    name = place.removesuffix(".py")
    return os.path.abspath(f"{name}.py") if os.sep in place else name


def _functions(module: types.ModuleType) -> list[str]:
    """Return the names of what can be called among the things that the module itself defines."""
    called = {name: value for name, value in vars(module).items() if callable(value)}
    return [name for name, value in called.items() if getattr(value, "__module__", "") == module.__name__]


def _module_hint(wrong: str) -> str:
    """Return where a module is looked for, and which file in the working folder has a similar name."""
    files = (path.stem for path in Path().glob("*.py"))
    return f"; {did_you_mean(wrong, files)}it must be in this folder, {os.getcwd()}, or be installed"
