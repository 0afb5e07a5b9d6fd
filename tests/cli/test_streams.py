"""What a command prints never ends its work, whatever becomes of its output."""

import io
import os
import sys

import pytest

from mugrpo_jax.cli.streams import LastingStream, usable_output


def test_a_lasting_stream_drops_what_nobody_reads(closed_pipe):
    pipe = closed_pipe()
    stream = LastingStream(pipe)
    assert stream.write("one line\n") == 9
    stream.flush()
    print("and more", file=stream, flush=True)
    assert not stream.isatty() and stream.encoding == pipe.encoding


def test_a_lasting_stream_outlives_its_terminal():
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "w") as terminal:
        os.close(ours)  # the terminal is closed, and writing to it fails
        stream = LastingStream(terminal)
        print("a line", file=stream, flush=True)
        print("another", file=stream, flush=True)
    with open("/dev/full", "w") as full, pytest.raises(OSError, match="No space left"):
        LastingStream(full).write("x" * 100_000)


def test_only_a_command_that_shows_something_ends_with_its_pipe(closed_pipe, monkeypatch):
    monkeypatch.setattr(sys, "stdout", pipe := closed_pipe())
    with usable_output(lasting=True):
        print("a line")
    assert sys.stdout is pipe
    monkeypatch.setattr(sys, "stdout", closed_pipe())
    with pytest.raises(BrokenPipeError), usable_output(lasting=False):
        print("a line")


def test_what_cannot_be_encoded_is_replaced(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    with usable_output(lasting=True):
        print("2 stages × 4 updates")
    assert raw.getvalue().decode() == "2 stages ? 4 updates" + os.linesep


def test_a_closed_stream_drops_everything(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    with usable_output(lasting=True):
        assert not sys.stderr.isatty()
        print("a line", file=sys.stderr)
    assert sys.stderr is None
