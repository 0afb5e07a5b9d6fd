"""The training loop: µ-GRPO from top to bottom in `stages`, and one file per phase."""

from mugrpo_jax.loop.stages import train as train
from mugrpo_jax.loop.stages import warm_start as warm_start
