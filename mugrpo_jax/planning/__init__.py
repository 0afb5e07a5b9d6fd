"""Plan a run before it starts: compute its sizes and memory, and check whether it fits on given devices."""

from mugrpo_jax.planning.call_time import Assumptions as Assumptions
from mugrpo_jax.planning.chips import CHIPS as CHIPS
from mugrpo_jax.planning.chips import Chip as Chip
from mugrpo_jax.planning.chips import Topology as Topology
from mugrpo_jax.planning.chips import find_topology as find_topology
from mugrpo_jax.planning.compile_run import check_memory as check_memory
from mugrpo_jax.planning.compile_run import compile_plan as compile_plan
from mugrpo_jax.planning.compile_run import fitting_config as fitting_config
from mugrpo_jax.planning.compiled_plan import CompiledPlan as CompiledPlan
from mugrpo_jax.planning.make_plan import plan_run as plan_run
from mugrpo_jax.planning.program_list import check_loss as check_loss
from mugrpo_jax.planning.run_memory import Memory as Memory
from mugrpo_jax.planning.run_plan import RunPlan as RunPlan
