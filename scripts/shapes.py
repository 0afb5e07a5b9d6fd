"""The model shapes that the benchmarks measure, with random weights."""

from mugrpo_jax.models.io.known_shapes import KNOWN_SHAPES

QWEN_1_5B = KNOWN_SHAPES["Qwen/Qwen2.5-1.5B"]
SMOLLM2_135M = KNOWN_SHAPES["HuggingFaceTB/SmolLM2-135M"]
