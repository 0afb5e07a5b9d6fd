"""The clock of compiling: what counts, and that it counts once."""

import jax
import jax.numpy as jnp
import pytest

from mugrpo_jax.compiling import CompileClock, compile_clock
from mugrpo_jax.run import Journal, read_journal


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


def test_the_journal_tells_what_went_into_compiling(tmp_path):
    journal = Journal(tmp_path / "metrics.jsonl")
    record = {"kind": "update", "updates": 1}
    before = compile_clock().seconds
    program = jax.jit(lambda x: jnp.sort(jnp.sin(x) @ x.T))
    program(jnp.ones((5, 7))).block_until_ready()
    compiled = compile_clock().seconds - before
    journal.write(record)
    argument = jnp.zeros((5, 7))
    journal.write(record)
    program(argument).block_until_ready()  # compiled already
    journal.write(record)
    first, _, last = (record["seconds"] for record in read_journal(journal.path))
    assert 0 < first["compile"] <= first["elapsed"] and last["compile"] == 0.0
    assert abs(first["compile"] - compiled) < 1e-9
