"""Hosts agree; with one process every answer is its own."""

import jax
import pytest

from mugrpo_jax import distributed, models
from mugrpo_jax.config import ConfigError
from mugrpo_jax.distributed import host_agreement as agree


def test_one_process_agrees_with_itself():
    assert distributed.gather("anything", {"a": 1}) == [{"a": 1}]
    distributed.check_same("config", {"seed": 0})
    with distributed.together("load"):
        pass
    with pytest.raises(OSError, match="no disk"), distributed.together("load"):
        raise OSError("no disk")


@pytest.mark.parametrize("kind", [ConfigError, distributed.Absent])
def test_an_error_of_another_host_is_raised_here_with_its_kind(monkeypatch, kind):
    raised = [kind is distributed.Absent, "data.jsonl: no such file"]
    monkeypatch.setattr(agree, "gather", lambda name, value: [value, raised])
    found = r"process 1: data\.jsonl: no such file"
    with pytest.raises(ConfigError, match=found) as error, distributed.together("load"):
        pass
    assert type(error.value) is kind


def test_differing_keys_are_named_with_their_process(monkeypatch):
    monkeypatch.setattr(agree, "gather", lambda name, value: [value, value | {"seed": 7}])
    with pytest.raises(ConfigError, match=r"on the config: seed \(7 there, 0 here\) \(there: process 1"):
        distributed.check_same("config", {"seed": 0, "advantage": "std"})


def test_a_vote_counts_every_device():
    vote = distributed.Vote(models.make_mesh(fsdp=jax.device_count()))
    assert (float(vote(False)), float(vote(True))) == (0.0, 1.0)
