"""A scoring worker: reads responses from standard input and writes their scores, one JSON line each.

`scoring.ScoringPool` starts it as a script, so that it shares no state with the parent. The first line
that it reads names the reward and the limits.
"""

import json
import math
import os
import signal
import sys
from dataclasses import asdict


def main() -> None:
    """Serve until standard input ends."""
    # Scores go to a copy of standard output; whatever a reward prints is redirected to standard error.
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

    from mugrpo_jax.tasks.rewards import load_reward
    from mugrpo_jax.tasks.scoring import call_reward
    from mugrpo_jax.tasks.task import Problem

    reward = load_reward(hello["reward"])
    if hello["reward"] == "math":
        from mugrpo_jax.tasks.math_answers import same_answer

        same_answer("x + 1", "y")  # loads sympy and its parser now, before any deadline
    out.write(b'{"ready": true}\n')

    # The parent kills this process at the deadline. If the parent has died, the alarm ends this process, even
    # in the middle of C code.
    patience = math.ceil(hello["deadline_s"]) + 10
    for line in sys.stdin.buffer:
        item = json.loads(line)
        signal.alarm(patience)
        score = call_reward(reward, item["text"], Problem(**item["problem"]))
        signal.alarm(0)
        out.write(json.dumps(asdict(score)).encode() + b"\n")


if __name__ == "__main__":
    main()
