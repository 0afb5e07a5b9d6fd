"""The training loop. `stages` contains the loop itself; the other modules contain its phases."""

from mugrpo_jax.loop.stages import train as train
from mugrpo_jax.loop.stages import warm_start as warm_start
