"""A scoring worker: reads responses from its standard input, writes their scores, one JSON line each.

Started by `scoring.ScoringPool` as a script, so that it begins with nothing of the parent; the first line
tells it the reward and its limits.
"""

import json
import math
import os
import signal
import sys
from dataclasses import asdict


def main() -> None:
    """Serve until standard input ends."""
    # The conversation keeps its own descriptor: what a reward prints goes to standard error.
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

    from mugrpo_jax.tasks.base import Problem
    from mugrpo_jax.tasks.rewards import load_reward
    from mugrpo_jax.tasks.scoring import judge

    reward = load_reward(hello["reward"])
    if hello["reward"] == "math":
        from mugrpo_jax.tasks.math_answers import same_answer

        same_answer("x + 1", "y")  # imports sympy and builds its parser's tables outside any deadline
    out.write(b'{"ready": true}\n')

    # The parent kills at the deadline. If the parent itself is gone, the alarm's default action does, in
    # whatever code the worker is caught.
    patience = math.ceil(hello["deadline_s"]) + 10
    for line in sys.stdin.buffer:
        item = json.loads(line)
        signal.alarm(patience)
        score = judge(reward, item["text"], Problem(**item["problem"]))
        signal.alarm(0)
        out.write(json.dumps(asdict(score)).encode() + b"\n")


if __name__ == "__main__":
    main()
