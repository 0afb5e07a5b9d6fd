"""Fixtures that the tests of the commands share."""

import contextlib
import os

import pytest

from mugrpo_jax.cli.streams import drop


@pytest.fixture
def closed_pipe():
    """A function that returns a stream to a pipe whose reader has ended, as `head` does after a few lines."""
    with contextlib.ExitStack() as opened:

        def make():
            read, write = os.pipe()
            os.close(read)
            stream = opened.enter_context(os.fdopen(write, "w", buffering=1))
            opened.callback(drop, stream)  # what is still in its buffer would fail when it is closed
            return stream

        yield make
