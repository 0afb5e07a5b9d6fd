"""`python -m mugrpo_jax` is the same as `mugrpo`."""

import os
import sys

if sys.path[0] == os.getcwd():  # `python -m` puts it there; no file in it may hide a package
    sys.path.append(sys.path.pop(0))

from mugrpo_jax.cli.main import program

if __name__ == "__main__":
    program()
