"""Plans: known model shapes, the shipped configs, costs of compiled programs, and memory checks."""

import dataclasses
import json
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mugrpo_jax import config as configs
from mugrpo_jax import models
from mugrpo_jax.cli.main import main
from mugrpo_jax.models.io.known_shapes import KNOWN_SHAPES
from mugrpo_jax.models.io.loading import load_model, model_shape, tiny_shape
from mugrpo_jax.models.model_config import from_hf, to_hf
from mugrpo_jax.planning import (
    CHIPS,
    Assumptions,
    check_memory,
    compile_plan,
    compile_run,
    find_topology,
    plan_run,
)
from mugrpo_jax.planning.call_time import call_time
from mugrpo_jax.planning.chips import topology_mesh
from mugrpo_jax.planning.compiled_plan import Estimate
from mugrpo_jax.planning.program_cost import HloProgram
from mugrpo_jax.planning.program_list import programs_of
from mugrpo_jax.planning.programs import UpdatePrograms, compile_program, largest_shapes
from mugrpo_jax.planning.proposal import candidates, nearest_fit
from mugrpo_jax.rollouts import plan_buckets

ROOT = Path(__file__).parents[2]
PAPER = sorted((ROOT / "configs" / "paper").glob("*.yaml"))
TARGETS = sorted((ROOT / "configs" / "targets").glob("*.yaml"))
TINY = {
    "model": {
        "tiny": {
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 2,
            "num_kv_heads": 2,
            "intermediate_size": 64,
        },
        "compute_dtype": "float32",
        "sampling_dtype": "float32",
        "remat": "none",
    },
    "sampling": {"max_prompt_tokens": 16, "max_response_tokens": 16, "slots": 16},
    "batch": {"prompts_per_update": 8, "tokens_per_micro_batch": 512, "length_multiple": 32},
    "objective": {"name": "grpo"},
    "mesh": {"fsdp": 4, "tensor": 2},
}


@pytest.fixture(scope="module")
def config():
    return configs.build(configs.RunConfig, TINY, "test")


@pytest.fixture(scope="module")
def plan(config):
    return compile_plan(config, "cpu:8")


# -- known shapes


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("meta-llama/Llama-3.2-3B-Instruct", 3_212_749_824),
        ("Qwen/Qwen2.5-Math-7B", 7_615_616_512),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", 7_615_616_512),
        ("Qwen/Qwen3-1.7B-Base", 1_720_574_976),
        ("Qwen/Qwen3-8B-Base", 8_190_735_360),
        ("Qwen/Qwen2.5-1.5B", 1_543_714_304),
        ("HuggingFaceTB/SmolLM2-135M", 134_515_008),
    ],
)
def test_known_shapes_have_the_published_number_of_parameters(name, published):
    assert model_shape(name).num_params == published == KNOWN_SHAPES[name].num_params
    leaves = jax.tree.leaves(models.abstract(KNOWN_SHAPES[name])[1])
    assert sum(leaf.size for leaf in leaves) == published


def test_known_shapes_are_what_their_config_files_say():
    assert all(from_hf(to_hf(shape)) == shape for shape in KNOWN_SHAPES.values())


def test_a_local_folder_comes_before_a_known_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "Qwen" / "Qwen3-8B-Base"
    folder.mkdir(parents=True)
    shape = tiny_shape(models.CharTokenizer("abc"))
    (folder / "config.json").write_text(json.dumps(to_hf(shape)))
    assert model_shape("Qwen/Qwen3-8B-Base").num_params == shape.num_params


def test_weights_of_a_hub_name_are_downloaded_and_offline_is_one_line(tmp_path, monkeypatch):
    asked = {}

    def no_network(name, *, allow_patterns):
        asked[name] = allow_patterns
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", no_network)
    with pytest.raises(ValueError, match=r"model 'Qwen/Qwen3-8B-Base': .*Hub.*no route to host") as caught:
        load_model("Qwen/Qwen3-8B-Base")
    assert "\n" not in str(caught.value)
    wanted = asked["Qwen/Qwen3-8B-Base"]
    assert {"config.json", "tokenizer.json", "*.safetensors"} < set(wanted)
    assert not [pattern for pattern in wanted if pattern.endswith((".bin", ".py", ".pt", "*"))]


# -- the shipped configs


def test_the_paper_has_twenty_configs_and_each_plans_dry(capsys):
    assert len(PAPER) == 20
    sources, methods = set(), set()
    for path in PAPER:
        assert main(["train", str(path), "--dry-run"]) == 0, path
        shown = capsys.readouterr().out
        config = configs.load(path)
        sources.add(config.model.source)
        methods.add((config.objective.name, config.batch.updates_per_stage))
        assert config.total_updates == 4096 and "= 4,096 updates" in shown
        header = path.read_text().split("seed:")[0]
        assert "# Published:" in header and "# Assumed" in header and config.model.source in header
    assert sources < set(KNOWN_SHAPES) and len(sources) == 5
    assert methods == {("mu_grpo", 1024), ("grpo", 4), ("grpo", 1024), ("m2po", 1024)}


# -- costs, read from programs


def compiled(function, *shapes, mesh, specs, out):
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs)
    ]
    jitted = jax.jit(function, out_shardings=NamedSharding(mesh, out))
    return HloProgram(jitted.lower(*arguments).compile().as_text(), mesh.size).cost()


def test_loops_count_as_often_as_they_run():
    mesh = models.make_mesh(devices=jax.devices()[:1])

    def scanned(x, weights):
        return jax.lax.scan(lambda x, w: (x @ w, None), x, weights)[0]

    cost = compiled(scanned, (8, 32), (7, 32, 32), mesh=mesh, specs=(P(), P()), out=P())
    assert cost.flops == 7 * 2 * 8 * 32 * 32
    assert cost.collectives == ()
    # Each step reads its own 32 × 32 weights, not the stack.
    assert 7 * 4 * 32 * 32 <= cost.bytes <= 3 * 7 * 4 * (32 * 32 + 2 * 8 * 32)


def test_elements_of_a_tuple_may_be_written_with_a_hash():
    """Newer TPU compilers write `%state#0` where others have a get-tuple-element."""
    text = """HloModule loop

%condition (state: (s32[], f32[8,8])) -> pred[] {
  %limit = s32[] constant(5)
  %state = (s32[], f32[8,8]) parameter(0)
  ROOT %less = pred[] compare(%state#0, %limit), direction=LT
}

%body (state.1: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %one = s32[] constant(1)
  %state.1 = (s32[], f32[8,8]) parameter(0)
  %next = s32[] add(%state.1#0, %one)
  %product = f32[8,8] dot(%state.1#1, %state.1#1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %both = (s32[], f32[8,8]) tuple(%next, %product)
}

ENTRY %main (start: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %start = (s32[], f32[8,8]) parameter(0)
  ROOT %loop = (s32[], f32[8,8]) while(%start), condition=%condition, body=%body
}
"""
    cost = HloProgram(text, 1).cost()
    assert cost.flops == 5 * 2 * 8 * 8 * 8
    matrices = 5 * 3 * 8 * 8 * 4  # two operands and the product of each step, not the whole tuple
    assert matrices <= cost.bytes < matrices + 5 * 4 * 8


def test_a_collective_that_products_overlap_counts_once():
    """TPU compilers hand the arrays of a collective through all fusions that run meanwhile."""
    shard, whole = "f32[1000,8]", "f32[1000,32]"  # the part of a device, and all four parts
    arrays = f"{shard}, {whole}"
    text = f"""HloModule overlap

%started (shard.0: {shard}) -> ({arrays}) {{
  %shard.0 = {shard} parameter(0)
  %whole.0 = {whole} all-gather(%shard.0), channel_id=7, replica_groups={{{{0,1,2,3}}}}, dimensions={{1}}
  ROOT %both.0 = ({arrays}) tuple(%shard.0, %whole.0)
}}

%overlapped (x.1: f32[8,8], shard.1: {shard}, old.1: {whole}) -> (f32[8,8], {arrays}, {whole}) {{
  %x.1 = f32[8,8] parameter(0)
  %shard.1 = {shard} parameter(1)
  %old.1 = {whole} parameter(2)
  %product = f32[8,8] dot(%x.1, %x.1), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  %whole.1 = {whole} all-gather(%shard.1), channel_id=7, replica_groups={{{{0,1,2,3}}}}, dimensions={{1}}
  ROOT %all.1 = (f32[8,8], {arrays}, {whole}) tuple(%product, %shard.1, %old.1, %whole.1)
}}

%condition (state: (s32[], f32[8,8], {arrays})) -> pred[] {{
  %limit = s32[] constant(5)
  %state = (s32[], f32[8,8], {arrays}) parameter(0)
  ROOT %less = pred[] compare(%state#0, %limit), direction=LT
}}

%body (state.1: (s32[], f32[8,8], {arrays})) -> (s32[], f32[8,8], {arrays}) {{
  %one = s32[] constant(1)
  %state.1 = (s32[], f32[8,8], {arrays}) parameter(0)
  %next = s32[] add(%state.1#0, %one)
  %done = (f32[8,8], {arrays}, {whole}) fusion(%state.1#1, %state.1#2, %state.1#3), calls=%overlapped
  ROOT %rest = (s32[], f32[8,8], {arrays}) tuple(%next, %done#0, %done#1, %done#3)
}}

ENTRY %main (zero: s32[], x: f32[8,8], shard: {shard}) -> (s32[], f32[8,8], {arrays}) {{
  %zero = s32[] parameter(0)
  %x = f32[8,8] parameter(1)
  %shard = {shard} parameter(2)
  %start = ({arrays}) fusion(%shard), kind=kCustom, calls=%started
  %first = (s32[], f32[8,8], {arrays}) tuple(%zero, %x, %start#0, %start#1)
  ROOT %loop = (s32[], f32[8,8], {arrays}) while(%first), condition=%condition, body=%body
}}
"""
    cost = HloProgram(text, 4).cost()
    assert cost.flops == 5 * 2 * 8 * 8 * 8
    assert cost.by_kind() == {"all-gather": (1, 3 / 4 * 4 * 1000 * 32)}
    gathered, products = 4 * 1000 * (8 + 32), 5 * 2 * 4 * 8 * 8  # a product reads its one operand once
    assert gathered + products <= cost.bytes < gathered + products + 5 * 4 * 8


def test_a_prefetch_into_the_memory_of_the_core_reads_its_bytes_once():
    """TPU programs read matrices in pieces, ahead of the product; `S(1)` is the memory of the core."""
    text = """HloModule prefetch

%piece (matrix.0: bf16[64,128]) -> bf16[16,128] {
  %matrix.0 = bf16[64,128]{1,0} parameter(0)
  ROOT %rows = bf16[16,128]{1,0:S(1)} slice(%matrix.0), slice={[0:16], [0:128]}
}

ENTRY %main (matrix: bf16[64,128], vector: f32[100]) -> f32[100] {
  %matrix = bf16[64,128]{1,0} parameter(0)
  %vector = f32[100]{0} parameter(1)
  %s = ((bf16[64,128]{1,0}), bf16[16,128]{1,0:S(1)}, s32[]{:S(2)}) async-start(%matrix), calls=%piece
  %part = bf16[16,128]{1,0:S(1)} async-done(%s)
  %near = (f32[100]{0:S(1)}, f32[100]{0}, u32[]{:S(2)}) copy-start(%vector)
  %copied = f32[100]{0:S(1)} copy-done(%near)
  %back = (f32[100]{0}, f32[100]{0:S(1)}, u32[]{:S(2)}) copy-start(%copied)
  ROOT %result = f32[100]{0} copy-done(%back)
}
"""
    assert HloProgram(text, 1).cost().bytes == 2 * 16 * 128 + 4 * 100 + 4 * 100


@pytest.mark.parametrize(("blocks", "products"), [((4, 4), 512 / 2), ((4, 3), 384), ((3, 4), 384)])
def test_a_splash_kernel_computes_half_a_square_or_a_band_of_blocks(blocks, products):
    """Rows of 512 tokens in 4 blocks: all tokens before one, or 3 blocks for each; dkv lists by keys."""
    rows, listed = "bf16[2,512,64]", f"s8[1,{blocks[0]},{blocks[1]}]"
    text = f"""HloModule made

ENTRY %main (q: {rows}, k: {rows}, blocks: {listed}) -> {rows} {{
  %q = {rows} parameter(0)
  %k = {rows} parameter(1)
  %blocks = {listed} parameter(2)
  ROOT %splash_mha_fwd = {rows} custom-call(%q, %k, %k, %blocks), custom_call_target="tpu_custom_call"
}}
"""
    assert HloProgram(text, 1).cost().flops == 2 * 2 * 2 * 512 * 64 * products


def test_a_loop_of_unknown_length_counts_once():
    mesh = models.make_mesh(devices=jax.devices()[:1])

    def until(x, w):
        return jax.lax.while_loop(lambda x: x.sum() < 1e6, lambda x: x @ w, x)

    cost = compiled(until, (8, 32), (32, 32), mesh=mesh, specs=(P(), P()), out=P())
    assert cost.flops == 2 * 8 * 32 * 32


def test_a_loop_that_may_end_early_counts_in_full_if_it_has_one_counter():
    mesh = models.make_mesh(devices=jax.devices()[:1])

    def loop(going):
        def run(x, w):
            step = lambda state: (state[0] + 1, state[1] @ w)  # noqa: E731
            return jax.lax.while_loop(lambda state: going(*state), step, (jnp.int32(0), x))[1]

        return compiled(run, (8, 32), (32, 32), mesh=mesh, specs=(P(), P()), out=P()).flops

    once = 2 * 8 * 32 * 32
    assert loop(lambda i, x: i < 5) == 5 * once
    # The loop can end for another reason, like the decode loop: its cost is that of one step.
    assert loop(lambda i, x: (i < 5) & (x.sum() < 1e-3)) == once
    assert loop(lambda i, x: (jnp.sum(x > 0) < 7) & (i < 5)) == once
    assert loop(lambda i, x: jnp.sum(x > 0) < 7) == once


def test_a_head_that_may_leave_chunks_out_counts_in_full():
    mesh = models.make_mesh(devices=jax.devices()[:1])

    def head(hidden, matrix):
        targets, wanted = jnp.zeros((1, 1024), jnp.int32), hidden[:, :, 0] > 0
        return models.logprobs_from_hidden(hidden, matrix, targets, wanted=wanted, chunk=128)[0]

    cost = compiled(head, (1, 1024, 16), (40, 16), mesh=mesh, specs=(P(), P()), out=P())
    assert cost.flops == 2 * 1024 * 16 * 40


def test_collectives_are_counted_by_kind_size_and_group():
    mesh = models.make_mesh(fsdp=4, tensor=2)
    gather = compiled(lambda x: x, (64, 32), mesh=mesh, specs=(P("fsdp", "tensor"),), out=P(None, "tensor"))
    (found,) = gather.collectives
    assert (found.kind, found.group, found.count) == ("all-gather", 4, 1)
    assert found.sent == 3 / 4 * 4 * 64 * 16 == gather.sent
    product = compiled(
        lambda x, w: x @ w, (8, 32), (32, 16), mesh=mesh, specs=(P(None, "tensor"), P("tensor")), out=P()
    )
    assert product.by_kind() == {"all-reduce": (1, 2 * 1 / 2 * 4 * 8 * 16)}
    assert product.flops == 2 * 8 * 16 * 16


def test_seconds_follow_from_costs_and_peaks():
    mesh = models.make_mesh(devices=jax.devices()[:1])
    cost = compiled(jnp.matmul, (64, 64), (64, 64), mesh=mesh, specs=(P(), P()), out=P())
    time = call_time(cost, CHIPS["h200"], Assumptions(compute=0.5, memory=1.0))
    assert time.compute == 2 * 64**3 / (989e12 * 0.5) and time.link == 0
    assert time.overlapped == max(time.compute, time.memory) and time.added == time.compute + time.memory
    assert call_time(cost, dataclasses.replace(CHIPS["h200"], flops=None), Assumptions()) is None


# -- plans


def test_only_shapes_that_decide_about_memory_are_compiled():
    alike = plan_buckets(1024, 4096, unit=128)
    (found,) = largest_shapes(alike)  # all shapes have as many tokens; this one has the longest rows
    assert (found.length, found.tokens) == (1024, 4096) and len(alike.shapes) > 4
    (padded,) = largest_shapes(plan_buckets(1024, 512, 8, unit=128))  # a row on each of eight devices
    assert (padded.length, padded.tokens) == (1024, 8 * 1024)


def test_a_compiled_plan_tells_what_each_program_needs(plan, config):
    names = [program.name for program in plan.programs]
    assert names == [
        "update 512 tokens in rows of 32",
        "optimizer",
        "prefill 16 × 16",
        "decode 16 slots, 32 entries",
        *("load random weights", "state", "restore", "stage start", "prepare update"),
        *("cast for sampling", "send for sampling", "export of the largest tensor"),
    ]
    update, optimizer, prefill, decode, *others = plan.programs
    weights = plan.run.memory.weights
    state = plan.run.memory.state
    assert 0 <= update.resident - state <= 64 and update.arguments >= 2 * weights and update.temporaries > 0
    assert optimizer.arguments >= state + weights and optimizer.outputs < weights
    assert decode.arguments >= plan.run.sampler.cache_bytes and prefill.resident > decode.resident
    assert plan.fits and plan.peak == max(program.peak for program in plan.programs)
    assert set(update.cost.by_kind()) >= {"all-gather", "all-reduce"} and update.cost.flops > 0
    assert optimizer.cost.flops == 0
    # Forward and backward pass: 6 FLOPs per weight and token, divided over eight devices.
    matrices = plan.run.model.num_params * 6 * 512 / 8
    assert 0.8 * matrices < update.cost.flops < 1.8 * matrices
    assert plan.estimate() is None  # a CPU has no published peak
    load, born, restored, stage, _, _, sent, export = others
    table = 1000  # more than the bytes of a program's tables of outputs
    assert 0 <= load.outputs - weights < table and restored.outputs == update.resident
    # The weights are donated to the state, and the old anchor to the new one.
    assert 0 <= born.peak - state < table and 0 <= stage.peak - state < table
    assert sent.peak > state + plan.run.sampler.weight_bytes and export.peak < update.resident


def test_devices_that_only_sample_have_programs_of_their_own(plan, config):
    keys = ["mesh.sampling_devices=4", "mesh.fsdp=2", "batch.lag=1", "evaluation.top_p=0.9"]
    split = compile_plan(configs.changed(config, keys), "cpu:8")
    training, sampling = list(split.run.mesh.devices.flat), split.run.apart.devices
    assert len(training) == len(sampling) == 4 and not set(training) & set(sampling)
    decode, apart = split.program("decode"), split.program("apart: decode")
    weights = split.run.apart.sampler.weight_bytes
    assert apart.resident < decode.resident and apart.arguments >= weights  # no training state beside it
    assert split.run.apart.loaded >= weights / 4
    names = [program.name for program in split.programs if program.name.startswith("apart")]
    assert names == ["apart: prefill 16 × 16", "apart: decode 16 slots, 32 entries"]
    assert "apart       4 × cpu only sample, 16 slots × 32 cache entries; per device " in str(split)
    assert plan.run.apart is None and "only sample" not in str(plan)
    # Without evaluations, the devices that train need no sampler.
    alone = plan_run(configs.changed(split.run.config, ["evaluation.problems=0"]))
    assert alone.sampler is None and alone.apart is not None and alone.memory.sampler == 0
    with pytest.raises(configs.ConfigError, match=r"sampling_devices: 8 of the 8 devices here leave none"):
        compile_plan(configs.changed(config, ["mesh.sampling_devices=8"]), "cpu:8")


def test_sampling_beside_the_updates_takes_the_time_of_the_longer_side():
    sides = {"generate_hours": 3.0, "update_hours": 1.0, "reference_hours": 1.0}
    rest = {"update": 1.0, "update_tokens": 1.0, "step": 1.0, "decode_tokens": 1.0}
    assert Estimate(**rest, **sides).hours == 5 and Estimate(**rest, **sides, overlap=True).hours == 3


def test_all_programs_of_a_run_keep_the_model_split(plan):
    """The mesh has 8 devices and the sampler a whole copy for each, which the plan says."""
    assert "every device holds whole: while sampling" in str(plan)
    kinds = {program.kind for program in plan.programs}
    assert kinds >= {"update", "optimizer", "prefill", "decode", "load", "state", "restore", "stage", "send"}
    model, few = plan.run.model, {"send": 1, "export": 1, "cast": 4}
    vectors = model.num_layers * max(model.hidden_size, model.num_heads * model.head_dim)
    for program in plan.programs:
        for name, shape, shard in program.shards:
            if math.prod(shape) > vectors:
                split = math.prod(shape) // math.prod(shard)
                assert split >= few.get(program.kind, 8), (program.name, name, shape, shard)


def test_statistics_of_the_update_are_programs_of_the_plan_and_take_time(plan, config):
    m2po = configs.changed(config, ["objective.name=m2po"])
    run = dataclasses.replace(plan.run, config=m2po)
    planned = [program for program in programs_of(run) if program.kind == "statistics"]
    # 64 rows of 32 tokens are four micro-batches of 32 padded rows, so 4 · 32 · 32 log-ratios.
    assert [program.name for program in planned] == [
        "statistics 512 tokens in rows of 32",
        "statistics of 4,096 log-ratios",
    ]
    forward, finish = (compile_program(program, plan.topology) for program in planned)
    update = plan.programs[0]
    assert 0.2 * update.cost.flops < forward.cost.flops < 0.5 * update.cost.flops
    assert forward.peak <= update.peak and finish.cost.flops == 0
    assert set(finish.cost.by_kind()) == {"all-reduce"}  # the buffer stays where it is
    fast = dataclasses.replace(plan, topology=dataclasses.replace(plan.topology, chip=CHIPS["v5e"]))
    longer = dataclasses.replace(fast, run=run, programs=(*plan.programs, forward, finish))
    # An update has 64 rows of 12 tokens on average: two micro-batches.
    added = longer.estimate().update - fast.estimate().update
    assert added == pytest.approx(2 * longer.call_time(forward).overlapped)
    assert "one more forward pass" in str(run) and "forward pass" not in str(plan.run)
    apart = dataclasses.replace(run, config=configs.changed(m2po, ["batch.statistics=micro_batch"]))
    assert not [program for program in programs_of(apart) if program.kind == "statistics"]


def test_a_plan_is_text_and_json(plan):
    shown = str(plan)
    assert "decode 16 slots" in shown and "peak" in shown and "8 × CPU device" in shown
    first, *rest = shown.splitlines()
    assert re.fullmatch(r"FITS: [\d.]+ [kM]B of [\d.]+ GB on each device", first)  # no hours for a CPU
    assert str(plan.run).startswith("FITS without activations: ") and "FITS" not in "".join(rest)
    # Every column of the table is explained.
    header = next(line for line in rest if line.startswith("program ")).split()
    assert [line.split()[0] for line in rest if line.startswith("  ")] == header[1:]
    read = json.loads(plan.as_json())
    assert read["verdict"] == first
    assert read["fits"] is True and read["peak"] == plan.peak and read["mesh"]["tensor"] == 2
    assert [p["name"] for p in read["programs"]] == [p.name for p in plan.programs]
    assert read["programs"][0]["collectives"]["all-gather"]["count"] > 0


def test_times_follow_for_a_chip_with_peaks(plan):
    fast = dataclasses.replace(
        plan, topology=dataclasses.replace(plan.topology, chip=CHIPS["v5e"]), assumed=Assumptions()
    )
    estimate = fast.estimate()
    run = plan.run
    assert estimate.update > 0 and estimate.hours == estimate.generate_hours + estimate.update_hours
    assert estimate.update_hours == pytest.approx(run.updates * estimate.update / 3600)
    assert estimate.decode_tokens == pytest.approx(16 * 0.9 / estimate.step)
    slower = dataclasses.replace(fast, assumed=Assumptions(compute=0.1, memory=0.1, link=0.1)).estimate()
    assert slower.hours > 2 * estimate.hours
    assert "tokens/s" in str(fast) and "90% of the slots" in str(fast)
    assert re.match(r"FITS: [\d.]+ [kM]B of 15.4 GB on each device, about \d+ min\n", str(fast))


def test_what_is_too_large_is_named_with_what_would_fit(plan, monkeypatch):
    update = plan.programs[0]
    small = dataclasses.replace(plan.topology.chip, memory=int(update.peak / 0.96) - 1)
    tight = dataclasses.replace(plan, topology=dataclasses.replace(plan.topology, chip=small))
    assert not tight.fits and tight.too_large == [p for p in plan.programs if p.peak > tight.capacity]
    assert f"TOO LARGE   {update.name}" in str(tight)
    tried = list(candidates(tight))
    assert tried[0][-1] == "model.remat=full" and tried[-3][-2:] == ("mesh.tensor=4", "mesh.fsdp=-1")
    assert any("track_drift=false" in overrides for overrides in tried)
    shown = str(dataclasses.replace(tight, proposal=tried[0]))
    largest = max(tight.too_large, key=lambda program: program.peak)
    assert shown.startswith(f"DOES NOT FIT: {largest.name} takes ")
    assert shown.splitlines()[0].endswith(" on each device; it fits with model.remat=full")
    assert str(tight).splitlines()[0].endswith("; nothing that was tried fits, take more devices")


def test_a_proposal_is_compiled_and_fits(plan):
    # Memory for the state without the drift arrays, but not with them.
    least = max(program.peak for program in plan.programs) - plan.run.memory.drift // 2
    chip = dataclasses.replace(plan.topology.chip, memory=int(least / 0.96))
    tight = dataclasses.replace(plan, topology=dataclasses.replace(plan.topology, chip=chip))
    found = nearest_fit(tight, plan.run.model, progress=False)
    assert not tight.fits and found and found[0].split("=")[0] in ("sampling.slots", "model.remat")


def test_training_refuses_what_does_not_fit_its_own_devices(config, monkeypatch):
    run = plan_run(config)
    everything = compile_run.programs_of
    monkeypatch.setattr(compile_run, "programs_of", lambda run: everything(run)[1:2])
    check_memory(run)
    small = dataclasses.replace(CHIPS["v5e"], memory=10_000)
    monkeypatch.setattr(compile_run, "chip_of", lambda device: small)
    with pytest.raises(configs.ConfigError, match=r"memory: optimizer takes .* of a device's 10 kB; "):
        check_memory(run)
    large = plan_run(config, device_memory=1000)
    assert str(large).startswith("DOES NOT FIT: the training state takes ") and "would help\n" in str(large)
    with pytest.raises(configs.ConfigError, match=r"memory: the training state takes .* 1 kB are free"):
        check_memory(large)


def test_a_host_of_a_larger_slice_samples_as_a_slice_of_its_own():
    pytest.importorskip("libtpu")
    topology = find_topology("v5e:4x4")
    whole = configs.build(configs.RunConfig, TINY | {"mesh": {"fsdp": -1}}, "test")
    run = plan_run(whole, mesh=topology_mesh(whole, topology), device_memory=10**9)
    assert "; each of 4 hosts has such a sampler\n" in str(run)
    assert topology.hosts == 4 and len(topology.host_devices()) == 4
    assert {device.process_index for device in topology.host_devices()} == {0}
    assert not set(topology.host_devices()) & set(topology.devices)
    gpus = find_topology("h100:8")
    assert gpus.hosts == 1 and len(gpus.host_devices()) == 8 and gpus.stand_in == "v5p:2x2x2"
    assert "an estimate" in str(gpus) and gpus.chip.name == "NVIDIA H100 SXM"


# -- bad input


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        (
            "v9:2x2",
            "topology 'v9:2x2': expected KIND:SHAPE with KIND one of v5e, v5p, v6e, gpu, h100, h200, l4, "
            "rtx4090, cpu",
        ),
        ("v5p-32", "v5p-32 counts cores: v5p:2x2x4"),
        ("v5e", "expected KIND:SHAPE"),
        ("v5e:4", "the shape of v5e has 2 positive numbers, as v5e:4x4"),
        ("v5p:4x4", "the shape of v5p has 3 positive numbers, as v5p:2x2x4"),
        ("gpu:many", "the shape of gpu has 1 positive numbers, as gpu:8"),
        ("cpu:0", "the shape of cpu has 1 positive numbers"),
        ("cpu:99", "this process has 8 CPU devices; set XLA_FLAGS=--xla_force_host_platform_device_count=99"),
    ],
)
def test_an_unknown_topology_is_one_line(topology, message):
    with pytest.raises(ValueError) as caught:
        find_topology(topology)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_the_command_refuses_in_one_line(capsys):
    path = str(ROOT / "configs" / "quickstart.yaml")
    for arguments, message in (
        (["--topology", "v9:2x2"], "topology 'v9:2x2': expected KIND:SHAPE"),
        (["--json"], "--json: only a compiled plan has this form; name a --topology"),
    ):
        assert main(["plan", path, *arguments]) == 2
        shown = capsys.readouterr().err
        assert message in shown and shown.count("\n") == 1


def test_a_mesh_that_does_not_multiply_to_the_devices_is_one_line(config):
    wrong = configs.changed(config, ["mesh.fsdp=3", "mesh.tensor=1"])
    with pytest.raises(ValueError, match=r"topology 'cpu:8': mesh: .* does not multiply to the 8 devices"):
        compile_plan(wrong, "cpu:8")
    undivided = configs.changed(config, ["model.tiny.num_kv_heads=1"])
    with pytest.raises(ValueError, match=r"mesh: tensor=2 does not divide the model's num_kv_heads=1"):
        compile_plan(undivided, "cpu:8")


def test_remat_that_was_left_to_us_grows_until_the_compiled_update_fits(config, monkeypatch, capsys):
    config, tried = configs.changed(config, ["model.remat=auto"]), []

    def check(run):
        tried.append(run.config.model.remat)
        if tried[-1] != fits:
            raise configs.ConfigError(
                "memory: update 512 tokens in rows of 32 takes 9 GB of a device's 8 GB; help"
            )

    monkeypatch.setattr(compile_run, "check_memory", check)
    fits = "full"
    found = compile_run.fitting_config(config, plan_run(config))
    assert (found.model.remat, tried) == ("full", ["none", "dots", "full"])
    assert "takes 9 GB of a device's 8 GB; model.remat=dots is tried" in capsys.readouterr().out
    fits = "nothing"
    with pytest.raises(configs.ConfigError, match="memory: update"):
        compile_run.fitting_config(config, plan_run(config))
    tried.clear()
    with pytest.raises(configs.ConfigError):  # the user's own value is not changed
        compile_run.fitting_config(found, plan_run(found))
    assert tried == ["full"]


def test_frozen_policies_are_counted(config):
    proximal = configs.changed(config, ["objective.name=decoupled_ppo"])
    both = configs.changed(proximal, ["objective.knobs={kl_coef: 0.1}", "reference.keep_in_memory=true"])
    plain, one, two = (plan_run(c).memory for c in (config, proximal, both))
    assert (plain.frozen, one.frozen, two.frozen) == (0, plain.weights, 2 * plain.weights)
    assert two.updating - plain.updating == two.generating - plain.generating == two.frozen
    run, frozen = (UpdatePrograms(c, plan_run(c).model, plan_run(c).mesh) for c in (config, both))
    assert "reference" not in {program.kind for program in run.programs()}
    programs, state, weights = {p.kind: p for p in frozen.programs()}, run.state_bytes, plain.weights
    # The policies that a program reads are its arguments, and not beside them.
    expected = {"update": state + weights, "optimizer": weights, "reference": state + weights}
    assert {kind: programs[kind].resident for kind in expected} == expected
    sizes = programs["reference"].lower().compile().memory_analysis()
    assert sizes.argument_size_in_bytes > weights
