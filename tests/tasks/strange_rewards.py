"""A reward that misbehaves in the way that the response names."""

import os
import sys
import time

NOT_A_FUNCTION = 3


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
