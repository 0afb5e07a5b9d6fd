"""What a stage generated, on disk, and the way back from there to update batches."""

from mugrpo_jax.rollouts.micro_batches import Buckets as Buckets
from mugrpo_jax.rollouts.micro_batches import MicroBatch as MicroBatch
from mugrpo_jax.rollouts.micro_batches import Shape as Shape
from mugrpo_jax.rollouts.micro_batches import Update as Update
from mugrpo_jax.rollouts.micro_batches import UpdateStream as UpdateStream
from mugrpo_jax.rollouts.micro_batches import abstract_micro_batch as abstract_micro_batch
from mugrpo_jax.rollouts.micro_batches import make_update as make_update
from mugrpo_jax.rollouts.micro_batches import plan_buckets as plan_buckets
from mugrpo_jax.rollouts.micro_batches import shaped_rewards as shaped_rewards
from mugrpo_jax.rollouts.records import Group as Group
from mugrpo_jax.rollouts.records import Rollout as Rollout
from mugrpo_jax.rollouts.records import decode as decode
from mugrpo_jax.rollouts.records import encode as encode
from mugrpo_jax.rollouts.store import RolloutError as RolloutError
from mugrpo_jax.rollouts.store import Stage as Stage
from mugrpo_jax.rollouts.store import open_stage as open_stage
from mugrpo_jax.rollouts.store import read_groups as read_groups
from mugrpo_jax.rollouts.store import summarise as summarise
