"""Load weights, shape, tokenizer and chat template of a Llama-architecture model from one GGUF file.

The `gguf` package, which needs only NumPy, parses the file. Quantised weights are dequantised when they are
read. llama.cpp stores the rows of query and key matrices in another order, which `_restore_rows` undoes.
"""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from jax.sharding import Mesh

from mugrpo_jax.models.decoder import Decoder
from mugrpo_jax.models.io import huggingface
from mugrpo_jax.models.io.safetensors_file import LazyTensor
from mugrpo_jax.models.model_config import ModelConfig, RopeScaling
from mugrpo_jax.models.rope import frequencies
from mugrpo_jax.models.tokenizer import HFTokenizer, fast_tokenizer
from mugrpo_jax.models.weights import Params

if TYPE_CHECKING:
    import gguf

_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")
_FLOATS = {"F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_ROPE_FACTORS = "rope_freqs.weight"


class GGUFFile:
    """An open GGUF file whose header has been checked; `config` is the shape of the model."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._reader = _open(self.path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self.config = self._read_config()
        for tensor in self._tensors.values():
            if tensor.tensor_type.name not in _TYPES:
                raise ValueError(
                    f"{self.path}: {tensor.name} has type {tensor.tensor_type.name}; "
                    f"supported: {', '.join(_TYPES)}"
                )

    def load(self, *, dtype: Any = None, mesh: Mesh | None = None) -> tuple[Decoder, Params]:
        """Load the weights and return `(model, params)`. `mesh` None puts them on the default device.

        With `dtype` None, the dtype is float16 or bfloat16 if all matrices have it, otherwise float32.
        """
        if dtype is None:
            matrices = {t.tensor_type.name for t in self._tensors.values() if len(t.shape) == 2}
            kind = matrices.pop() if len(matrices) == 1 else "F32"
            dtype = _FLOATS.get(kind, np.dtype(np.float32))
        tensors = {self._hf_name(name): self._tensor(name) for name in self._tensors if name != _ROPE_FACTORS}
        return huggingface.params_from_tensors(
            self.config, tensors, source=str(self.path), dtype=dtype, mesh=mesh
        )

    def tokenizer(self) -> HFTokenizer:
        """Return the byte-pair tokenizer in the file, with its chat template and end-of-text tokens."""
        kind = self._field("tokenizer.ggml.model")
        if kind != "gpt2":
            raise ValueError(
                f"{self.path}: tokenizer model {kind!r} is not supported; supported: 'gpt2' (BPE)"
            )
        tokens: list[str] = self._field("tokenizer.ggml.tokens")
        ids = {
            role: self._number(f"tokenizer.ggml.{key}_token_id")
            for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("turn", "eot"))
            if self._has(f"tokenizer.ggml.{key}_token_id")
        }
        if max(ids.values(), default=0) >= len(tokens):
            raise ValueError(
                f"{self.path}: a special token has id {max(ids.values())} of {len(tokens)} tokens"
            )
        backend = self._bpe(tokens)
        if "bos" in ids and self._field("tokenizer.ggml.add_bos_token", False):
            from tokenizers import processors

            bos = tokens[ids["bos"]]
            backend.post_processor = processors.TemplateProcessing(
                single=f"{bos} $A", special_tokens=[(bos, ids["bos"])]
            )
        names = {f"{role}_token": tokens[i] for role, i in ids.items() if role != "turn"}
        fast = fast_tokenizer(backend, **names, chat_template=self._field("tokenizer.chat_template", None))
        # A response ends at `eos` (end of text) and at `eot` (end of turn).
        return HFTokenizer(fast, eos_ids=[ids["turn"]] if "turn" in ids else [], source=str(self.path))

    def _bpe(self, tokens: list[str]) -> Any:
        from tokenizers import AddedToken, Tokenizer, decoders, models

        name = self._field("tokenizer.ggml.pre", "default")
        settings = _pre_tokenizers()
        if name not in settings:
            raise ValueError(
                f"{self.path}: pre-tokenizer {name!r} is not supported; supported: {', '.join(settings)}"
            )
        pre_tokenizer, normalizer, ignore_merges = settings[name]
        merges = [tuple(pair.split(" ", 1)) for pair in self._field("tokenizer.ggml.merges")]
        vocab = {token: i for i, token in enumerate(tokens)}
        try:
            backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=ignore_merges))
        except Exception as error:  # `tokenizers` raises plain Exception
            raise ValueError(f"{self.path}: merges do not fit the tokens ({error})") from None
        backend.pre_tokenizer = pre_tokenizer
        if normalizer is not None:
            backend.normalizer = normalizer
        backend.decoder = decoders.ByteLevel()
        # In llama.cpp, token type 3 means a control token, and 4 means a token that a user added.
        kinds = self._field("tokenizer.ggml.token_type")
        backend.add_tokens(
            [
                AddedToken(token, special=kind == 3, normalized=False)
                for token, kind in zip(tokens, kinds)
                if kind in (3, 4)
            ]
        )
        return backend

    def _has(self, key: str) -> bool:
        return key in self._reader.fields

    def _field(self, key: str, *default: Any) -> Any:
        if not self._has(key):
            if default:
                return default[0]
            raise ValueError(f"{self.path}: metadata key {key} is missing")
        return self._reader.fields[key].contents()

    def _number(self, key: str, *default: Any) -> Any:
        value = self._field(key, *default)
        if not isinstance(value, int | float):
            raise ValueError(
                f"{self.path}: metadata key {key} must be one number for all layers, got {value!r}"
            )
        return value

    def _read_config(self) -> ModelConfig:
        arch = self._field("general.architecture")
        if arch != "llama":
            raise ValueError(f"{self.path}: architecture {arch!r} is not supported; supported: 'llama'")
        if self._number("split.count", 1) > 1:
            raise ValueError(f"{self.path}: is one part of a split file; merge the parts first")
        if self._number("llama.expert_count", 0):
            raise ValueError(f"{self.path}: mixture-of-experts models are not supported")
        scaling = self._field("llama.rope.scaling.type", "none")
        if scaling != "none":
            raise ValueError(f"{self.path}: rope scaling {scaling!r} is not supported")
        if "token_embd.weight" not in self._tensors:
            raise ValueError(f"{self.path}: tensor token_embd.weight is missing")
        width, heads = self._number("llama.embedding_length"), self._number("llama.attention.head_count")
        head_dim = self._number("llama.attention.key_length", width // heads)
        if self._number("llama.rope.dimension_count", head_dim) != head_dim:
            raise ValueError(f"{self.path}: rotating only a part of each head is not supported")
        config = ModelConfig(
            vocab_size=int(self._tensors["token_embd.weight"].shape[-1]),
            hidden_size=width,
            num_layers=self._number("llama.block_count"),
            num_heads=heads,
            num_kv_heads=self._number("llama.attention.head_count_kv", heads),
            head_dim=head_dim,
            intermediate_size=self._number("llama.feed_forward_length"),
            rope_theta=_decimal(self._number("llama.rope.freq_base", 10_000.0)),
            norm_eps=_decimal(self._number("llama.attention.layer_norm_rms_epsilon")),
            tie_embeddings="output.weight" not in self._tensors,
            max_positions=self._number("llama.context_length"),
        )
        return self._with_rope_factors(config) if _ROPE_FACTORS in self._tensors else config

    def _with_rope_factors(self, config: ModelConfig) -> ModelConfig:
        """Add `rope_scaling` to the config. The file has only the resulting factor for each rotated pair."""
        factors = np.asarray(self._tensors[_ROPE_FACTORS].data, np.float32)
        rule = RopeScaling(
            factor=_decimal(factors.max()),
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_positions=self._number("llama.rope.scaling.original_context_length", 8192),
        )
        scaled = dataclasses.replace(config, rope_scaling=rule)
        expected = frequencies(config) / frequencies(scaled)
        if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
            raise ValueError(f"{self.path}: {_ROPE_FACTORS} is not Llama 3's scaling of rotary frequencies")
        return scaled

    def _hf_name(self, name: str) -> str:
        if name in _TOP_NAMES:
            return _TOP_NAMES[name]
        parts = name.split(".", 2)
        if len(parts) == 3 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
            return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}"
        return name  # `params_from_tensors` raises an error about this unknown name

    def _tensor(self, name: str) -> LazyTensor:
        from gguf.quants import dequantize

        tensor = self._tensors[name]
        heads = {"attn_q.weight": self.config.num_heads, "attn_k.weight": self.config.num_kv_heads}.get(
            name.split(".", 2)[-1]
        )

        def read() -> np.ndarray:
            array = dequantize(tensor.data, tensor.tensor_type)
            return array if heads is None else _restore_rows(array, heads)

        return LazyTensor(str(self.path), tuple(map(int, reversed(tensor.shape))), np.dtype(np.float32), read)


def _open(path: Path) -> "gguf.GGUFReader":
    if not path.is_file():
        raise ValueError(f"{path}: not found")
    try:
        import gguf
    except ImportError:
        raise ValueError(f"{path}: GGUF files need the package gguf; install mugrpo-jax[gguf]") from None

    class Reader(gguf.GGUFReader):
        """Raise ValueError at the end of a truncated file. The base class would loop over empty arrays."""

        def _get(self, offset: int, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
            if offset + np.dtype(dtype).itemsize * int(count) > len(self.data):
                raise ValueError(f"data is needed beyond its {len(self.data)} bytes")
            if isinstance(self.data, np.memmap):  # slicing a plain array is faster
                self.data = self.data.view(np.ndarray)  # type: ignore[assignment]  # declared a memmap
            return super()._get(offset, dtype, count, override_order)

    try:
        return Reader(path)
    except (ValueError, KeyError, IndexError, TypeError, OverflowError) as error:
        raise ValueError(f"{path}: truncated, corrupt or not a GGUF file ({error})") from None


def _decimal(value: Any) -> float:
    """Return the shortest decimal number that rounds to this float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _restore_rows(array: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's row order in a query or key matrix `[out, in]`. In llama.cpp, rows 2i and 2i + 1 of a
    head are a RoPE pair. In the result, a pair is row i of the first half and row i of the second half."""
    rows, columns = array.shape
    return array.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _pre_tokenizers() -> dict[str, tuple[Any, Any, bool]]:
    """Map llama.cpp's pre-tokenizer names to `(pre_tokenizer, normalizer, ignore_merges)`."""
    from tokenizers import Regex, normalizers
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    def split(*patterns: str) -> Any:
        cuts = [Split(Regex(pattern), "isolated") for pattern in patterns]
        return Sequence([*cuts, ByteLevel(add_prefix_space=False, use_regex=False)])

    gpt2 = ByteLevel(add_prefix_space=False, use_regex=True)
    gpt2_words = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    rest = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    llama3 = (split(words + r"\p{N}{1,3}" + rest), None, True)
    return {
        "smollm": (Sequence([Digits(individual_digits=True), gpt2]), None, False),
        "llama-bpe": llama3,
        "llama3": llama3,
        "qwen2": (split(words + r"\p{N}" + rest), normalizers.NFC(), False),
        "gpt-2": (gpt2, None, False),
        "default": (split(r"[\p{P}\$\+<=>\^~\|]+", gpt2_words, r"\p{N}+", "[0-9][0-9][0-9]"), None, False),
    }
