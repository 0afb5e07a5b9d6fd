"""The run itself: µ-GRPO top to bottom in `stages`, its phases, resuming and replaying."""

from mugrpo_jax.loop.stages import train as train
from mugrpo_jax.loop.stages import warm_start as warm_start
