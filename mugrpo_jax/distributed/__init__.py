"""Several hosts as one run: connect the hosts, let them agree, and end them together."""

from mugrpo_jax.distributed.absence import GONE as GONE
from mugrpo_jax.distributed.absence import Absent as Absent
from mugrpo_jax.distributed.host_agreement import Vote as Vote
from mugrpo_jax.distributed.host_agreement import check_same as check_same
from mugrpo_jax.distributed.host_agreement import gather as gather
from mugrpo_jax.distributed.host_agreement import reached as reached
from mugrpo_jax.distributed.host_agreement import share as share
from mugrpo_jax.distributed.host_agreement import together as together
from mugrpo_jax.distributed.host_link import at_end as at_end
from mugrpo_jax.distributed.host_link import end_process as end_process
from mugrpo_jax.distributed.launch import Stopped as Stopped
from mugrpo_jax.distributed.launch import hosts as hosts
