"""The config of a tiny run, on which scripts and tests that damage or kill runs try what must always hold."""

TINY_MODEL = """
model:
  source: tiny
  tiny: {hidden_size: 16, num_layers: 1, num_heads: 2, num_kv_heads: 1, intermediate_size: 24}
  compute_dtype: float32
  sampling_dtype: float32
  remat: none
"""
TINY_RUN = (
    TINY_MODEL
    + """\
task: {name: arithmetic, options: {difficulty: 1, train: 64, test: 6}, scorers: 0}
sampling: {max_prompt_tokens: 8, max_response_tokens: 12, slots: 8, prompts_per_shard: 4}
batch: {prompts_per_update: 2, responses_per_prompt: 4, updates_per_stage: 6, stages: 2,
        tokens_per_micro_batch: 128, length_multiple: 16}
optimizer: {learning_rate: 1.0e-3}
warm_start: {updates: 4, rows_per_update: 8}
evaluation: {problems: 6, every: 3}
checkpoints: {every: 2, keep_last: 3}
"""
)
UPDATES = 12
