"""What a run will do and need before anything is allocated: from its config, or compiled for devices."""

from mugrpo_jax.planning.run import Memory as Memory
from mugrpo_jax.planning.run import RunPlan as RunPlan
from mugrpo_jax.planning.run import plan_run as plan_run
