"""`python -m mugrpo_jax` is the same as `mugrpo`."""

from mugrpo_jax.cli.main import program

if __name__ == "__main__":
    program()
