"""The error and the exit status of a process that misses another process of its run."""

from mugrpo_jax.config import ConfigError

GONE = 75  # EX_TEMPFAIL: try again


class Absent(ConfigError):
    """Another process of the run did not come, is silent or hangs; later the same command may work.

    The command ends with the status `GONE`.
    """
