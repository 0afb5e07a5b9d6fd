"""Check the collectives of an update, in the program compiled for eight simulated devices.

A wrong sharding still computes the right numbers; it only costs time and memory. Other tests do not see it.
"""

import functools

import jax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mugrpo_jax import config as configs
from mugrpo_jax import models
from mugrpo_jax.models import logprobs
from mugrpo_jax.planning import programs as planned
from mugrpo_jax.planning.program_cost import HloProgram
from mugrpo_jax.rollouts import Shape
from mugrpo_jax.training import state as training_state
from mugrpo_jax.training import update_step as training_step

# All sizes are different, so that the shape of an array identifies it.
MODEL = models.ModelConfig(
    vocab_size=560,
    hidden_size=64,
    num_layers=5,
    num_heads=4,
    num_kv_heads=2,
    head_dim=24,
    intermediate_size=208,
    tie_embeddings=False,
)
SHAPE = Shape(rows=16, length=32, tokens=256)
CONFIG = configs.build(
    configs.RunConfig,
    {
        "model": {"compute_dtype": "float32", "remat": "full"},
        "objective": {"name": "grpo"},
    },
    "test",
)
MESHES = {"fsdp": {"fsdp": 8}, "all": {"data": 2, "fsdp": 2, "tensor": 2}}


@pytest.fixture(autouse=True)
def several_chunks_of_logits(monkeypatch):
    monkeypatch.setattr(logprobs, "CHUNK_LOGITS", 8 * MODEL.vocab_size)


def exchanges(mesh, part):
    """All collectives of the gradient of a micro-batch, or of the optimizer's step."""
    programs = planned.UpdatePrograms(CONFIG, MODEL, mesh)
    lowered = (
        programs.accumulate(SHAPE, mesh.shape["data"] * mesh.shape["fsdp"])
        if part == "gradient"
        else programs.apply()
    )
    return HloProgram(lowered.compile().as_text(), mesh.size).cost().collectives


def complaints(found, mesh):
    """Describe the collectives that a gradient should not need."""
    fsdp, tensor = mesh.shape["fsdp"], mesh.shape["tensor"]
    vocabulary = {MODEL.vocab_size, MODEL.vocab_size // tensor}
    widths = {MODEL.hidden_size, MODEL.hidden_size // fsdp}
    layer = MODEL.hidden_size * MODEL.intermediate_size // tensor
    out = []
    for exchange in found:
        for shape in exchange.result:
            dims = {d for d in shape.dims if d > 1}
            what = f"{exchange.count} × {exchange.kind} of {shape.dims}"
            if dims & vocabulary and len(dims) > 1 and not dims & widths:
                out.append(f"logits: {what}")
            elif dims & vocabulary and len(dims) > 1 and exchange.count > 1:
                out.append(f"embedding or head in every chunk: {what}")
            elif not dims & vocabulary and shape.size > layer:
                out.append(f"more than a layer: {what}")
    return out


@pytest.fixture(scope="module", params=MESHES)
def mesh(request):
    return models.make_mesh(**MESHES[request.param])


@pytest.fixture(scope="module")
def sharded():
    return models.make_mesh(**MESHES["fsdp"])


def test_a_gradient_moves_weights_layer_by_layer_and_the_head_once(mesh):
    found = exchanges(mesh, "gradient")
    assert not complaints(found, mesh)
    rows = MODEL.vocab_size // mesh.shape["tensor"]
    # Gate and up are gathered per layer: in the forward pass, in its recomputation, and for the gradient.
    gate = (MODEL.hidden_size, MODEL.intermediate_size // mesh.shape["tensor"])
    gathers = [e for e in found if e.kind == "all-gather" and e.result[0].dims == gate]
    assert {e.count for e in gathers} == {MODEL.num_layers} and 4 <= len(gathers) <= 6
    whole = [e for e in found if e.kind == "all-gather" and e.result[0].dims == (rows, MODEL.hidden_size)]
    assert [e.count for e in whole] == [1, 1]  # embedding and head
    part = (rows, MODEL.hidden_size // mesh.shape["fsdp"])
    reduced = [e for e in found if e.kind == "reduce-scatter" and e.result[0].dims == part]
    assert [e.count for e in reduced] == [1]


def test_the_optimizer_exchanges_norms_alone(mesh):
    found = exchanges(mesh, "apply")
    assert found and all(shape.size == 1 for exchange in found for shape in exchange.result)


def test_logits_left_to_the_partitioner_are_noticed(sharded, monkeypatch):
    def plain(local, **_):
        return functools.partial(local, sharded=False)

    monkeypatch.setattr(logprobs, "_over_mesh", plain)
    assert complaints(exchanges(sharded, "gradient"), sharded)


def test_a_model_gathered_before_its_layers_is_noticed(sharded, monkeypatch):
    right = training_step.token_logprobs

    def whole(model, params, *arguments, **options):
        return right(model, jax.lax.with_sharding_constraint(params, P()), *arguments, **options)

    monkeypatch.setattr(training_step, "token_logprobs", whole)
    found = complaints(exchanges(sharded, "gradient"), sharded)
    assert any(text.startswith("more than a layer") for text in found)


def test_optimizer_state_on_every_device_is_noticed(sharded, monkeypatch):
    right = training_state.state_sharding

    def replicated(mesh, model, state):
        shardings = right(mesh, model, state)
        everywhere = jax.tree.map(lambda _: NamedSharding(mesh, P()), shardings.opt_state)
        return type(state)(**{**vars(shardings), "opt_state": everywhere})

    monkeypatch.setattr(training_state, "state_sharding", replicated)
    monkeypatch.setattr(training_step, "state_sharding", replicated)
    found = exchanges(sharded, "apply")
    assert any(shape.size > 1 for exchange in found for shape in exchange.result)
