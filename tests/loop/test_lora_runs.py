"""Claims about runs with LoRA: they resume exactly, keep only adapters, and export what they trained."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from tiny_run import TINY_RUN

from mugrpo_jax import config as configs
from mugrpo_jax import models
from mugrpo_jax.cli.main import main
from mugrpo_jax.config import ConfigError
from mugrpo_jax.loop import replay, stages
from mugrpo_jax.models.io import safetensors_file
from mugrpo_jax.planning import plan_run
from mugrpo_jax.setup.devices import loading_mesh
from mugrpo_jax.setup.initial_model import run_model_shape
from mugrpo_jax.setup.lora import abstract_run_base, load_base, loaded_dtype
from mugrpo_jax.setup.run_setup import load_run_model
from mugrpo_jax.setup.trained_model import trained_model, trained_params

TARGETS = Path(__file__).parents[2] / "configs" / "targets"
CHANGES = {
    "lora": {"rank": 4, "alpha": 8, "base_dtype": "bfloat16", "targets": ["q_proj", "down_proj"]},
    "objective": {"name": "mu_grpo", "knobs": {"kl_coef": 0.1}},
    "task": {"name": "arithmetic", "options": {"difficulty": 1, "train": 64, "test": 4}, "scorers": 0},
    "warm_start": {"updates": 0},
    "evaluation": {"problems": 0},
    "checkpoints": {"every": 1, "keep_last": 9},
    "report": {"samples": 0},
}


@pytest.fixture(scope="module")
def config(program_folder):
    raw = yaml.safe_load(TINY_RUN) | CHANGES
    raw["task"]["reward"] = "lora_reward:short"
    raw["batch"] |= {"updates_per_stage": 2, "stages": 2, "length_multiple": 32}
    raw["optimizer"] = {"learning_rate": 0.02}
    (program_folder / "run.yaml").write_text(yaml.safe_dump(raw))
    return configs.load(program_folder / "run.yaml", [])


@pytest.fixture(scope="module")
def run(program_folder, config):
    with pytest.MonkeyPatch.context() as patch:
        (program_folder / "lora_reward.py").write_text("def short(text, problem): return 1 / (1 + len(text))")
        patch.syspath_prepend(program_folder)
        folder = stages.train(config, program_folder / "run")
        shutil.copytree(folder, program_folder / "whole")
        yield folder


def parameters(folder, config, step=4):
    return jax.device_get(trained_params(folder, step, config, jnp.float32, None))


def test_a_run_resumes_exactly_from_its_adapters(run, config):
    stages.train(config, run, back_to=1)
    again, before = parameters(run, config), parameters(run.parent / "whole", config)
    jax.tree.map(np.testing.assert_array_equal, again, before)
    assert again.keys() == {"layers"} and again["layers"].keys() == {"q", "down"}
    assert np.abs(again["layers"]["q"]["b"]).mean() > 0.01  # it was trained


def test_sampler_and_reference_see_the_policy_of_the_updates(run):
    """The sampler has merged weights, updates have adapters, and the reference policy is the base alone."""
    lines = (run.parent / "whole" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    updates = [record for record in records if record["kind"] == "update"]
    first, _, third, _ = updates
    assert max(first["gap_max"], third["gap_max"]) < 1e-5
    assert abs(first["reference_kl/tokens"]) < 1e-6 < 1e-3 < third["reference_kl/tokens"]


def test_the_merged_model_and_the_adapter_folder_are_what_was_trained(run, config, tmp_path):
    adapters = parameters(run, config)
    assert main(["export", str(run), str(tmp_path / "adapter"), "--adapter"]) == 0
    tensors = safetensors_file.tensors_in_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(tensors) == 4
    parts = {
        part: tensors[f"base_model.model.model.layers.0.mlp.down_proj.lora_{part}.weight"].read()
        for part in "AB"
    }
    np.testing.assert_array_equal(parts["A"], adapters["layers"]["down"]["a"][0].T)
    about = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (about["r"], about["lora_alpha"], about["target_modules"]) == (4, 8, ["down_proj", "q_proj"])
    merged = trained_model(run, 4, mesh=loading_mesh).params  # what `mugrpo export` writes without --adapter
    mesh = loading_mesh(run_model_shape(config))
    base = np.asarray(load_base(config, mesh).params["layers"]["down"], np.float32)[0]
    wanted = base + (2 * parts["B"] @ parts["A"]).T
    assert merged["layers"]["down"].dtype == jnp.bfloat16 and np.abs(wanted - base).max() > 0.01
    np.testing.assert_allclose(np.asarray(merged["layers"]["down"], np.float32)[0], wanted, rtol=2**-8)


def test_frozen_weights_are_loaded_as_they_are_planned(config):
    mesh, decoder = models.make_mesh(data=4, fsdp=2), models.Decoder(run_model_shape(config))
    int8, float32 = (configs.changed(config, [f"lora.base_dtype={name}"]) for name in ("int8", "float32"))
    found, planned = load_base(int8, mesh).params, abstract_run_base(int8, decoder, mesh)
    for leaf, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(planned), strict=True):
        assert (leaf.shape, leaf.dtype) == (wanted.shape, wanted.dtype)
        assert leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim)
    assert found["layers"]["down"]["values"].dtype == jnp.int8
    wide = abstract_run_base(float32, decoder, mesh)
    assert {loaded_dtype(float32)} == {leaf.dtype for leaf in jax.tree.leaves(wide)} == {np.dtype("float32")}


@pytest.mark.parametrize(("name", "devices", "memory"), [("24gb", 1, 23e9), ("v5e_4", 4, 15.3e9)])
def test_a_7b_run_is_planned_on_small_devices(name, devices, memory):
    """Without activations, which only the compiler knows: tests/models/test_tpu.py compiles these configs."""
    config = configs.load(TARGETS / f"qwen2.5_math_7b_lora_{name}.yaml", [])
    mesh = models.make_mesh(fsdp=devices, devices=jax.devices()[:devices])
    plan = plan_run(config, mesh=mesh, device_memory=int(memory))
    assert plan.problem is None
    assert plan.memory.base * devices == pytest.approx(2 * plan.model.num_params, rel=1e-3)
    assert plan.memory.optimizer < 0.4e9
    assert plan.memory.base_sampling == (0 if devices == 1 else plan.memory.base)
    assert "40,370,176 parameters are trained, 0.53%" in str(plan) and plan.checkpoint_bytes < 0.5e9
    full = plan_run(configs.changed(config, ["lora.rank=0"]), mesh=mesh, device_memory=int(memory))
    assert full.problem is not None and "LoRA (lora.rank=16), would help" in full.problem


def test_a_replay_at_another_temperature_computes_the_reference_again(run, config):
    """The weights are those of the reference policy, so the KL is 0, whatever the temperature is."""
    knobs = "objective.knobs={kl_coef: 0.1, aggregation: constant, max_length: %s}"
    change = [f"replay.run={run.parent / 'whole'}", "objective.temperature=0.5"]
    first = {}
    for length in (10, 40):
        folder = run.parent / f"colder-{length}"
        stages.train(configs.changed(config, [*change, knobs % length]), folder)
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        first[length] = next(line for line in lines if line["kind"] == "update")
    assert abs(first[10]["reference_kl/tokens"]) < 1e-6 and (folder / "reference").exists()
    assert first[10]["gap_max"] > 0.01  # the rollouts are warmer
    ratio = first[10]["loss"] / first[40]["loss"]
    assert ratio == pytest.approx(4, rel=1e-4)  # `max_length` is the knob of the objective


def test_settings_that_count_in_a_replay_are_refused(run, config):
    again = configs.changed(config, [f"replay.run={run}", "batch.updates_per_stage=4"])
    again = configs.changed(again, ["batch.prompts_per_update=1"])
    assert replay.rollouts(again).prompts == 4  # stage 0 in smaller updates
    with pytest.raises(ConfigError, match=r"theirs: batch.updates_per_stage \(2 there, 4 here\)"):
        replay.rollouts(configs.changed(again, ["replay.stage=1"]))
    with pytest.raises(ConfigError, match=r"theirs: environment \(None there, {'name': 'calculator'"):
        replay.rollouts(configs.changed(again, ["environment.name=calculator"]))


def test_full_tuning_and_lora_replay_each_other_only_from_the_model(run, config):
    other = configs.changed(config, [f"replay.run={run}", "lora.rank=2"])
    assert replay.rollouts(other).prompts == 4
    assert replay.restore_start(other, None, None) is None
    later = configs.changed(other, ["replay.stage=1"])
    with pytest.raises(ConfigError, match=r"with other settings than theirs: lora.rank \(4 there, 2 here"):
        replay.rollouts(later)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("lora.targets=[q_proj,head]", r"lora.targets\[1\] must be one of q_proj, k_proj, .*, got 'head'"),
        ("lora.targets=q_proj", "lora.targets must be a list, got 'q_proj'"),
        ("lora.targets=[]", "lora.targets: the list is empty; name a matrix, or turn LoRA off with rank 0"),
        ("lora.targets=[q_proj,q_proj]", "lora.targets: q_proj is listed twice"),
        ("lora.rank=17", "lora.rank: rank 17 does not fit q_proj, a matrix of 16 × 16; at most 16"),
    ],
)
def test_adapters_that_cannot_be_are_refused_in_one_line(config, override, message):
    with pytest.raises(ConfigError, match=message):
        load_run_model(configs.changed(config, [override]))


def test_a_run_without_lora_has_no_adapter_to_export(run, tmp_path, capsys):
    text = (run / "config.yaml").read_text()
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "config.yaml").write_text(
        yaml.safe_dump(yaml.safe_load(text) | {"lora": {"rank": 0}})
    )
    shutil.copytree(run / "checkpoints", tmp_path / "plain" / "checkpoints")
    assert main(["export", str(tmp_path / "plain"), str(tmp_path / "out"), "--adapter"]) == 2
    assert "is not the folder of a run with LoRA (lora.rank above 0)" in capsys.readouterr().err
