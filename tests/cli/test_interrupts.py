"""Ctrl-C ends a command at any moment, also while packages load and during a collection of garbage."""

import gc
import signal
import subprocess
import sys
import time

import pytest

from mugrpo_jax.cli import main as cli
from mugrpo_jax.cli.interrupts import INTERRUPTED, LINE, ending_at_once, none_lost


@pytest.fixture
def ctrl_c():
    """The handler of Ctrl-C that a command starts with; pytest's workers may have another."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_during_a_collection_of_garbage_is_not_lost(ctrl_c):
    def interrupted(phase, info):
        gc.callbacks.remove(interrupted)
        raise KeyboardInterrupt

    gc.callbacks.append(interrupted)
    hook = sys.unraisablehook
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), none_lost():
        gc.collect()
        time.sleep(20)
    assert time.monotonic() - began < 10
    assert sys.unraisablehook is hook


def test_other_errors_that_cannot_be_raised_are_still_told(ctrl_c, monkeypatch):
    told = []
    monkeypatch.setattr(sys, "unraisablehook", lambda lost: told.append(lost.exc_type))

    def failing(phase, info):
        gc.callbacks.remove(failing)
        raise ZeroDivisionError

    gc.callbacks.append(failing)
    with none_lost():
        gc.collect()
    assert told == [ZeroDivisionError]


def test_ctrl_c_while_packages_load_ends_the_process_with_one_line(ctrl_c):
    program = """if True:
        import signal
        from mugrpo_jax.cli.interrupts import ending_at_once
        with ending_at_once():
            try:
                signal.raise_signal(signal.SIGINT)
            finally:
                print("went on")
        """
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (INTERRUPTED, "", f"{LINE}\n")


def test_behind_the_block_ctrl_c_raises_again(ctrl_c):
    with ending_at_once():
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_an_ignored_ctrl_c_stays_ignored(ctrl_c):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with ending_at_once():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_write_that_failed_in_a_closed_loop_is_told_once_by_its_own_error(capsys, monkeypatch):
    """TensorStore reports each array that Orbax did not wait for."""
    monkeypatch.setattr(sys, "unraisablehook", cli._print_unraisable)
    for text in ("Event loop is closed", "another error"):

        def failing(phase, info, text=text):
            gc.callbacks.remove(failing)
            raise RuntimeError(text)

        gc.callbacks.append(failing)
        gc.collect()
    told = capsys.readouterr().err
    assert "another error" in told and "loop is closed" not in told
