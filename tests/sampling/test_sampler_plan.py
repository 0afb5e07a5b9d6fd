"""Sizes are planned from memory, refused in numbers, and compile for TPUs nobody has here."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies

from mugrpo_jax.models import cache_bytes, make_mesh
from mugrpo_jax.models.eight_bits import EIGHT_BITS
from mugrpo_jax.models.io.known_shapes import KNOWN_SHAPES
from mugrpo_jax.models.io.loading import tiny_shape
from mugrpo_jax.models.tokenizer import CharTokenizer
from mugrpo_jax.sampling import Sampler, lower_decode, plan_sampler
from mugrpo_jax.sampling.sampler_plan import _TURN, _doubling, _has_fp8

GB = 10**9
INT8 = EIGHT_BITS["int8"]
QWEN_7B = dataclasses.replace(KNOWN_SHAPES["Qwen/Qwen2.5-Math-7B"], max_positions=32_768)


def test_slots_follow_the_memory():
    plans = [plan_sampler(QWEN_7B, max_prompt=512, max_length=2048, memory=gb * GB) for gb in (17, 20)]
    assert 1 <= plans[0].slots < plans[1].slots
    for plan in plans:
        assert plan.weight_bytes + plan.cache_bytes + plan.work_bytes <= plan.memory
        assert plan.weight_bytes == pytest.approx(2 * 7.616e9, rel=1e-3)
        assert plan.cache_bytes == plan.slots * 2048 * 28 * 2 * 4 * 128 * 2


def test_fewer_slots_at_the_end_where_the_longest_response_takes_long(monkeypatch):
    def sizes(length, shrink=None, **options):
        plan = plan_sampler(
            QWEN_7B, max_prompt=512, max_length=length, slots=256, memory=900 * GB, shrink=shrink, **options
        )
        assert ("(at the end 64, 16)" in str(plan)) == bool(plan.fewer_slots)
        return plan.fewer_slots

    assert sizes(1024) == sizes(16384) == ()  # never on a CPU by itself
    assert sizes(1024, True) == (64, 16) and sizes(1024, True, turns=True) == ()
    gpu = types.SimpleNamespace(platform="gpu", device_kind="an imagined one")
    monkeypatch.setattr(jax, "local_devices", lambda: [gpu])
    assert sizes(1024) == sizes(16384, False) == () and sizes(16384) == (64, 16)


def test_eight_bits_leave_memory_for_more_slots():
    sizes = {"max_prompt": 512, "max_length": 2048, "memory": 17 * GB}
    plain, eight = plan_sampler(QWEN_7B, **sizes), plan_sampler(QWEN_7B, **sizes, matrices=INT8)
    assert eight.slots >= 4 * plain.slots and "bfloat16 with matrices in int8" in str(eight)
    assert eight.weight_bytes == pytest.approx(6.525e9 + 2 * (7.616e9 - 6.525e9), rel=1e-2)
    with pytest.raises(ValueError, match=r"fp8 needs an NVIDIA GPU of .* 8\.9 .*; this is cpu; use int8"):
        plan_sampler(QWEN_7B, **sizes, matrices=EIGHT_BITS["fp8"])


@pytest.mark.parametrize(
    ("platform", "kind", "capability", "has"),
    [("gpu", "NVIDIA H200", "9.0", True), ("gpu", "NVIDIA L4", "8.9", True), ("gpu", "A100", "8.0", False),
     ("gpu", "MI300X", "gfx942", False), ("tpu", "TPU7x", None, True), ("tpu", "TPU v5 lite", None, False)],
)  # fmt: skip
def test_fp8_is_for_devices_that_have_it(platform, kind, capability, has):
    device = types.SimpleNamespace(platform=platform, device_kind=kind)
    if capability is not None:
        device.compute_capability = capability
    assert _has_fp8(device) is has


def test_what_cannot_fit_is_refused_with_the_numbers():
    with pytest.raises(ValueError, match=r"512 slots × 2048 .* of 40 GB free: does not fit; fewer slots"):
        plan_sampler(QWEN_7B, max_prompt=512, max_length=2048, memory=40 * GB, slots=512)
    with pytest.raises(ValueError, match=r"weights 15.2 GB.* of 15 GB free: does not fit; .* tensor axis"):
        plan_sampler(QWEN_7B, max_prompt=512, max_length=2048, memory=15 * GB)


def test_a_mesh_divides_weights_and_cache():
    mesh = make_mesh(data=2, fsdp=1, tensor=4)
    one = plan_sampler(QWEN_7B, max_prompt=512, max_length=1024, slots=64, memory=100 * GB)
    many = plan_sampler(QWEN_7B, max_prompt=512, max_length=1024, slots=64, memory=100 * GB, mesh=mesh)
    assert many.weight_bytes == one.weight_bytes // 4
    assert many.cache_bytes == one.cache_bytes // 8
    with pytest.raises(ValueError, match=r"slots=12 must be a positive multiple of the 8 devices"):
        plan_sampler(QWEN_7B, max_prompt=512, max_length=1024, slots=12, mesh=mesh)


@pytest.mark.parametrize("length", [60, 110, 400, 3000])
def test_a_loop_waits_for_as_many_free_slots_as_cost_least(length):
    plan = plan_sampler(QWEN_7B, max_prompt=8, max_length=4096, slots=512, memory=500 * GB)

    def cost(free):
        return free / 2 / 512 + _TURN * 512 / (free * length)

    assert plan.refill_at(length) == pytest.approx(min(range(1, 65), key=cost), abs=1)
    assert plan.refill_at(1) == 64 and plan.refill_at(10**9) == 1


def test_no_more_slots_than_samples():
    assert plan_sampler(QWEN_7B, max_prompt=8, max_length=16, samples=3, memory=80 * GB).slots == 3


def test_buckets_cover_every_length():
    plan = plan_sampler(QWEN_7B, max_prompt=100, max_length=1000, slots=8, memory=80 * GB)
    assert plan.prompt_buckets == (16, 32, 64, 112)
    assert plan.read_buckets == (1008,)  # on a CPU, where results must not depend on the bucket
    assert _doubling(256, 1008) == (256, 512, 1008)  # on other platforms
    assert plan.cache_length == 1008
    assert "8 slots × 1008 cache entries" in str(plan) and "of 80 GB free" in str(plan)
    small = plan_sampler(tiny_shape(CharTokenizer("01")), max_prompt=8, max_length=16, slots=1, memory=GB)
    assert (
        "sampler: 1 slot × 16 cache" in str(small)
        and "e-" not in str(small)
        and " MB, cache 0." in str(small)
    )


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"max_prompt": 0}, r"max_prompt=0 must be at least 1"),
        ({"max_prompt": 1024}, r"below max_length=1024"),
        ({"max_length": 40_000}, r"tokens exceed the model's 32,768 positions; lower"),
        ({"slots": 0}, r"slots=0 must be a positive multiple"),
    ],
)
def test_bad_sizes_are_named(sizes, message):
    with pytest.raises(ValueError, match=message):
        plan_sampler(QWEN_7B, **{"max_prompt": 512, "max_length": 1024} | sizes)


def compile_for(topology, config, *, matrices=None, cache_dtype=None, **mesh):
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    plan = plan_sampler(
        config,
        max_prompt=512,
        max_length=2048,
        slots=256,
        mesh=make_mesh(devices=devices, **mesh),
        memory=int(15.75 * 2**30),
        matrices=matrices,
        cache_dtype=cache_dtype,
    )
    return plan, lower_decode(plan).compile().memory_analysis()


@pytest.fixture
def several_processes(monkeypatch, hurried_tpu_compiler):
    pytest.importorskip("libtpu", reason="compiling for TPUs needs libtpu")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # compiling needs no chip, so nobody is locked out
    with hurried_tpu_compiler():
        yield


@pytest.mark.parametrize(
    ("topology", "mesh"), [("v5e:4x4", {"data": 4, "tensor": 4}), ("v5p:2x2x2", {"data": 4, "tensor": 2})]
)
@pytest.mark.parametrize("layers", [2, pytest.param(28, marks=pytest.mark.slow)])
def test_decode_compiles_for_tpus_in_place_and_as_large_as_planned(several_processes, topology, mesh, layers):
    plan, memory = compile_for(topology, dataclasses.replace(QWEN_7B, num_layers=layers), **mesh)
    assert memory.alias_size_in_bytes >= plan.cache_bytes  # the cache is updated in place
    assert memory.argument_size_in_bytes == pytest.approx(plan.weight_bytes + plan.cache_bytes, rel=0.01)
    assert memory.temp_size_in_bytes <= max(plan.work_bytes, 0.15 * plan.cache_bytes)


def test_decode_in_int8_compiles_for_tpus_without_a_wide_copy_of_the_weights(several_processes):
    """The conversion of a matrix stays inside the loop over the tokens, so it takes no memory of its own."""
    config = dataclasses.replace(QWEN_7B, num_layers=2)
    plan, memory = compile_for("v5e:4x4", config, matrices=INT8, data=4, tensor=4)
    assert memory.argument_size_in_bytes == pytest.approx(plan.weight_bytes + plan.cache_bytes, rel=0.01)
    assert memory.temp_size_in_bytes <= max(plan.work_bytes, 0.15 * plan.cache_bytes)


@pytest.mark.parametrize(
    ("topology", "mesh"), [("v5e:4x4", {"data": 4, "tensor": 4}), ("v5p:2x2x1", {"data": 4, "tensor": 1})]
)
def test_decode_with_a_cache_in_int8_compiles_for_tpus_without_a_wide_copy_of_it(
    several_processes, topology, mesh
):
    """The scales are not padded, the cache is updated in place, and no layer is converted as a whole."""
    config = dataclasses.replace(QWEN_7B, num_layers=2)
    plan, memory = compile_for(topology, config, cache_dtype=INT8, **mesh)
    assert memory.argument_size_in_bytes == pytest.approx(plan.weight_bytes + plan.cache_bytes, rel=0.01)
    assert memory.alias_size_in_bytes >= plan.cache_bytes
    assert memory.temp_size_in_bytes <= max(plan.work_bytes, 0.15 * plan.cache_bytes)


def test_a_cache_in_int8_takes_half_the_memory():
    """The sizes of 4,096 tokens of a 7B model, as the guide says them."""
    wide, eight = (cache_bytes(QWEN_7B, 1, 4096, dtype) for dtype in ("bfloat16", INT8))
    assert round(wide / 1e6) == 235 and round(eight / 1e6) == 121


def test_a_cache_in_int8_is_refused_where_a_tpu_would_pad_it(several_processes):
    with pytest.raises(
        ValueError, match=r"int8 needs one key-value head .*; here are 2; .*sampling_tensor \(2"
    ):
        compile_for("v5p:2x2x2", QWEN_7B, cache_dtype=INT8, data=4, tensor=2)


def test_a_mesh_of_several_hosts_is_refused(model, plan):
    class Elsewhere:
        is_multi_process = True

    elsewhere = dataclasses.replace(plan(), mesh=Elsewhere())
    with pytest.raises(ValueError, match="sampler: the mesh spans several hosts"):
        Sampler(*model, elsewhere)


def test_half_the_machines_memory_is_planned_with_on_cpu():
    assert jax.default_backend() == "cpu"
    plan = plan_sampler(
        dataclasses.replace(QWEN_7B, num_layers=1), max_prompt=8, max_length=16, dtype=jnp.float32, slots=1
    )
    assert plan.memory > GB
