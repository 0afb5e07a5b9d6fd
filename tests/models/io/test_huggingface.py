"""Hugging Face folders: what goes in comes out, and what is broken is refused before anything is read."""

import contextlib
import dataclasses
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny_checkpoints as tiny

from mugrpo_jax.models import decoder, make_mesh, model_config
from mugrpo_jax.models.io import huggingface as hf
from mugrpo_jax.models.io import huggingface_export as hf_export
from mugrpo_jax.models.io import safetensors_file
from mugrpo_jax.models.io.loading import load_model
from mugrpo_jax.models.model_config import read_hf
from mugrpo_jax.models.weights import cast, param_sharding


def assert_same(got, wanted):
    """Equal trees, in dtype and in every bit."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted)):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_out_and_in_is_the_identity(family, dtype, tmp_path):
    config = tiny.FAMILIES[family]
    _, params = tiny.write(tmp_path / "a", config, dtype=dtype)
    model, again = hf.load_huggingface(tmp_path / "a")
    assert read_hf(tmp_path / "a") == config
    assert model == decoder.abstract(config)[0]
    assert_same(again, params)


def test_in_and_out_keeps_every_stored_bit_and_every_file(tmp_path):
    config = tiny.FAMILIES["qwen2-untied"]
    tiny.write(tmp_path / "a", config)
    # NaNs, infinities and negative zeros are weights like any other here.
    tensors = hf.tensors_in_folder(tmp_path / "a")
    bits = np.random.default_rng(0).integers(0, 2**16, (64, 32), np.uint16).view(ml_dtypes.bfloat16)
    tensors["lm_head.weight"] = safetensors_file.LazyTensor("", bits.shape, bits.dtype, lambda: bits)
    read = {
        name: safetensors_file.LazyTensor("", t.shape, t.dtype, lambda t=t: np.array(t.read()))
        for name, t in tensors.items()
    }
    safetensors_file.write_tensors(tmp_path / "new", read)
    (tmp_path / "new").rename(tmp_path / "a" / "model.safetensors")
    (tmp_path / "a" / "generation_config.json").write_text('{"eos_token_id": [1, 5],   "x": 1}')

    _, params = hf.load_huggingface(tmp_path / "a")
    hf_export.save_huggingface(params, tmp_path / "b", config=config, source=tmp_path / "a")
    for name, tensor in hf.tensors_in_folder(tmp_path / "a").items():
        again = hf.tensors_in_folder(tmp_path / "b")[name]
        assert again.dtype == tensor.dtype and again.read().tobytes() == tensor.read().tobytes(), name
    texts = {file.name for file in (tmp_path / "a").iterdir()} - {"model.safetensors"}
    assert {"config.json", "generation_config.json", "tokenizer.json", "char_tokenizer.json"} <= texts
    for name in texts:
        assert (tmp_path / "b" / name).read_bytes() == (tmp_path / "a" / name).read_bytes()


def test_matrices_are_transposed_and_layers_keep_their_order(tmp_path):
    config = tiny.FAMILIES["llama-untied"]
    _, params = tiny.write(tmp_path / "a", config, dtype="float32")
    tensors = hf.tensors_in_folder(tmp_path / "a")
    for layer in range(config.num_layers):
        stored = tensors[f"model.layers.{layer}.mlp.down_proj.weight"]
        assert stored.shape == (config.hidden_size, config.intermediate_size)
        np.testing.assert_array_equal(stored.read().T, params["layers"]["down"][layer])
    np.testing.assert_array_equal(tensors["lm_head.weight"].read(), params["head"])


def test_our_files_are_safetensors_and_theirs_are_read(tmp_path):
    from safetensors.numpy import load_file, save_file

    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones((), np.float16)}
    stored = {k: safetensors_file.LazyTensor("", v.shape, v.dtype, lambda v=v: v) for k, v in arrays.items()}
    safetensors_file.write_tensors(tmp_path / "ours", stored)
    theirs = load_file(tmp_path / "ours")
    save_file(arrays, tmp_path / "theirs")
    ours = safetensors_file.tensors_in_file(tmp_path / "theirs")
    for name, array in arrays.items():
        np.testing.assert_array_equal(theirs[name], array)
        np.testing.assert_array_equal(ours[name].read(), array)


def test_shards_with_an_index(tmp_path):
    config = tiny.FAMILIES["qwen3-untied"]
    _, params = tiny.write(tmp_path / "a", config, shard_bytes=20_000)
    files = sorted(file.name for file in (tmp_path / "a").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "a" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2 * config.num_params
    assert max((tmp_path / "a" / file).stat().st_size for file in files) < 25_000
    assert_same(hf.load_huggingface(tmp_path / "a")[1], params)


@pytest.mark.parametrize("shape", [(8, 1, 1), (1, 4, 2), (2, 2, 2), (2, 4, 1)])
def test_sharded_loading_is_loading(shape, tmp_path):
    config = tiny.FAMILIES["qwen2-untied"]
    model, params = tiny.write(tmp_path / "a", config)
    mesh = make_mesh(**dict(zip(("data", "fsdp", "tensor"), shape)))
    _, sharded = hf.load_huggingface(tmp_path / "a", mesh=mesh, dtype="float32")
    assert_same(sharded, cast(params, jnp.float32))
    wanted = param_sharding(mesh, model, params)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, s: a.sharding == s, sharded, wanted)))
    # Saving gathers again, and loaded arrays can be donated.
    hf_export.save_huggingface(sharded, tmp_path / "b", config=config, dtype=jnp.bfloat16)
    assert_same(hf.load_huggingface(tmp_path / "b")[1], params)
    doubled = jax.jit(lambda p: jax.tree.map(lambda x: 2 * x, p), donate_argnums=0)(sharded)
    assert_same(doubled, jax.tree.map(lambda x: 2 * x, cast(params, jnp.float32)))


def test_saving_in_another_dtype_says_so_in_the_config(tmp_path):
    config = tiny.FAMILIES["llama-tied"]
    _, params = tiny.write(tmp_path / "a", config, dtype="float32")
    raw = json.loads((tmp_path / "a" / "config.json").read_text())
    raw["torch_dtype"] = raw.pop("dtype")
    raw["something_else"] = {"kept": [1, 2]}
    (tmp_path / "a" / "config.json").write_text(json.dumps(raw))
    hf_export.save_huggingface(
        params, tmp_path / "b", config=config, source=tmp_path / "a", dtype=jnp.bfloat16
    )
    saved = json.loads((tmp_path / "b" / "config.json").read_text())
    assert saved == raw | {"torch_dtype": "bfloat16"}
    assert_same(hf.load_huggingface(tmp_path / "b")[1], cast(params, jnp.bfloat16))


def test_a_failed_save_leaves_nothing(tmp_path, monkeypatch):
    config = tiny.FAMILIES["llama-tied"]
    _, params = tiny.random_params(config)
    monkeypatch.setattr(
        safetensors_file, "write_tensors", lambda *_: (_ for _ in ()).throw(OSError("disk full"))
    )
    with pytest.raises(OSError, match="disk full"):
        hf_export.save_huggingface(params, tmp_path / "out", config=config)
    assert list(tmp_path.iterdir()) == []


def test_saving_refuses_what_it_would_spoil(tmp_path):
    config, other = tiny.FAMILIES["llama-tied"], tiny.FAMILIES["qwen2-tied"]
    _, params = tiny.write(tmp_path / "a", config)
    with pytest.raises(ValueError, match=r"a: exists already; choose another folder"):
        hf_export.save_huggingface(params, tmp_path / "a", config=config)
    with pytest.raises(ValueError, match=r"do not have the structure that the config describes"):
        hf_export.save_huggingface(params, tmp_path / "b", config=other)
    tiny.write(tmp_path / "other", other)
    with pytest.raises(ValueError, match=r"other/config.json: describes another model"):
        hf_export.save_huggingface(params, tmp_path / "b", config=config, source=tmp_path / "other")
    with pytest.raises(ValueError, match=r"'embed'.* has shape \(64, 16\), the config says \(64, 32\)"):
        hf_export.save_huggingface(
            {**params, "embed": params["embed"][:, :16]}, tmp_path / "b", config=config
        )
    with pytest.raises(
        ValueError, match=r"dtype: .*int8.* is not supported; possible: float32, float16, bfloat16"
    ):
        hf_export.save_huggingface(params, tmp_path / "b", config=config, dtype=jnp.int8)
    assert not (tmp_path / "b").exists()


def test_a_tied_checkpoint_may_repeat_its_head_but_not_change_it(tmp_path):
    _, params = tiny.write(tmp_path / "a", tiny.FAMILIES["qwen3-tied"])
    repeat = rewrite(tmp_path / "a", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}))
    assert_same(hf.load_huggingface(tmp_path / "a")[1], params)
    repeat(lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    with pytest.raises(ValueError, match=r"tie_word_embeddings is on but lm_head.weight differs"):
        hf.load_huggingface(tmp_path / "a")


def rewrite(folder, change, file="model.safetensors"):
    """Apply `change` to the arrays of a file; returns the same for a further change."""
    arrays = {name: np.array(t.read()) for name, t in safetensors_file.tensors_in_file(folder / file).items()}
    change(arrays)
    stored = {k: safetensors_file.LazyTensor("", v.shape, v.dtype, lambda v=v: v) for k, v in arrays.items()}
    safetensors_file.write_tensors(folder / "changed", stored)
    (folder / "changed").rename(folder / file)
    return lambda further: rewrite(folder, further, file)


def drop(name):
    return lambda arrays: arrays.pop(name)


def put(name, array):
    return lambda arrays: arrays.update({name: array})


WRONG_TENSORS = {
    "missing": (drop("model.norm.weight"), r"a: tensor model.norm.weight is missing$"),
    "missing layer": (
        lambda arrays: [arrays.pop(name) for name in list(arrays) if ".layers.2." in name],
        r"a: tensor model.layers.2.\S+ is missing \(and 8 more\)$",
    ),
    "unknown": (
        put("model.layers.0.self_attn.q_proj.bias", np.zeros(32, np.float32)),
        r"a: tensor model.layers.0.self_attn.q_proj.bias has no place in this architecture$",
    ),
    "left over": (
        put("model.layers.3.mlp.up_proj.weight", np.zeros((64, 32), np.float32)),
        r"a: tensor model.layers.3.mlp.up_proj.weight has no place in this architecture$",
    ),
    "shape": (
        put("model.layers.1.mlp.up_proj.weight", np.zeros((32, 64), ml_dtypes.bfloat16)),
        r"safetensors: model.layers.1.mlp.up_proj.weight has shape \[32, 64\], the config says \[64, 32\]$",
    ),
    "mixed dtype": (
        put("model.layers.1.mlp.up_proj.weight", np.zeros((64, 32), np.float16)),
        r"layers.1.mlp.up_proj.weight is float16 but \S+layers.0.mlp.up_proj.weight is bfloat16; .+ needed",
    ),
}


@pytest.mark.parametrize("case", WRONG_TENSORS)
def test_wrong_tensors_are_refused_by_name(case, tmp_path, no_reading):
    change, message = WRONG_TENSORS[case]
    tiny.write(tmp_path / "a", tiny.FAMILIES["llama-untied"])
    rewrite(tmp_path / "a", change)
    no_reading()
    with pytest.raises(ValueError, match=message):
        hf.load_huggingface(tmp_path / "a")


@pytest.fixture
def no_reading(monkeypatch):
    """From the call on, touching weights fails the test: complaints come from headers alone."""

    def forbid():
        monkeypatch.setattr(np, "memmap", lambda *_, **__: pytest.fail("weights were read"))

    return forbid


def header_change(change):
    """Rewrite the JSON header in place (same length) with `change(text) -> text`."""

    def apply(file):
        raw = file.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        text = change(raw[8 : 8 + length].decode()).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])

    return apply


BROKEN_FILES = {
    "cut data": (
        lambda f: f.write_bytes(f.read_bytes()[:-100]),
        r"model.safetensors: truncated: \S+ ends at byte \d+ of \d+$",
    ),
    "cut header": (
        lambda f: f.write_bytes(f.read_bytes()[:100]),
        r"truncated or not a safetensors file \(100 bytes\)$",
    ),
    "empty": (lambda f: f.write_bytes(b""), r"truncated or not a safetensors file \(0 bytes\)$"),
    "other file": (
        lambda f: f.write_bytes(struct.pack("<Q", 8) + b"\x80\x04binary" + bytes(99)),
        r"its header is not JSON",
    ),
    "list header": (header_change(lambda _: "[1]"), r"its header is not a table of tensors"),
    "bad entry": (
        header_change(lambda s: s.replace('"data_offsets"', '"data_offset"', 1)),
        r"header entry of 'model.embed_tokens.weight' is malformed",
    ),
    "negative": (
        header_change(lambda s: s.replace('"shape": [64, 32]', '"shape": [-64, -32]', 1)),
        r"header entry of 'model.embed_tokens.weight' is malformed",
    ),
    "byte count": (
        header_change(lambda s: s.replace('"shape": [64, 32]', '"shape": [64, 31]', 1)),
        r"model.embed_tokens.weight has 4096 bytes, which is not its shape \[64, 31\] in BF16",
    ),
    "dtype": (
        header_change(lambda s: s.replace('"BF16"', '"F8_E4M3"', 1)),
        r"model.embed_tokens.weight has dtype F8_E4M3; supported: F32, F16, BF16$",
    ),
}


@pytest.mark.parametrize("case", BROKEN_FILES)
def test_broken_files_are_refused_in_one_line(case, tmp_path, no_reading):
    damage, message = BROKEN_FILES[case]
    tiny.write(tmp_path / "a", tiny.FAMILIES["llama-untied"])
    damage(tmp_path / "a" / "model.safetensors")
    no_reading()
    with pytest.raises(ValueError, match=message) as caught:
        hf.load_huggingface(tmp_path / "a")
    assert "\n" not in str(caught.value)


def test_missing_shards_and_wrong_indices_are_refused(tmp_path, no_reading):
    tiny.write(tmp_path / "a", tiny.FAMILIES["llama-untied"], shard_bytes=25_000)
    index = tmp_path / "a" / "model.safetensors.index.json"
    text = index.read_text()
    no_reading()
    (tmp_path / "a" / "model-00002-of-00003.safetensors").rename(tmp_path / "shard")
    with pytest.raises(
        ValueError, match=r"a: shard model-00002-of-00003.safetensors is missing; .+ 3 shards"
    ):
        hf.load_huggingface(tmp_path / "a")
    (tmp_path / "shard").rename(tmp_path / "a" / "model-00002-of-00003.safetensors")
    index.write_text(text.replace("model.norm.weight", "model.norm.height"))
    with pytest.raises(ValueError, match=r"tensor model.norm.weight is not where model.+index.json says"):
        hf.load_huggingface(tmp_path / "a")
    raw = json.loads(text)
    raw["weight_map"]["extra"] = "model-00001-of-00003.safetensors"
    index.write_text(json.dumps(raw))
    with pytest.raises(
        ValueError, match=r"00001-of-00003.safetensors: tensor extra named by .+ is not in it"
    ):
        hf.load_huggingface(tmp_path / "a")
    raw["weight_map"]["extra"] = "../a/model-00001-of-00003.safetensors"
    index.write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=r"shard ../a/model-00001-of-00003.safetensors is missing"):
        hf.load_huggingface(tmp_path / "a")
    index.write_text("[]")
    with pytest.raises(ValueError, match=r"index.json: not a safetensors index"):
        hf.load_huggingface(tmp_path / "a")


def test_pickles_are_refused_by_name_and_never_opened(tmp_path):
    tiny.write(tmp_path / "a", tiny.FAMILIES["llama-tied"])
    (tmp_path / "a" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"a: no weights found; expected model.safetensors"):
        hf.load_huggingface(tmp_path / "a")
    trap = tmp_path / "a" / "pytorch_model.bin"
    trap.write_bytes(b"cos\nsystem\n(S'touch " + str(tmp_path / "sprung").encode() + b"'\ntR.")
    with pytest.raises(ValueError, match=r"pytorch_model.bin: pickle checkpoints are never opened"):
        hf.load_huggingface(tmp_path / "a")
    assert not (tmp_path / "sprung").exists()
    for source in Path(hf.__file__).parent.glob("*.py"):
        assert "import pickle" not in source.read_text()


def test_a_mesh_that_does_not_divide_and_an_unknown_dtype_are_refused_first(tmp_path, no_reading):
    tiny.write(tmp_path / "a", tiny.FAMILIES["llama-tied"])
    no_reading()
    with pytest.raises(ValueError, match=r"mesh: tensor=8 does not divide the model's num_heads=4"):
        hf.load_huggingface(tmp_path / "a", mesh=make_mesh(tensor=8))
    for wrong in ("int32", "float"):
        with pytest.raises(ValueError, match=rf"dtype: {wrong} is not supported; possible: float32"):
            hf.load_huggingface(tmp_path / "a", dtype=wrong)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "32"}, "hidden_size is '32'; possible: a whole number from 1"),
        ({"hidden_size": 10**12}, "hidden_size is 1000000000000; possible: a whole number from 1"),
        (
            {"num_hidden_layers": 10**9},
            "num_hidden_layers is 1000000000; possible: a whole number from 1 to 4096",
        ),
        ({"num_attention_heads": 0}, "num_attention_heads is 0; possible: a whole number from 1"),
        ({"num_key_value_heads": True}, "num_key_value_heads is True; possible"),
        ({"head_dim": 2.5}, "head_dim is 2.5; possible"),
        ({"vocab_size": None}, "vocab_size is None; possible"),
        ({"max_position_embeddings": "long"}, "max_position_embeddings is 'long'; possible"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'; possible: a finite number above 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; possible: a finite number above 0"),
        ({"rope_theta": [1]}, "rope_theta is [1]; possible: a finite number above 0"),
        ({"rope_scaling": "llama3"}, "rope_scaling is 'llama3'; possible: keys and values"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": "x"}},
            "rope scaling 'llama3' lacks the key 'low_freq_factor'",
        ),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'; possible: true, false"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM'; possible: a list"),
        ({"architectures": [["x"]]}, "architecture ['x'] is not supported"),
    ],
)
def test_a_config_of_wrong_types_is_one_line(changes, message, tmp_path):
    hf_config = model_config.to_hf(tiny.FAMILIES["llama-untied"])
    (tmp_path / "config.json").write_text(json.dumps(hf_config | changes))
    with pytest.raises(ValueError) as error:
        model_config.read_hf(tmp_path)
    assert str(error.value).startswith(f"{tmp_path / 'config.json'}: ") and message in str(error.value)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("[" * 100_000, "its header is not JSON"),
        ({"a": 5}, "header entry of 'a' is malformed"),
        ({"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}, "header entry of 'a' is malformed"),
        ({"a": {"dtype": "F32", "shape": "1", "data_offsets": [0, 4]}}, "header entry of 'a' is malformed"),
        (
            {"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}},
            "header entry of 'a' is malformed",
        ),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": 4}}, "header entry of 'a' is malformed"),
        (
            {
                "a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
                "b": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
            },
            "tensors b and a overlap",
        ),
    ],
)
def test_a_header_of_wrong_types_is_one_line(header, message, tmp_path):
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
    with pytest.raises(ValueError) as error:
        hf.tensors_in_folder(tmp_path)
    assert f"{tmp_path / 'model.safetensors'}: " in str(error.value) and message in str(error.value)


@pytest.mark.parametrize(
    "content", ["[" * 100_000, "5", '{"weight_map": 5}', '{"weight_map": {"a": 5}}', "\x00"]
)
def test_an_index_of_wrong_types_is_one_line(content, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match=r"index.json: not a safetensors index") as error:
        hf.tensors_in_folder(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("sharded", [False, True])
def test_weights_that_are_not_finite_are_named(sharded, tmp_path):
    config = tiny.FAMILIES["llama-tied"]
    _, params = tiny.random_params(config)
    params["layers"]["q"] = params["layers"]["q"].at[1, 2, 3].set(jnp.inf)
    params["norm"] = params["norm"].at[0].set(jnp.nan)
    hf_export.save_huggingface(params, tmp_path / "a", config=config, tokenizer=tiny.TOKENIZER)
    mesh = make_mesh(fsdp=4, tensor=2) if sharded else None
    with pytest.raises(ValueError, match=r"a: tensor model.layers.1.self_attn.q_proj.weight \(and 1 more"):
        load_model(tmp_path / "a", mesh=mesh)


def test_an_export_removes_what_killed_exports_of_this_machine_left(tmp_path, monkeypatch):
    gone = subprocess.Popen(["true"])
    gone.wait()

    def unfinished(process):
        with monkeypatch.context() as patch, contextlib.suppress(BaseException):
            patch.setattr(os, "getpid", lambda: process)
            with hf_export.temporary_folder(tmp_path / "a") as folder:
                (folder / "model.safetensors").touch()
                patch.setattr(shutil, "rmtree", None)  # as if it was killed
                raise KeyboardInterrupt
        return folder

    left = [unfinished(process) for process in (gone.pid, os.getppid())]  # the second one still runs
    with monkeypatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: "another.host")
        elsewhere = unfinished(gone.pid)
    tiny.write(tmp_path / "a", tiny.FAMILIES["llama-tied"])
    assert [folder.exists() for folder in (*left, elsewhere)] == [False, True, True]


MEASURE = """
import sys, jax
from mugrpo_jax.models.io.loading import load_model
from pathlib import Path

def peak():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) * 1024

load_model(sys.argv[1], dtype="float32")       # everything imported, everything warm
before = peak()
params = load_model(sys.argv[2], dtype="float32").params
print(peak() - before, sum(leaf.nbytes for leaf in jax.tree.leaves(params)))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_loading_needs_the_target_and_a_few_tensors_but_no_second_model(tmp_path):
    config = dataclasses.replace(
        tiny.FAMILIES["llama-tied"],
        num_layers=24,
        hidden_size=512,
        intermediate_size=2048,
        num_heads=8,
        num_kv_heads=8,
        head_dim=64,
        vocab_size=2048,
    )
    _, shapes = decoder.abstract(config)
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, ml_dtypes.bfloat16), shapes)
    hf_export.save_huggingface(zeros, tmp_path / "large", config=config, tokenizer=tiny.TOKENIZER)
    tiny.write(tmp_path / "small", tiny.FAMILIES["llama-tied"])
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "small"), str(tmp_path / "large")]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used, target = map(int, output.split())
    largest = 4 * config.hidden_size * config.intermediate_size
    assert target == 4 * config.num_params > 350e6
    # Reading the file whole would add 200 MB, a stacked copy of one kind of matrix 100 MB.
    assert used < target + 4 * largest + 20e6, (used / 1e6, target / 1e6, largest / 1e6)
