"""Claims about settings left to `auto`: they follow from shape and memory, and each has its reason."""

import re
import types

import pytest

from mugrpo_jax import config as configs
from mugrpo_jax.models.io.loading import model_shape
from mugrpo_jax.setup import auto_settings
from mugrpo_jax.setup.auto_settings import choose_settings

SMOLLM2, QWEN_7B = "HuggingFaceTB/SmolLM2-135M", "Qwen/Qwen2.5-Math-7B"
TOKENS = "batch.tokens_per_micro_batch"
SHORT = ("sampling.max_prompt_tokens=128", "sampling.max_response_tokens=300")


@pytest.fixture
def chosen(monkeypatch):
    """Choose for devices that are not here; return the chosen values by key, and all choices as text."""

    def choose(source, memory_gb, *overrides, platform="gpu", fsdp=1):
        device = types.SimpleNamespace(platform=platform)
        monkeypatch.setattr(auto_settings, "local_device", lambda mesh: device)
        mesh = types.SimpleNamespace(shape={"data": 1, "fsdp": fsdp, "tensor": 1})
        config = configs.load(None, [f"model.source={source}", *overrides])
        found, choices = choose_settings(config, model_shape(source), mesh, memory=int(memory_gb * 1e9))
        assert not any(configs.value_of(found, key) == configs.AUTO for key in configs.CHOSEN_AT_START)
        return {choice.key: choice.value for choice in choices}, "\n".join(map(str, choices))

    return choose


def test_a_small_model_on_a_large_gpu_is_unrolled_without_remat(chosen):
    values, text = chosen(SMOLLM2, 130, *SHORT, "batch.stages=16")
    assert values["model.scan_layers"] is False
    assert values["model.remat"] == "none"
    assert "model.scan_layers=false: unrolled layers are faster for a small model and a long run" in text
    # 512 responses of 32 + 150 tokens: two micro-batches, of which at most a fifteenth stays empty.
    tokens, mean = values["batch.tokens_per_micro_batch"], 512 * 182
    assert 32_768 <= tokens <= 65_536
    assert 14 / 15 < mean / (2 * tokens) < 1
    assert f"an update has about {mean:,} tokens, which fill 2 of them" in text


def test_the_layers_of_a_short_run_are_scanned(chosen):
    """256 updates of 93,184 tokens, at 6 · 134.5M FLOPs per token: unrolling takes longer than it saves."""
    short = (*SHORT, "batch.stages=1", "batch.updates_per_stage=256")
    values, text = chosen(SMOLLM2, 130, *short)
    assert values["model.scan_layers"] is True
    assert values["model.remat"] == "dots"  # on a GPU, a scan without remat is slower
    assert chosen(SMOLLM2, 130, *short, "model.scan_layers=true")[0]["model.remat"] == "dots"
    assert chosen(SMOLLM2, 130, *short, "model.scan_layers=false")[0]["model.remat"] == "none"
    assert chosen(SMOLLM2, 130, *short, platform="tpu")[0]["model.remat"] == "none"
    assert "a scan over the layers compiles faster; the updates take only about 64 s" in text


def test_less_memory_means_more_remat_and_then_smaller_micro_batches(chosen):
    order = {"none": 0, "dots": 1, "full": 2}
    found = [chosen(SMOLLM2, memory, *SHORT, "batch.stages=16")[0] for memory in (130, 24, 8, 6, 4)]
    remat = [order[values["model.remat"]] for values in found]
    assert remat == sorted(remat)
    assert remat[0] == 0
    assert remat[-1] == 2
    assert all(values["model.scan_layers"] for values in found if values["model.remat"] != "none")
    assert found[-1]["batch.tokens_per_micro_batch"] < found[0]["batch.tokens_per_micro_batch"]


@pytest.mark.parametrize(("platform", "fsdp", "memory"), [("tpu", 16, 91.2), ("gpu", 8, 76.8)])
def test_a_large_model_is_scanned(chosen, platform, fsdp, memory):
    values, text = chosen(QWEN_7B, memory, platform=platform, fsdp=fsdp)
    assert values["model.scan_layers"] is True
    assert "compiles faster" in text
    assert values["batch.tokens_per_micro_batch"] % (128 * fsdp) == 0
    assert values["batch.tokens_per_micro_batch"] >= 4096 * fsdp  # the longest row on every device


def test_lora_leaves_the_memory_of_gradients_and_moments_to_activations(chosen):
    """A 7B model on 80 GB: all weights cannot be trained; frozen, they take 15 GB."""
    full, text = chosen(QWEN_7B, 80)
    assert full["model.remat"] == "full" and "of the 0 GB beside weights and optimizer" in text
    frozen, text = chosen(QWEN_7B, 80, "lora.rank=16")
    assert "of the 44.4 GB beside weights and optimizer" in text
    assert 7 * 4352 < frozen["batch.tokens_per_micro_batch"] <= 65_536
    assert chosen(QWEN_7B, 130, "lora.rank=16")[0]["model.remat"] == "dots"
    assert frozen["batch.tokens_per_micro_batch"] > 3 * full["batch.tokens_per_micro_batch"]
    assert "of the 50.9 GB" in chosen(QWEN_7B, 80, "lora.rank=16", "lora.base_dtype=int8")[1]
    # Two thirds of the FLOPs of 64 s.
    short = (*SHORT, "batch.stages=1", "batch.updates_per_stage=256", "lora.rank=16")
    assert "the updates take only about 43 s" in chosen(SMOLLM2, 130, *short)[1]


def test_the_estimate_counts_shards_drift_and_a_fused_attention(chosen):
    def left(*overrides, **device):
        return float(re.search(r"of the (\S+) GB beside", chosen(QWEN_7B, 400, *overrides, **device)[1])[1])

    params, extra = 7.616e9, 320 - left("track_drift=false")  # 80 % of the memory is used
    assert extra == pytest.approx((4 * 4 + 2 * 2) * params / 1e9 + 3.2, abs=0.6)  # and a chunk of logits
    assert left("track_drift=false") - left("track_drift=true") == pytest.approx(2 * 4 * params / 1e9, abs=1)
    assert 320 - left("track_drift=false", fsdp=4) == pytest.approx((extra - 3.2) / 4 + 3.2, abs=0.6)

    def tokens(*overrides, **device):
        return chosen(QWEN_7B, 100, "lora.rank=16", "model.remat=dots", *overrides, **device)[0][TOKENS]

    fused = tokens()
    assert fused > 1.5 * tokens("model.attention=xla")  # which keeps the scores of all heads
    assert tokens("model.attention=xla") == tokens("model.compute_dtype=bfloat16", platform="other")
    assert tokens("model.compute_dtype=float32") < tokens("model.attention=xla")


def test_a_device_gets_the_longest_row_and_a_cpu_small_micro_batches(chosen):
    values, _ = chosen(SMOLLM2, 130, *SHORT, platform="cpu")
    assert values["model.scan_layers"] is True and values[TOKENS] <= 8192
    longest = 4352  # 4296, rounded up to a multiple of 128
    long = ("sampling.max_prompt_tokens=200", "sampling.max_response_tokens=4096", "model.remat=full")
    assert longest <= chosen(QWEN_7B, 24, *long)[0][TOKENS] <= 1.1 * longest


def test_given_values_are_kept_and_the_others_follow_them(chosen):
    given = ("model.remat=full", "batch.tokens_per_micro_batch=8192")
    values, _ = chosen(SMOLLM2, 130, *SHORT, *given)
    assert values == {"model.scan_layers": True}
    assert chosen(SMOLLM2, 130, *SHORT, *given, "model.scan_layers=false") == ({}, "")
