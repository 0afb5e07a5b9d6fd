"""What a run will do and need before anything is allocated: from its config, or compiled for devices."""

from mugrpo_jax.planning.chips import CHIPS as CHIPS
from mugrpo_jax.planning.chips import Chip as Chip
from mugrpo_jax.planning.chips import Topology as Topology
from mugrpo_jax.planning.chips import find_topology as find_topology
from mugrpo_jax.planning.compiled import CompiledPlan as CompiledPlan
from mugrpo_jax.planning.compiled import check_memory as check_memory
from mugrpo_jax.planning.compiled import compile_plan as compile_plan
from mugrpo_jax.planning.data import describe_data as describe_data
from mugrpo_jax.planning.estimate import Assumptions as Assumptions
from mugrpo_jax.planning.run import Memory as Memory
from mugrpo_jax.planning.run import RunPlan as RunPlan
from mugrpo_jax.planning.run import plan_run as plan_run
