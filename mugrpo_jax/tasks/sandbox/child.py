"""The process of a program: set its limits, execute it, and write the value of a call to a pipe.

The program may do anything to this process. So nothing here is trusted: the process does not know the right
answer, and it has no way to the supervisor but its output.
"""

import contextlib
import errno
import os
import resource
import sys
import types
from typing import Any

_RESULT = 3  # the pipe for the value of a call
MEMORY, FILES, SYNTAX = 101, 102, 103  # exit codes with a meaning for the supervisor
_NUMBERS = {"inf": float("inf"), "nan": float("nan")}  # their names in a literal


def run_test(request: dict[str, Any], test: dict[str, Any]) -> int:
    """Execute the program on one test; return the exit code."""
    _limit(request["limits"])
    sys.argv, sys.path = ["program.py"], [*sys.path, *request["packages"]]
    for descriptor, (stream, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        file = open(descriptor, mode, encoding="utf-8", closefd=False)  # noqa: SIM115  # the program uses it
        setattr(sys, stream, file)
        setattr(sys, f"__{stream}__", file)
    name = "__main__" if "stdin" in test else "program"
    module = types.ModuleType(name)
    for own in ("isolation", "seccomp", "supervisor", "child"):
        sys.modules.pop(own, None)
    sys.modules[name] = module
    try:
        exit_code = _execute(request["code"], test, module.__dict__)
        _wait_for_threads()
    except MemoryError:
        exit_code = _report(MEMORY)
    except SyntaxError:
        exit_code = _report(SYNTAX)
    except OSError as error:
        exit_code = _report(FILES if error.errno in (errno.EFBIG, errno.ENOSPC) else 1)
    except BaseException:
        exit_code = _report(1)
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    return exit_code


def _execute(code: str, test: dict[str, Any], names: dict[str, Any]) -> int:
    try:
        program = compile(code, "program.py", "exec")
    except (MemoryError, RecursionError, ValueError) as error:
        raise SyntaxError(str(error) or "too deeply nested") from None
    try:
        if "arguments" in test:
            exec("from typing import *", names)  # judges of such problems give these names
        exec(program, names)
        if "expression" in test:
            exec(test.get("setup", ""), names)
            value = eval(test["expression"], names)
        elif "arguments" in test:
            arguments = eval(test["arguments"], dict(_NUMBERS))
            value = _function(names, test.get("function"))(*arguments)
        else:
            return 0
        os.write(_RESULT, literal(value).encode())
    except SystemExit as ending:
        number = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
        return 1 if number in (MEMORY, FILES, SYNTAX) else number
    return 0


def _function(names: dict[str, Any], name: str | None) -> Any:
    """Find a function of the program: at the top, or a method of its class `Solution`."""
    if name in names:
        return names[name]
    if "Solution" not in names:
        raise NameError(f"the program has no function {name!r}")
    methods = [key for key in vars(names["Solution"]) if not key.startswith("_")]
    if name is None and len(methods) != 1:
        raise NameError(f"class Solution has {len(methods)} public methods; expected 1")
    return getattr(names["Solution"](), name or methods[0])


def literal(value: Any) -> str:
    """Write a value as a Python literal; a value of any other type becomes the text of its `repr`."""
    if isinstance(value, float):
        number = float(value)
        return repr(number) if abs(number) < float("inf") else f"{number}".replace("inf", "1e999")
    if value is None or isinstance(value, (bool, int, str, bytes, complex)):
        return repr(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{literal(key)}:{literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, tuple):
        return "(" + "".join(literal(item) + "," for item in value) + ")"
    if isinstance(value, (set, frozenset)):
        return "{" + ",".join(map(literal, value)) + "}" if value else "set()"
    if isinstance(value, list) or type(value).__name__ in ("deque", "ndarray", "dict_keys", "dict_values"):
        return "[" + ",".join(map(literal, value)) + "]"
    if hasattr(value, "item"):  # a number of numpy
        return literal(value.item())
    return repr(repr(value))


def _report(exit_code: int) -> int:
    """Write the exception to standard error."""
    with contextlib.suppress(BaseException):
        sys.__excepthook__(*sys.exc_info())
        sys.stderr.flush()
    return exit_code


def _wait_for_threads() -> None:
    threading: Any = sys.modules.get("threading")
    for thread in threading.enumerate() if threading else ():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()


def _limit(limits: dict[str, Any]) -> None:
    seconds, megabyte = int(limits["time_s"]) + 1, 2**20
    for name, value in (
        ("RLIMIT_CPU", seconds),
        ("RLIMIT_AS", limits["memory_mb"] * megabyte),
        ("RLIMIT_FSIZE", limits["folder_mb"] * megabyte),
        ("RLIMIT_NPROC", limits["processes"]),
        ("RLIMIT_NOFILE", 256),
        ("RLIMIT_CORE", 0),
    ):
        if name == "RLIMIT_AS" and sys.platform != "linux":
            continue
        number = getattr(resource, name)
        hard = resource.getrlimit(number)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (value, value))
