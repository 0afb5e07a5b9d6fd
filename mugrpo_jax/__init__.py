"""µ-GRPO for JAX: reinforcement learning for language models on very stale rollouts."""

__version__ = "0.1.0"
