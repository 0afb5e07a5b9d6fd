"""Run programs that a model wrote, isolated from this machine."""

from mugrpo_jax.tasks.sandbox.launch import PROGRAM_STATUSES as PROGRAM_STATUSES
from mugrpo_jax.tasks.sandbox.launch import Limits as Limits
from mugrpo_jax.tasks.sandbox.launch import Outcome as Outcome
from mugrpo_jax.tasks.sandbox.launch import SandboxError as SandboxError
from mugrpo_jax.tasks.sandbox.launch import check_sandbox as check_sandbox
from mugrpo_jax.tasks.sandbox.launch import isolation_mode as isolation_mode
from mugrpo_jax.tasks.sandbox.launch import run_program as run_program
