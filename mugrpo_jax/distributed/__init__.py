"""Several hosts as one run: how they find each other, what they agree on, and how they end together."""

from mugrpo_jax.distributed.launch import GONE as GONE
from mugrpo_jax.distributed.launch import Stopped as Stopped
from mugrpo_jax.distributed.launch import Vote as Vote
from mugrpo_jax.distributed.launch import check_same as check_same
from mugrpo_jax.distributed.launch import gather as gather
from mugrpo_jax.distributed.launch import hosts as hosts
from mugrpo_jax.distributed.launch import share as share
from mugrpo_jax.distributed.launch import together as together
