"""Programs compile for TPU slices on a machine without one, with splash attention inside.

By default a narrow model, and a whole one in test_tpu_7b.py; `pytest -m slow` compiles configs/targets.
"""

import importlib.util
import re
from pathlib import Path

import pytest

from mugrpo_jax import config as configs
from mugrpo_jax import models
from mugrpo_jax.planning import compile_plan, find_topology, plan_run
from mugrpo_jax.planning.chips import topology_mesh
from mugrpo_jax.planning.program_cost import HloProgram
from mugrpo_jax.planning.program_list import programs_of
from mugrpo_jax.planning.programs import _compile

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="needs libtpu, which exists for x86-64 Linux",
    ),
]

TARGETS = sorted((Path(__file__).parents[2] / "configs" / "targets").glob("*.yaml"))
NARROW = models.ModelConfig(
    vocab_size=2048,
    hidden_size=512,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=128,
    intermediate_size=1024,
    tie_embeddings=False,
    qkv_bias=True,
)
CONFIG = configs.build(
    configs.RunConfig,
    {
        "model": {"remat": "full"},
        "sampling": {"max_prompt_tokens": 256, "max_response_tokens": 256, "slots": 16},
        "batch": {"tokens_per_micro_batch": 4096},
        "objective": {"name": "grpo"},
        "mesh": {"fsdp": 2, "tensor": 2, "sampling_tensor": 2},
    },
    "test",
)


@pytest.fixture(scope="module", params=["v5e:2x2", pytest.param("v5p:2x2x1", marks=pytest.mark.slow)])
def compiled(request, hurried_tpu_compiler):
    """Every program of a run on four chips: its memory and its text."""
    topology = find_topology(request.param)
    run = plan_run(CONFIG, NARROW, topology_mesh(CONFIG, topology), device_memory=topology.chip.memory)
    wanted = [program for program in programs_of(run) if program.kind in ("update", "decode", "prefill")]
    with hurried_tpu_compiler():
        return {program.kind: _compile(program.lower(), topology) for program in wanted}


@pytest.mark.parametrize("name", ["v5e:2x2", pytest.param("v5p:2x2x1", marks=pytest.mark.slow)])
def test_some_chips_of_a_host_only_sample_while_the_others_train(name, hurried_tpu_compiler):
    config = configs.changed(CONFIG, ["mesh.sampling_devices=2", "mesh.fsdp=1", "batch.lag=1"])
    with hurried_tpu_compiler():
        plan = compile_plan(config, name, propose=False)
    assert plan.fits, plan.verdict
    decode, apart = plan.program("decode"), plan.program("apart: decode")
    assert apart.peak < decode.peak and plan.program("update").cost.collectives
    estimate = plan.estimate()
    assert estimate.overlap and estimate.hours == max(estimate.generate_hours, estimate.update_hours)
    with pytest.raises(configs.ConfigError, match=r"mesh\.sampling_devices: only on one host"):
        compile_plan(config, "v5e:4x4", propose=False)


def test_an_update_has_splash_attention_and_the_flops_of_its_matrices(compiled):
    program, text = compiled["update"]
    assert "splash" in text
    matrices = NARROW.num_params - NARROW.vocab_size * NARROW.hidden_size  # the embedding is looked up
    passes = 8 * matrices * 4096 / 4  # forward, forward again, and twice backward
    heads = NARROW.num_heads * NARROW.head_dim
    # 11 products over a band that is as wide as the longest row, 512 tokens, and a block of 256 tokens.
    attention = NARROW.num_layers * 11 * 2 * heads * (512 + 256) * 4096 / 4
    assert HloProgram(text, 4).cost().flops == pytest.approx(passes + attention, rel=0.15)
    # The gradient is added up in place.
    assert program.memory_analysis().alias_size_in_bytes >= 4 * matrices / 4


def test_decoding_updates_its_cache_in_place_and_reads_it_once(compiled):
    program, text = compiled["decode"]
    cache = models.cache_bytes(NARROW, 16, 512) / 4
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= cache
    assert memory.temp_size_in_bytes < cache
    cost = HloProgram(text, 4).cost()
    weights = 2 * NARROW.num_params / 2
    assert cost.flops == pytest.approx(
        (2 * (NARROW.num_params - NARROW.vocab_size * NARROW.hidden_size) * 16 / 4)
        + NARROW.num_layers * 4 * 512 * 512 * 16 / 4,
        rel=0.1,
    )
    assert cost.bytes < 4 * (weights + cache)


def test_prefill_has_splash_attention_and_no_weights_travel(compiled):
    _, text = compiled["prefill"]
    assert "splash" in text
    gathered = [e for e in HloProgram(text, 4).cost().collectives if e.kind == "all-gather"]
    smallest = NARROW.hidden_size * NARROW.num_kv_heads * NARROW.head_dim
    assert all(shape.size < smallest for exchange in gathered for shape in exchange.result)


@pytest.mark.slow
@pytest.mark.parametrize("path", TARGETS, ids=lambda path: path.stem)
def test_a_target_fits_by_its_own_plan(path):
    found = re.search(r"--topology (\S+)", path.read_text())
    plan = compile_plan(configs.load(path), found[1], propose=False)
    assert plan.fits, str(plan)
    assert plan.estimate().hours > 0
