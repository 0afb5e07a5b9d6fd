"""What a run will do and need before anything is allocated: from its config, or compiled for devices."""

from mugrpo_jax.planning.chips import CHIPS as CHIPS
from mugrpo_jax.planning.chips import Chip as Chip
from mugrpo_jax.planning.chips import Topology as Topology
from mugrpo_jax.planning.chips import find_topology as find_topology
from mugrpo_jax.planning.compiled_plan import CompiledPlan as CompiledPlan
from mugrpo_jax.planning.compiled_plan import check_memory as check_memory
from mugrpo_jax.planning.compiled_plan import compile_plan as compile_plan
from mugrpo_jax.planning.estimate import Assumptions as Assumptions
from mugrpo_jax.planning.run_plan import Memory as Memory
from mugrpo_jax.planning.run_plan import RunPlan as RunPlan
from mugrpo_jax.planning.run_plan import plan_run as plan_run
