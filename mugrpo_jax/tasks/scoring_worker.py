"""Read responses from standard input and write their scores to standard output, as lines of JSON.

`scoring.ScoringPool` starts this script as a worker process. The first line of the input has the name of the
reward and the limits for time and memory.
"""

import json
import math
import os
import signal
import sys


def main() -> None:
    """Score responses until standard input ends."""
    # Scores go to a copy of standard output. The text that a reward prints goes to standard error.
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
        from mugrpo_jax.tasks.rewards import CODE_REWARDS, load_reward
        from mugrpo_jax.tasks.sandbox import check_sandbox
        from mugrpo_jax.tasks.scoring import call_reward
        from mugrpo_jax.tasks.task import Problem

        reward = load_reward(hello["reward"], unsafe_sandbox=hello["unsafe_sandbox"])
        if hello["reward"] == "math":
            from mugrpo_jax.tasks.math_answers import same_answer

            same_answer("x + 1", "y")  # loads sympy and its parser before the first deadline starts
        elif hello["reward"] in CODE_REWARDS:
            check_sandbox(unsafe=hello["unsafe_sandbox"])  # finds the way of isolation before it too
    except BaseException as error:
        out.write(json.dumps({"failed": f"{type(error).__name__}: {error}"[:300]}).encode() + b"\n")
        return
    out.write(b'{"ready": true}\n')

    # At the deadline the parent sends SIGKILL. If the parent has died, SIGALRM ends this process, even while
    # C code is running.
    patience = math.ceil(hello["deadline_s"]) + 10
    for line in sys.stdin.buffer:
        item = json.loads(line)
        signal.alarm(patience)
        score = call_reward(reward, item["text"], Problem(**item["problem"]))
        signal.alarm(0)
        reply = {"value": score.value, "status": score.status, "detail": score.detail}
        out.write(json.dumps(reply).encode() + b"\n")


if __name__ == "__main__":
    main()
