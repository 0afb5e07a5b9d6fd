"""No device ever holds more than its shard of the model, except for arrays that the plan lists as copies.

Every program that makes or moves arrays of the model's size is in the planner's list. The tests compile this
list for eight simulated devices, and for TPU slices where libtpu is installed.
"""

import functools
import importlib.util
import math

import jax
import numpy as np
import pytest

from mugrpo_jax import config as configs
from mugrpo_jax import models, training
from mugrpo_jax.models.io.known_shapes import KNOWN_SHAPES
from mugrpo_jax.planning import find_topology, plan_run
from mugrpo_jax.planning.chips import topology_mesh
from mugrpo_jax.planning.program_list import programs_of
from mugrpo_jax.planning.programs import compile_program
from mugrpo_jax.setup.devices import copy_on_host, loading_mesh
from mugrpo_jax.setup.run_setup import RunSetup
from mugrpo_jax.training import state as training_state

# Deep and with a small vocabulary, so that one layer or the embedding is far less than the model.
MODEL = models.ModelConfig(
    vocab_size=48,
    hidden_size=64,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=24,
    intermediate_size=208,
    tie_embeddings=False,
)
SETTINGS = [
    *("model.remat=full", "model.compute_dtype=float32", "model.sampling_dtype=float32"),
    *("sampling.max_prompt_tokens=16", "sampling.max_response_tokens=16", "sampling.slots=8"),
    *("batch.tokens_per_micro_batch=256", "batch.length_multiple=32", "warm_start.updates=1"),
]
# A proximal policy, and a reference policy of about the size of `MODEL`.
FROZEN = ("objective.name=decoupled_ppo", "objective.knobs.kl_coef=0.1", "model.tiny.hidden_size=64")
KINDS = ("load", "state", "warm-start", "restore", "stage", "prepare", "cast", "send", "export")


def planned(*mesh):
    config = configs.load(None, [*SETTINGS, *mesh])
    return plan_run(config, MODEL, topology_mesh(config, find_topology("cpu:8")))


def complaints(run, topology, kinds, most=0.6):
    """Compile the planner's list; describe whole outputs, and temporaries of `most` of a float32 model."""
    model = run.model
    vectors = model.num_layers * max(model.hidden_size, model.num_heads * model.head_dim)
    found, seen = [], set()
    for program in programs_of(run, topology.host_devices()):
        if program.kind not in kinds:
            continue
        seen.add(program.kind)
        compiled = compile_program(program, topology)
        for name, shape, shard in compiled.shards:
            if math.prod(shape) > vectors and math.prod(shape) < program.parts * math.prod(shard):
                found.append(f"{program.name}: {name} {shape} has shards of {shard}")
        if compiled.temporaries > most * 4 * model.num_params or not compiled.fits(topology.chip):
            found.append(f"{program.name}: {compiled.temporaries} of {compiled.peak} bytes are temporaries")
        if program.parts == 1 and program.kind != "export" and "every device holds whole" not in str(run):
            found.append(f"{program.name}: whole arrays, and the plan does not say it")
    assert seen == set(kinds)
    return found


@pytest.mark.parametrize(
    "mesh",
    [
        ("mesh.fsdp=8", "mesh.sampling_tensor=2", *FROZEN),
        ("mesh.fsdp=4", "mesh.tensor=2", "mesh.sampling_tensor=1"),
    ],
    ids=["fsdp, frozen policies", "fsdp and tensor"],
)
def test_no_program_gives_a_device_more_than_its_shard(mesh):
    run = planned(*mesh)
    kinds = (*KINDS, "proximal") if set(FROZEN) <= set(mesh) else KINDS
    assert not complaints(run, find_topology("cpu:8"), kinds)
    # Updates and the sampler are compiled in `test_planning`, which checks their outputs.
    others = {"update", "optimizer", "prefill", "decode"} | ({"reference"} if kinds != KINDS else set())
    assert {program.kind for program in programs_of(run)} == {*kinds, *others}
    whole = "every device holds whole: while sampling, all weights in float32, " in str(run)
    assert whole == ("mesh.sampling_tensor=1" in mesh)


def test_a_state_born_whole_is_noticed(monkeypatch):
    def careless(optimizer, mesh, model, **fields):
        return jax.jit(functools.partial(training_state._init_state, optimizer, **fields))

    monkeypatch.setattr(training, "state_maker", careless)
    found = complaints(planned("mesh.fsdp=8"), find_topology("cpu:8"), ("state",))
    assert any("state: .opt_state" in text for text in found)
    assert any("state: .previous" in text for text in found)


def test_what_a_run_makes_is_sharded_from_the_start():
    """The arrays that exist after each step of a run: none is whole on a device, except the small vectors."""
    config = configs.load(None, [*SETTINGS, "mesh.fsdp=4", "mesh.tensor=2", "mesh.sampling_tensor=2"])
    mesh = models.make_mesh(fsdp=4, tensor=2)
    before = {id(array) for array in jax.live_arrays()}
    model, params = models.create(MODEL, mesh=mesh)
    optimizer = training.make_optimizer(config.optimizer, config.total_updates, model)
    state = training.make_state(params, optimizer, mesh, model, track_drift=True)
    assert params["embed"].is_deleted()  # the state has its memory
    first = state.anchor
    state = training.start_stage(state)
    assert first["embed"].is_deleted() and not state.params["embed"].is_deleted()
    np.testing.assert_array_equal(state.anchor["embed"], state.params["embed"])
    setup = RunSetup(config, model, models.CharTokenizer("ab"), mesh)
    copy = copy_on_host(model, state.params, setup.sampler_plan, mesh)
    vectors = MODEL.num_layers * MODEL.num_heads * MODEL.head_dim
    made = [array for array in jax.live_arrays() if id(array) not in before and array.size > vectors]
    assert len(made) > 3 * len(jax.tree.leaves(params)) + MODEL.num_layers
    sizes = {array.size // math.prod(array.sharding.shard_shape(array.shape)) for array in made}
    assert sizes == {8, 2}  # the state, and the sampler's copy
    del copy


def test_weights_are_split_even_if_the_devices_do_not_divide_the_width():
    assert dict(loading_mesh(MODEL).shape) == {"data": 1, "fsdp": 8, "tensor": 1}
    narrow = models.ModelConfig(8, 12, 1, 2, 2, 6, 16)
    assert dict(loading_mesh(narrow).shape) == {"data": 2, "fsdp": 4, "tensor": 1}


# -- TPU


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu (x86-64 Linux)")
@pytest.mark.parametrize("name", ["v5e:8x8", "v5p:2x2x4"])
def test_a_7b_model_starts_on_a_slice_without_a_whole_copy(name):
    topology = find_topology(name)
    devices = len(topology.devices)
    split = min(4, len(topology.host_devices()))
    config = configs.load(
        None,
        [
            *("model.source=Qwen/Qwen2.5-Math-7B", "sampling.max_prompt_tokens=512"),
            *("sampling.max_response_tokens=512", f"sampling.slots={8 * split}", "objective.name=grpo"),
            *(f"mesh.fsdp={devices // 2}", "mesh.tensor=2", f"mesh.sampling_tensor={split}"),
        ],
    )
    model = KNOWN_SHAPES[config.model.source]
    run = plan_run(config, model, topology_mesh(config, topology), device_memory=topology.chip.usable_memory)
    kinds = ("load", "state", "restore", "stage", "prepare", "cast", "send", "export")
    assert not complaints(run, topology, kinds, most=0.25)
