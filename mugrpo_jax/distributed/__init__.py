"""Several hosts as one run: how they find each other, agree, and end together."""

from mugrpo_jax.distributed.agree import Vote as Vote
from mugrpo_jax.distributed.agree import check_same as check_same
from mugrpo_jax.distributed.agree import gather as gather
from mugrpo_jax.distributed.agree import together as together
from mugrpo_jax.distributed.launch import Stopped as Stopped
from mugrpo_jax.distributed.launch import hosts as hosts
from mugrpo_jax.distributed.watch import GONE as GONE
from mugrpo_jax.distributed.watch import share as share
