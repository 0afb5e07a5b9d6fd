"""Call a reward or an environment for each line of standard input; write the results to standard output.

`worker_pool.WorkerPool` starts this script as a worker process. Calls and results are lines of JSON. The
first line of the input has the name of the function and the limits for time and memory.
"""

import json
import math
import os
import signal
import sys
from collections.abc import Callable
from typing import Any


def main() -> None:
    """Handle calls until standard input ends."""
    # Results go to a copy of standard output. The text that a function prints goes to standard error.
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    hello = json.loads(sys.stdin.buffer.readline() or "null")
    if hello is None:
        return
    sys.path[:] = hello["path"]
    if sys.platform == "linux":
        import resource

        limit = hello["memory_mb"] * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    try:
        answer = (_scores if hello["kind"] == "reward" else _messages)(hello)
    except BaseException as error:
        _write(out, {"failed": f"{type(error).__name__}: {error}"[:300]})
        return
    _write(out, {"ready": True})

    # At the deadline the parent sends SIGKILL. If the parent has died, SIGALRM ends this process, even while
    # C code is running.
    patience = math.ceil(hello["deadline_s"]) + 10
    for line in sys.stdin.buffer:
        item = json.loads(line)
        signal.alarm(patience)
        reply = answer(item)
        signal.alarm(0)
        _write(out, reply)


def _scores(hello: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Load a reward; return a function that scores the response in a call."""
    from mugrpo_jax.tasks.rewards import CODE_REWARDS, load_reward
    from mugrpo_jax.tasks.sandbox import check_sandbox
    from mugrpo_jax.tasks.scoring import call_reward
    from mugrpo_jax.tasks.task import Problem

    reward = load_reward(hello["name"], unsafe_sandbox=hello["unsafe_sandbox"])
    if hello["name"] == "math":
        from mugrpo_jax.tasks.math_answers import same_answer

        same_answer("x + 1", "y")  # loads sympy and its parser before the first deadline starts
    elif hello["name"] in CODE_REWARDS:
        check_sandbox(unsafe=hello["unsafe_sandbox"])  # finds the way of isolation before it too

    def answer(item: dict[str, Any]) -> dict[str, Any]:
        score = call_reward(reward, item["text"], Problem(**item["problem"]))
        return {"value": score.value, "status": score.status, "detail": score.detail}

    return answer


def _messages(hello: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Load an environment; return a function that answers the conversation in a call."""
    from mugrpo_jax.tasks.environments import call_environment, load_environment
    from mugrpo_jax.tasks.task import Problem

    environment = load_environment(hello["name"], hello["options"])

    def answer(item: dict[str, Any]) -> dict[str, Any]:
        found = call_environment(environment, item["conversation"], Problem(**item["problem"]))
        return {"message": found.message, "status": found.status, "detail": found.detail}

    return answer


def _write(out: Any, reply: dict[str, Any]) -> None:
    view = memoryview(json.dumps(reply).encode() + b"\n")
    while view:  # a pipe may take a long message in parts
        view = view[out.write(view) :]


if __name__ == "__main__":
    main()
