"""`python -m mugrpo_jax` is the same as `mugrpo`."""

import sys

from mugrpo_jax.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
