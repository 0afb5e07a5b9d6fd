"""Import a function of the user's own, which a config names as `module:function`."""

import difflib
import importlib
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any


def own_function(kind: str, name: str, built_in: Iterable[str], arguments: str) -> Callable[..., Any]:
    """Return the function that `name` means; a `ValueError` says in one line why it cannot be imported.

    Args:
      kind: what the function is for, at the start of the error: `reward` or `environment`.
      built_in: the names that need no module, for the error.
      arguments: the arguments of such a function, for the error.
    """
    module_name, colon, attribute = name.partition(":")
    if not (colon and module_name and attribute):
        near = difflib.get_close_matches(name, list(built_in), 1)
        guess = f", did you mean {near[0]!r}?" if near else ";"
        raise ValueError(f"{kind} is {name!r}{guess} possible: {', '.join(built_in)} or module:function")
    # The function may be in the working folder. The folder goes last, so that no file in it hides a package.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name.removesuffix(".py"))
    except (Exception, SystemExit) as error:
        raise ValueError(f"{kind} {name!r}: cannot import {module_name!r}: {error!r}") from error
    function = getattr(module, attribute, None)
    if function is None:
        near = difflib.get_close_matches(attribute, dir(module), 1)
        guess = f", did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{kind} {name!r}: the module has no {attribute!r}{guess}")
    if not callable(function):
        raise ValueError(f"{kind} {name!r} is a {type(function).__name__}; possible: a function {arguments}")
    return function
