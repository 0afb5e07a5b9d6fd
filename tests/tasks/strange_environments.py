"""Environments that misbehave in the way that the last turn names."""

import os
import time

NOT_A_FUNCTION = 3


def environment(conversation, problem, *, polite=False):
    match conversation[-1]["content"]:
        case "raise":
            raise RuntimeError("no idea")
        case "number":
            return 7
        case "nothing":
            return ""
        case "exit":
            os._exit(3)
        case "sleep":
            time.sleep(100)
        case "long":
            return "x" * 300_000
        case "end":
            return None
    said = f"{len(conversation)} {conversation[0]['content']} {problem.answer}"
    return f"please: {said}" if polite else said


def one_argument(conversation):
    return None
