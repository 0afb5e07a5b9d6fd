"""Write the scored responses of a stage to disk, and read them back as batches for the updates."""

from mugrpo_jax.rollouts.micro_batches import Buckets as Buckets
from mugrpo_jax.rollouts.micro_batches import MicroBatch as MicroBatch
from mugrpo_jax.rollouts.micro_batches import Shape as Shape
from mugrpo_jax.rollouts.micro_batches import abstract_micro_batch as abstract_micro_batch
from mugrpo_jax.rollouts.micro_batches import plan_buckets as plan_buckets
from mugrpo_jax.rollouts.record_files import DamagedRollouts as DamagedRollouts
from mugrpo_jax.rollouts.record_files import RolloutError as RolloutError
from mugrpo_jax.rollouts.records import Group as Group
from mugrpo_jax.rollouts.records import Rollout as Rollout
from mugrpo_jax.rollouts.records import decode as decode
from mugrpo_jax.rollouts.records import encode as encode
from mugrpo_jax.rollouts.reference_folder import ReferenceFolder as ReferenceFolder
from mugrpo_jax.rollouts.rollout_folder import RolloutFolder as RolloutFolder
from mugrpo_jax.rollouts.rollout_folder import open_stage as open_stage
from mugrpo_jax.rollouts.rollout_folder import read_groups as read_groups
from mugrpo_jax.rollouts.summaries import summarise as summarise
from mugrpo_jax.rollouts.update_stream import Update as Update
from mugrpo_jax.rollouts.update_stream import UpdateStream as UpdateStream
from mugrpo_jax.rollouts.update_stream import abstract_update as abstract_update
from mugrpo_jax.rollouts.update_stream import make_update as make_update
from mugrpo_jax.rollouts.update_stream import shaped_rewards as shaped_rewards
