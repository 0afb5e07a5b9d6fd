"""A script: run one program on its tests, isolated, and write one line of JSON per test.

`run_program` starts it with `python -I -S`, or bubblewrap does. Standard input has the request. The process
that supervises the program has dropped its privileges too, and is process 1 of its own namespace: programs
cannot signal it, and it can kill all of them at once.
"""

import contextlib
import json
import os
import signal
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from supervisor import input_file, supervise  # this is a script, not a package

_LINUX = sys.platform == "linux"
if _LINUX:
    import isolation
    import seccomp
sys.path.pop(0)


def main() -> None:
    """Read the request, isolate this process as it says, and run the tests."""
    request = json.load(sys.stdin.buffer)
    out = os.dup(1)
    try:
        isolated = request["mode"] != "unsafe"
        if _LINUX:
            isolation.die_with_parent()
        if request["mode"] == "namespaces":
            user = isolation.enter_namespaces()
            first = os.fork()
            if first:
                os._exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) & 255)
            isolation.die_with_parent()
            isolation.build_root(request["visible"], user, request["limits"]["folder_mb"])
            isolation.drop_privileges(user)
            isolation.die_with_parent()  # a change of the user has cleared it
        elif isolated:
            isolation.drop_privileges(os.getuid())
        stdin = input_file()
        if isolated:
            seccomp.forbid_calls(isolation.libc)
    except OSError as error:
        _write(out, {"failed": str(error)})
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # process 1 ignores it then
    with contextlib.nullcontext("/sandbox") if isolated else _temporary_folder() as folder:
        for test in request["tests"]:
            result = supervise(request, test, folder, stdin, isolated)
            _write(out, result)
            if result["status"] == "time_limit":
                break  # the other tests would probably take as long


def _write(out: int, reply: dict[str, object]) -> None:
    line = json.dumps(reply).encode() + b"\n"
    while line:
        line = line[os.write(out, line) :]


def _temporary_folder() -> contextlib.AbstractContextManager[str]:
    import tempfile

    return tempfile.TemporaryDirectory()


if __name__ == "__main__":
    main()
