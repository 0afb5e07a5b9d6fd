"""Samplers share shards by claims; a dead one is recognised without comparing clocks, and every wait ends."""

import errno
import os
import re
import time

import pytest

from mugrpo_jax import files
from mugrpo_jax.config import ConfigError
from mugrpo_jax.distributed import Absent
from mugrpo_jax.runs import owned_files, sampler_claims, waiting
from mugrpo_jax.runs.sampler_claims import (
    Claims,
    SamplerWatch,
    SignOfLife,
    last_error,
    refuse_samplers,
    signs_of_life,
)
from mugrpo_jax.runs.stop import Stopped
from mugrpo_jax.runs.waiting import Waiting


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(sampler_claims, "_BEAT_S", 0.02)
    monkeypatch.setattr(sampler_claims, "_DEAD_S", 0.3)
    monkeypatch.setattr(waiting, "_LONGEST_PAUSE_S", 0.02)


@pytest.fixture(params=["disk", "bucket"])
def folder(request, tmp_path, bucket):
    return tmp_path if request.param == "disk" else files.to_path("gs://bucket/run")


def far(sampler):
    """Let a sampler look as if it were on another machine, where the process table does not help."""
    sampler.owner["machine"] = "far"
    return sampler


def test_a_shard_has_one_owner_until_it_gives_it_back(folder):
    with SignOfLife(folder) as one, SignOfLife(folder) as two:
        first, second = Claims(one, 3), Claims(two, 3)
        assert first.claim("00000") and not second.claim("00000")
        assert second.claim("00001") and not first.claim("00001")
        first.release()
        assert second.claim("00000")
        assert len(signs_of_life(folder)) == 2
        second.remove()
    assert files.names_below(folder) == []


def test_a_claim_that_was_forgotten_after_an_error_of_the_storage_does_not_block_the_work(folder):
    with SignOfLife(folder) as one, SignOfLife(folder) as two:
        assert Claims(one, 3).claim("00000")  # these claims are lost, but their file is there
        again = Claims(one, 3)
        assert again.claim("00000") and again.holds("00000") and not Claims(two, 3).claim("00000")
        again.release()
        assert not again.holds("00000") and Claims(two, 3).claim("00000")


def test_a_sampler_of_this_machine_that_was_killed_is_replaced_at_once(tmp_path, capsys):
    with SignOfLife(tmp_path) as one:
        one.owner["started"] = "1"  # the number of its process now belongs to another one
        assert Claims(one, 0).claim("00000") and Claims(one, 0).claim("00001")
        with SignOfLife(tmp_path) as two:
            claims = Claims(two, 0)
            assert claims.claim("00000") and claims.claim("00001")
    (line,) = capsys.readouterr().out.splitlines()  # one for all shards
    assert (
        f"process {os.getpid()} on" in line and "is gone, this sampler takes over its work on stage 0" in line
    )


def test_a_sampler_elsewhere_is_dead_once_its_sign_of_life_stands_still(tmp_path, monkeypatch):
    """Clocks of machines may differ, so neither the time of day nor that of a file is looked at."""
    monkeypatch.setattr(time, "time", None)
    with SignOfLife(tmp_path) as here:
        with far(SignOfLife(tmp_path)) as other:
            assert Claims(other, 0).claim("00000")
            claims, end = Claims(here, 0), time.monotonic() + 1.0
            while time.monotonic() < end:
                assert not claims.claim("00000")
                for path in tmp_path.glob("samplers/**/*"):
                    os.utime(path, (0, 0))
                time.sleep(0.01)
        started = time.monotonic()
        while not claims.claim("00000"):
            time.sleep(0.01)
        assert 0.2 < time.monotonic() - started < 5.0


def test_a_sampler_of_this_machine_that_hangs_is_replaced_too(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(SignOfLife, "_beat", lambda self: None)  # as if its process was stopped
    with SignOfLife(tmp_path) as hanging, SignOfLife(tmp_path) as here:
        assert Claims(hanging, 0).claim("00000")
        claims, started = Claims(here, 0), time.monotonic()
        while not claims.claim("00000"):
            time.sleep(0.01)
        assert 0.2 < time.monotonic() - started < 5.0
        assert "gave no sign of life, this sampler takes over its work" in capsys.readouterr().out
        assert list(signs_of_life(tmp_path, but=here)) == [f"{hanging.owner['token']}.json"]


def test_a_sampler_whose_work_hangs_gives_no_signs_until_it_goes_on(tmp_path, capsys):
    def changes(seconds=10.0):
        before, end = signs_of_life(tmp_path), time.monotonic() + seconds
        while time.monotonic() < end and signs_of_life(tmp_path) == before:
            time.sleep(0.01)
        return signs_of_life(tmp_path) != before

    with SignOfLife(tmp_path) as sign:
        assert changes()
        sign._moved -= 2 * sampler_claims._STUCK_S  # as if it had hung for so long
        said, end = "", time.monotonic() + 10.0
        while "hangs" not in said and time.monotonic() < end:
            time.sleep(0.01)
            said += capsys.readouterr().out
        assert not changes(0.3) and not changes(0.3)
        assert (said + capsys.readouterr().out).count("this sampler hangs, it did nothing for") == 1
        sign.moved()
        assert changes()


def test_only_samplers_that_are_alive_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(sampler_claims, "_DEAD_S", 1.0)
    watch = SamplerWatch()
    assert watch.living(signs_of_life(tmp_path)) == 0 and watch.silent_s() is None
    with SignOfLife(tmp_path), far(SignOfLife(tmp_path)):
        for name, change in (("killed", {"started": "1"}), ("elsewhere", {"machine": "far"})):
            owner = owned_files.this_process() | change
            (tmp_path / "samplers" / f"{name}.json").write_bytes(owned_files.text_of(owner))
        assert watch.living(signs_of_life(tmp_path)) == 3  # of one elsewhere, only time tells
        end = time.monotonic() + 5.0
        while watch.living(signs_of_life(tmp_path)) > 2 and time.monotonic() < end:
            time.sleep(0.01)
        assert watch.living(signs_of_life(tmp_path)) == 2 and watch.silent_s() < 1.0
    time.sleep(1.1)
    assert watch.living(signs_of_life(tmp_path)) == 0 and 1.0 < watch.silent_s() < 10.0


def test_the_error_of_a_sampler_stays_until_a_sampler_starts(folder):
    assert last_error(folder) is None
    with pytest.raises(OSError), SignOfLife(folder):
        raise OSError(errno.ENOSPC, "No space left\non device")
    assert signs_of_life(folder) == {}
    found = rf"process {os.getpid()} on \S+ ended: \[Errno 28\] No space left on device"
    assert re.fullmatch(found, last_error(folder))
    with pytest.raises(Stopped), SignOfLife(folder):
        assert last_error(folder) is None
        raise Stopped("on request")
    assert last_error(folder) is None
    with pytest.raises(Absent), SignOfLife(folder):
        raise Absent("start the trainer")  # the trainer is there when it reads this
    assert last_error(folder) is None
    with pytest.raises(RuntimeError), SignOfLife(folder):
        raise RuntimeError("out of memory " * 1000)
    assert re.fullmatch(r"process \S+ on \S+ ended: out of memory .{400,500} …", last_error(folder))


def test_a_sampler_that_cannot_leave_its_error_ends_all_the_same(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(SignOfLife, "_beat", lambda self: None)
    monkeypatch.setattr(owned_files, "rewrite", full)
    with pytest.raises(ConfigError, match="too large"), SignOfLife(tmp_path):
        raise ConfigError("too large")
    assert files.names_below(tmp_path) == [] and last_error(tmp_path) is None


def test_a_full_disk_is_one_clear_line(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with SignOfLife(tmp_path) as sampler:
        monkeypatch.setattr(sampler_claims, "create", full)
        with pytest.raises(
            ConfigError, match=r"00007: cannot be written \(No space left on device\); the same"
        ):
            Claims(sampler, 0).claim("00007")
        with pytest.raises(ConfigError, match=r"cannot be written \(No space left"):
            SignOfLife(tmp_path).__enter__()


def test_a_trainer_that_samples_itself_is_refused_beside_samplers(tmp_path, capsys):
    refuse_samplers(tmp_path)
    with SignOfLife(tmp_path), pytest.raises(ConfigError, match=r"samples for this run.*--rollouts wait"):
        refuse_samplers(tmp_path)
    with far(SignOfLife(tmp_path)), pytest.raises(ConfigError, match="samples for this run"):
        refuse_samplers(tmp_path)
    with SignOfLife(tmp_path), pytest.raises(ConfigError, match=r"samples for this run .*; stop it first$"):
        refuse_samplers(tmp_path, "stop it first")
    dead = owned_files.text_of(owned_files.this_process() | {"machine": "far"})
    (tmp_path / "samplers" / "dead.json").write_bytes(dead)
    capsys.readouterr()
    refuse_samplers(tmp_path)  # after some time without a sign
    assert "waiting up to 0.3 s for a sign of life of samplers" in capsys.readouterr().out
    assert not (tmp_path / "samplers" / "dead.json").exists()  # the next start does not wait again


def test_a_wait_is_seen_and_ends_if_the_other_side_gives_no_sign_of_life(monkeypatch, capsys):
    monkeypatch.setattr(waiting, "_SAY_AFTER_S", 0.05)
    wait, started = Waiting(0.3), time.monotonic()
    for sign in range(40):
        wait.pause("stage 4", sign, lambda: "start it")  # longer than the limit, but it is alive
    assert time.monotonic() - started > 0.3
    assert wait.seconds == pytest.approx(time.monotonic() - started, abs=0.1)
    assert capsys.readouterr().out.count("waiting for stage 4: ") == 1
    with pytest.raises(ConfigError, match=r"for stage 4, the last .* without a sign .*0\.3\); start it"):
        while True:
            wait.pause("stage 4", 40, lambda: "start it")


def test_a_wait_for_nobody_says_at_first_what_to_do(monkeypatch, capsys):
    monkeypatch.setattr(waiting, "_SAY_AFTER_S", 0.05)
    monkeypatch.setattr(waiting, "_SAY_EVERY_S", 0.05)
    wait = Waiting(100)
    while wait.seconds < 0.3:
        wait.pause("stage 4 (0 samplers)", None, lambda: "start a sampler", alone=True)
    first, *others = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"waiting for stage 4 \(0 samplers\): .* \(at most 1 min 40 s, see --wait-limit\); start a sampler",
        first,
    )
    assert others and not [line for line in others if "start a sampler" in line]


def test_a_side_that_hangs_but_gives_signs_of_life_is_not_waited_for_for_ever():
    wait = Waiting(10.0, longest_s=0.2)
    with pytest.raises(ConfigError, match=r"for a policy; the other side .* hang; stop it, and start it"):
        for sign in range(15):
            wait.pause("a policy", sign, lambda: "start it")
    wait.restart()
    wait.pause("a policy", 0, lambda: "start it")  # a new wait has the whole time again
