"""A command goes on with its work after the pipe or terminal to which it prints was closed."""

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO


class LastingStream:
    """A text stream to a pipe or terminal. After the pipe or terminal was closed, writing does nothing."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text. Do nothing if the pipe or terminal was closed."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._drop_if_closed(error)
            return len(text)

    def flush(self) -> None:
        """Write what is in the buffer. Do nothing if the pipe or terminal was closed."""
        try:
            self._stream.flush()
        except OSError as error:
            self._drop_if_closed(error)

    def _drop_if_closed(self, error: OSError) -> None:
        if error.errno not in (errno.EPIPE, errno.EIO):  # of a pipe, of a terminal
            raise error
        drop(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def drop(stream: TextIO) -> None:
    """Let everything that is written to a stream from now on disappear."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


@contextlib.contextmanager
def usable_output(*, lasting: bool) -> Iterator[None]:
    """Let `print` and progress bars work with any stdout and stderr of this process.

    Characters that a stream cannot encode are replaced, and a closed stream drops everything. With `lasting`,
    a stream also drops everything after the other end of a pipe was closed; otherwise that is an error.
    """
    before = sys.stdout, sys.stderr
    with contextlib.ExitStack() as opened:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is None:  # the file descriptor was closed when the process started
                stream = opened.enter_context(open(os.devnull, "w"))
            elif hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")
            setattr(sys, name, LastingStream(stream) if lasting else stream)
        try:
            yield
        finally:
            if lasting:
                sys.stdout.flush()
                sys.stderr.flush()
            sys.stdout, sys.stderr = before
