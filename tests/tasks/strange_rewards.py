"""A reward that misbehaves in the way that the response names."""

import os
import subprocess
import sys
import time

NOT_A_FUNCTION = 3


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError


def reward(text, problem):
    kind, _, argument = text.partition(" ")
    match kind:
        case "hang":
            while True:
                pass
        case "hang-in-c":
            return float(len(str(7 ** (7**9))))
        case "sleep":
            time.sleep(float(argument))
        case "memory":
            hoard = []
            while True:
                hoard.append(bytearray(2**24))
        case "memory-at-once":
            return float(len(bytearray(2**30)) > 0)
        case "exit":
            os._exit(3)
        case "quit":
            sys.exit(0)
        case "surrogate":
            raise RuntimeError("half of an emoji: \ud83d")
        case "no-text":
            raise Unprintable
        case "child":
            return float(subprocess.Popen(["sleep", "100"]).pid)
        case "raise":
            raise RuntimeError("no idea")
        case "nan":
            return float("nan")
        case "text":
            return "1.0"
        case "none":
            return None
        case "print":
            print("noise" * 1000)
            os.write(1, b"more noise\n")
        case "jax":
            return float(any(module.split(".")[0] in ("jax", "jaxlib", "numpy") for module in sys.modules))
        case "length":
            return float(len(argument))
        case "same":
            return float(argument == problem.answer)
    return 1.0
