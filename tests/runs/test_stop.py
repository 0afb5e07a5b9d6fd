"""A run is asked to stop by a signal."""

import errno
import os
import signal
import sys

import pytest

from mugrpo_jax.runs.stop import StopRequest


@pytest.fixture(autouse=True)
def heard():
    """The tests may have been started with `nohup`, and nothing but a `StopRequest` may handle the signal."""
    before = signal.signal(signal.SIGHUP, lambda *_: pytest.fail("SIGHUP would have ended this process"))
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_asks_the_run_to_stop(number, capsys):
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert not stop.requested and not stop.agreed
        os.kill(os.getpid(), number)
        assert stop.requested and stop.agreed  # one process needs nobody else
    assert signal.getsignal(number) is before
    assert "the same command continues" in capsys.readouterr().out


def test_nohup_keeps_a_run_alive():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not stop.requested


def test_a_terminal_that_is_gone_does_not_keep_a_run_from_stopping(monkeypatch):
    class Gone:
        def write(self, text):
            raise OSError(errno.EIO, "Input/output error")

        flush = write

    monkeypatch.setattr(sys, "stdout", Gone())
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.requested


def test_a_second_interrupt_ends_the_run_at_once():
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)  # repeats the request
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested


def test_an_agreement_stays():
    stop = StopRequest()
    stop.agree(False)
    assert not stop.agreed
    stop.agree(True)
    stop.agree(False)
    assert stop.agreed
