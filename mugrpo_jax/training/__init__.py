"""Train a model: make the training state and the optimizer, compute updates, and save checkpoints."""

from mugrpo_jax.training.checkpoints import CheckpointStore as CheckpointStore
from mugrpo_jax.training.checkpoints import Cursor as Cursor
from mugrpo_jax.training.checkpoints import checkpoint_folders as checkpoint_folders
from mugrpo_jax.training.checkpoints import newest_cursor as newest_cursor
from mugrpo_jax.training.checksums import damage as damage
from mugrpo_jax.training.compile_ahead import compile_step_ahead as compile_step_ahead
from mugrpo_jax.training.optimizer import learning_rates as learning_rates
from mugrpo_jax.training.optimizer import make_optimizer as make_optimizer
from mugrpo_jax.training.response_scorer import ResponseScorer as ResponseScorer
from mugrpo_jax.training.state import TrainState as TrainState
from mugrpo_jax.training.state import abstract_state as abstract_state
from mugrpo_jax.training.state import anchor_maker as anchor_maker
from mugrpo_jax.training.state import copy_weights as copy_weights
from mugrpo_jax.training.state import make_state as make_state
from mugrpo_jax.training.state import renew_proximal as renew_proximal
from mugrpo_jax.training.state import start_stage as start_stage
from mugrpo_jax.training.state import state_maker as state_maker
from mugrpo_jax.training.state import state_sharding as state_sharding
from mugrpo_jax.training.state import with_proximal as with_proximal
from mugrpo_jax.training.supervised import cross_entropy as cross_entropy
from mugrpo_jax.training.supervised import solution_updates as solution_updates
from mugrpo_jax.training.update_step import StepOptions as StepOptions
from mugrpo_jax.training.update_step import UpdateStep as UpdateStep
