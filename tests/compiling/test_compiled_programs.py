"""Claims about programs compiled ahead: they are used, and whatever goes wrong only costs the time saved."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mugrpo_jax.compiling.compiled_programs import CompiledPrograms, in_background

FOUR = jax.ShapeDtypeStruct((4,), jnp.float32)


@pytest.fixture
def programs():
    said = []
    programs = CompiledPrograms(said.append)
    programs.said = said
    programs.start(1)
    yield programs
    programs.close()


def double():
    """A new program, which no cache of jax knows."""
    return jax.jit(lambda x: 2 * x)


def unexpected():
    raise AssertionError("compiled again")


def test_a_program_compiled_ahead_is_compiled_once_and_in_the_background(programs):
    threads = []
    listen = lambda event, _, **__: threads.append(in_background()) if "backend" in event else None  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listen)
    program = double()
    future = programs.ahead("double", lambda: program.lower(FOUR))
    assert programs.ahead("double", unexpected) is future and future.result()
    for _ in range(2):
        np.testing.assert_array_equal(programs.get("double", unexpected)(np.ones(4, np.float32)), 2)
    jax.monitoring.unregister_event_duration_listener(listen)
    assert threads == [True]
    assert not programs.said


def test_a_program_that_cannot_be_lowered_is_made_when_it_is_needed(programs):
    programs.ahead("double", lambda: jax.jit(unexpected).lower())
    np.testing.assert_array_equal(programs.get("double", double)(np.ones(4, np.float32)), 2)
    assert programs.said == ["double could not be compiled ahead and is compiled now: compiled again"]


def test_a_program_for_other_arguments_is_replaced(programs):
    program = double()
    programs.ahead(("double", 4), lambda: program.lower(FOUR)).result()
    for _ in range(2):
        np.testing.assert_array_equal(
            programs.get(("double", 4), double)(np.ones(5, np.float32)), np.full(5, 2)
        )
    assert len(programs.said) == 1
    assert programs.said[0].startswith("double could not be compiled ahead and is compiled now: ")


def test_a_program_that_was_not_started_is_not_waited_for(programs):
    go_on, program = threading.Event(), double()
    programs.ahead("slow", lambda: go_on.wait(60) and program.lower(FOUR))
    programs.ahead("double", unexpected)
    assert programs.get("double", lambda: program) is program
    go_on.set()
    assert not programs.said


def test_settings_of_the_callers_thread_keep_it_from_compiling_ahead():
    programs, program = CompiledPrograms(), double()
    with jax.default_matmul_precision("highest"):
        programs.start(1)
        programs.ahead("double", lambda: program.lower(FOUR))
        assert programs.get("double", lambda: program) is program
    programs.close()
