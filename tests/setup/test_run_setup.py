"""From a config to the objects of a run: problems as tokens, devices of the sampler, a run's checkpoints."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mugrpo_jax import config as configs
from mugrpo_jax import models
from mugrpo_jax.config import ConfigError
from mugrpo_jax.setup.devices import copy_on_host, sampling_mesh
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
    np.testing.assert_array_equal(setup.solution_tokens(problem), [*tokens.encode("3"), end])


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


def test_sampling_devices_must_divide_those_of_the_host(setup):
    with pytest.raises(ConfigError, match=r"sampling_tensor: 3 does not divide the 8 devices of a host"):
        sampling_mesh(setup.mesh, 3)


def test_the_sampler_gets_whole_weights_split_over_tensor_alone(setup):
    """Sharded over eight devices for the updates, copied to four pairs for sampling."""
    model, params = models.create(setup.model.config)
    spread = jax.device_put(params, models.param_sharding(setup.mesh, model, params))
    mesh = sampling_mesh(setup.mesh, 2)
    assert dict(mesh.shape) == {"data": 4, "fsdp": 1, "tensor": 2}
    copy = copy_on_host(model, spread, mesh, jnp.bfloat16)
    for found, original in zip(jax.tree.leaves(copy), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(found, original.astype(jnp.bfloat16))
    q = copy["layers"]["q"]
    assert {shard.data.shape for shard in q.addressable_shards} == {(1, 16, 8)}


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
