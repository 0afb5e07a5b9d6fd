"""The clock of compiling: what counts, and that it counts once."""

import jax
import jax.numpy as jnp
import pytest

from mugrpo_jax.compiling.compile_clock import CompileClock, compile_clock
from mugrpo_jax.loop.pending_metrics import PendingMetrics


def test_what_overlaps_counts_once():
    clock = CompileClock()
    clock.add(1.0, 2.0)
    clock.add(3.0, 4.0)  # apart from the first
    assert clock.seconds == 2.0
    clock.add(3.0, 4.5)  # around the second, and 0.5 longer
    assert clock.seconds == 2.5
    clock.add(4.2, 4.8)  # begins inside it
    assert clock.seconds == pytest.approx(2.8)
    clock.add(1.5, 5.0)  # begins inside the first
    assert clock.seconds == pytest.approx(4.0)
    clock.listen("/jax/checkpoint/write/async", 9.0)
    assert clock.seconds == pytest.approx(4.0)


def test_an_update_tells_what_went_into_compiling():
    seen = []
    pending = PendingMetrics(lambda about, metrics, seconds: seen.append(seconds))
    program = jax.jit(lambda x: {"loss": jnp.sort(jnp.sin(x) @ x.T).sum()})
    argument = jnp.ones((5, 7))
    before = compile_clock().seconds
    pending.restart()
    pending.add(1, program(argument))
    pending.flush()
    compiled = compile_clock().seconds - before
    pending.add(2, program(argument))  # compiled already
    pending.flush()
    assert seen[0]["compile"] == pytest.approx(compiled) and 0 < compiled <= seen[0]["update"]
    assert seen[1]["compile"] == 0.0
