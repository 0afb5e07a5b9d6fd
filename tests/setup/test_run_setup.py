"""From a config to the objects of a run: problems as tokens, devices of the sampler, a run's checkpoints."""

import dataclasses
import json
import types

import jax
import numpy as np
import pytest

from mugrpo_jax import config as configs
from mugrpo_jax import models
from mugrpo_jax.config import ConfigError
from mugrpo_jax.planning import make_plan
from mugrpo_jax.sampling.sampler_weights import sampling_params
from mugrpo_jax.setup import sampler_record, sizes
from mugrpo_jax.setup.devices import copy_on_host, local_device, sampling_mesh
from mugrpo_jax.setup.reference_policy import check_reference, check_start
from mugrpo_jax.setup.run_setup import load_run_model
from mugrpo_jax.setup.trained_model import checkpoint_step, is_run
from mugrpo_jax.tasks import Problem

TINY = "model.tiny={hidden_size: 16, num_layers: 1, num_heads: 2, num_kv_heads: 2, intermediate_size: 24}"


@pytest.fixture(scope="module")
def setup():
    limits = ["sampling.max_prompt_tokens=6", "sampling.max_response_tokens=5"]
    return load_run_model(configs.load(None, [TINY, *limits, "mesh.fsdp=8"]))[0]


def test_a_prompt_and_a_solution_become_tokens_with_their_ends(setup):
    problem = Problem("p", "1+2=", "3", solution="3")
    tokens, end = setup.tokenizer, min(setup.tokenizer.eos_ids)
    np.testing.assert_array_equal(setup.prompt_tokens(problem), tokens.encode("1+2=", start=True))
    np.testing.assert_array_equal(setup.solution_tokens(problem).tokens, [*tokens.encode("3"), end])


def test_the_shapes_of_an_update_have_at_most_its_rows(setup):
    batch = setup.config.batch
    rows = batch.prompts_per_update * batch.responses_per_prompt
    assert setup.buckets().most_rows == rows
    assert max(shape.rows for shape in setup.buckets().shapes) <= 8 * rows  # of eight devices


def test_the_update_step_counts_abandoned_tokens_as_the_config_says():
    assert sizes.step_options(configs.load("quickstart")).abandoned_ratio == 0.01
    assert (
        sizes.step_options(configs.load("quickstart", ["report.abandoned_ratio=0.5"])).abandoned_ratio == 0.5
    )


@pytest.mark.parametrize(
    ("method", "problem", "message"),
    [
        ("prompt_tokens", Problem("p", "11+22=", "33"), "problem p: its prompt has 7 tokens"),
        (
            "solution_tokens",
            Problem("p", "1=", "1", solution="11111"),
            "p: its solution has 6 tokens",
        ),
        ("solution_tokens", Problem("p", "1=", "1"), "problem p: no worked solution"),
    ],
)
def test_what_does_not_fit_is_refused_by_the_problem(setup, method, problem, message):
    with pytest.raises(ConfigError, match=message):
        getattr(setup, method)(problem)


def test_memory_is_asked_of_a_device_of_this_host(setup, monkeypatch):
    """The first device of a mesh belongs to another host on all hosts but one, and then does not answer."""
    chips = [types.SimpleNamespace(process_index=process, id=i) for i, process in enumerate((1, 1, 0, 0))]
    mesh = types.SimpleNamespace(devices=np.array(chips, object).reshape(1, 4, 1))
    assert local_device(mesh) is chips[2]
    asked = []
    monkeypatch.setattr(make_plan, "local_device", lambda mesh: mesh.devices.flat[3])
    monkeypatch.setattr(make_plan, "free_memory", lambda device: asked.append(device) or 10**9)
    make_plan.plan_run(setup.config, setup.model.config, setup.mesh)
    assert asked == [setup.mesh.devices.flat[3]]


def test_sampling_devices_must_divide_those_of_the_host(setup):
    with pytest.raises(ConfigError, match=r"sampling_tensor: 3 does not divide the 8 devices of a host"):
        sampling_mesh(setup.mesh, 3)


def test_the_cache_has_the_dtype_of_the_config(setup):
    plain = setup.sampler_plan
    assert plain.cache_dtype == plain.dtype and not plain.eight_bit_cache
    changed = configs.changed(setup.config, ["sampling.cache_dtype=int8"])
    rounded = dataclasses.replace(setup, config=changed).sampler_plan
    assert rounded.eight_bit_cache and (rounded.dtype, rounded.matrices) == (plain.dtype, plain.matrices)


def test_a_sampler_has_no_more_slots_than_there_are_responses(setup):
    def slots(prompts, evaluated, *more):
        sizes = [f"batch.prompts_per_update={prompts}", "batch.updates_per_stage=2"]
        keys = [*sizes, "batch.responses_per_prompt=4", f"evaluation.problems={evaluated}", *more]
        changed = configs.changed(setup.config, keys)
        return dataclasses.replace(setup, config=changed).sampler_plan.slots

    assert slots(64, 8) == 128  # 16 on each of 8 CPU devices
    assert slots(2, 8) == 16  # 2 updates of 2 prompts with 4 responses each
    assert slots(2, 8, "evaluation.samples=5") == slots(64, 8, "replay.run=x", "evaluation.samples=5") == 40
    assert slots(1, 0, "replay.run=x") == 8  # one on each device, although nothing is sampled
    assert slots(2, 8, "sampling.slots=64") == 64


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_the_sampler_gets_whole_weights_split_over_tensor_alone(setup, dtype):
    """Sharded over eight devices for the updates, copied to four pairs for sampling."""
    changes = ["mesh.sampling_tensor=2", f"model.sampling_dtype={dtype}"]
    split = dataclasses.replace(setup, config=configs.changed(setup.config, changes))
    plan = split.sampler_plan
    assert dict(plan.mesh.shape) == {"data": 4, "fsdp": 1, "tensor": 2}
    model, spread = models.create(setup.model.config, mesh=setup.mesh)
    copy = copy_on_host(model, spread, plan, setup.mesh)
    expected = sampling_params(models.create(model.config)[1], **plan.layout)
    for found, original in zip(jax.tree.leaves(copy), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(found, original)
    q, o = copy["layers"][0]["q"], copy["layers"][0]["o"]
    if dtype == "int8":
        assert q.values.dtype == np.int8
        assert {shard.data.shape for shard in q.scales.addressable_shards} == {(1, 8)}
        assert {shard.data.shape for shard in o.scales.addressable_shards} == {(1, 16)}
        q, o = q.values, o.values
    assert {shard.data.shape for shard in q.addressable_shards} == {(16, 8)}
    assert {shard.data.shape for shard in o.addressable_shards} == {(8, 16)}


def test_planned_slots_are_kept_although_the_free_memory_changes(setup, tmp_path, monkeypatch, capsys):
    file = tmp_path / "sampler.json"

    def planned(memory, *changes):
        monkeypatch.setattr("mugrpo_jax.sampling.sampler_plan.free_memory", lambda device: memory)
        config = configs.changed(setup.config, changes)
        return dataclasses.replace(setup, config=config, sampler_file=file).sampler_plan.slots

    plan = sizes.sampler_plan(setup.config, setup.model.config, setup.mesh, slots=32)
    needed = plan.weight_bytes + plan.cache_bytes + plan.work_bytes
    assert planned(int(1.2 * needed)) == 32 == json.loads(file.read_text())["slots"]
    assert planned(10**9) == planned(needed) == 32  # much more memory, and hardly enough
    assert capsys.readouterr().out == ""
    assert planned(needed - 1) == 16  # does not fit any more
    said = capsys.readouterr().out
    assert f"{file}: 32 slots are not kept, now 16: " in said and "does not fit" in said
    assert planned(10**9) == 16
    assert planned(10**9, "mesh.sampling_tensor=2") == 64  # other devices: planned again, and recorded
    assert "the sampler was planned for kind cpu, per host 8, mesh.sampling_tensor 1, here" in (
        capsys.readouterr().out
    )
    file.write_text("{")
    with pytest.raises(ConfigError, match=r"sampler.json: not the record of a sampler; remove it"):
        planned(10**9)
    assert planned(10**9, "sampling.slots=16") == 16  # a number in the config needs no record


def test_samplers_that_start_together_have_the_same_slots(setup, tmp_path, monkeypatch):
    """The second one has more free memory, and looks for the record before the first one has written it."""
    file, create = tmp_path / "slots.json", sampler_record.create

    def planned(memory):
        monkeypatch.setattr("mugrpo_jax.sampling.sampler_plan.free_memory", lambda device: memory)
        return dataclasses.replace(setup, sampler_file=file).sampler_plan.slots

    def slower(path, content):
        monkeypatch.setattr(sampler_record, "create", create)
        assert planned(needed) == 64
        return create(path, content)

    plan = sizes.sampler_plan(setup.config, setup.model.config, setup.mesh, slots=64)
    needed = int(1.2 * (plan.weight_bytes + plan.cache_bytes + plan.work_bytes))
    monkeypatch.setattr(sampler_record, "create", slower)
    assert planned(2 * needed) == 64
    assert json.loads(file.read_text())["slots"] == 64
    file.write_bytes(b"")  # its writer was killed, on a disk without links
    assert planned(needed) == 64 == json.loads(file.read_text())["slots"]


def test_a_folder_without_a_run_or_a_checkpoint_is_named(tmp_path):
    assert not is_run(tmp_path)
    with pytest.raises(ConfigError, match=f"{tmp_path}: no checkpoint yet"):
        checkpoint_step(tmp_path)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("tiny", "reference.source: tiny has random weights"),
        ("no-such-model", "reference.source: model 'no-such-model': not found"),
        ("Qwen/Qwen2.5-1.5B", r"has a vocabulary of 151936 tokens, the run's model one of \d+; name a model"),
    ],
)
def test_a_reference_policy_that_cannot_score_the_responses_is_refused(setup, source, message):
    changes = [f"reference.source={source}", "objective.knobs={kl_coef: 0.1}"]
    config = configs.changed(setup.config, changes)
    with pytest.raises(ConfigError, match=message):
        check_reference(config, setup.mesh)
    check_reference(configs.changed(config, ["objective.knobs={}"]), setup.mesh)  # nobody needs it


def test_a_lost_warm_start_is_named_before_it_is_needed(setup, tmp_path):
    check_start(setup.config, tmp_path)
    with pytest.raises(
        ConfigError, match=f"{tmp_path}/warm_start: the weights after the warm start are gone"
    ):
        check_start(configs.changed(setup.config, ["warm_start.updates=3"]), tmp_path)
