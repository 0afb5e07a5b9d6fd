"""The sampling loop: a stage's worth of rollouts at the speed of the memory."""

from mugrpo_jax.sampling.generate import Settings as Settings
from mugrpo_jax.sampling.generate import generate as generate
from mugrpo_jax.sampling.generate import generate_file as generate_file
from mugrpo_jax.sampling.logits import draw as draw
from mugrpo_jax.sampling.logits import transform_logits as transform_logits
from mugrpo_jax.sampling.plan import SamplerPlan as SamplerPlan
from mugrpo_jax.sampling.plan import plan_sampler as plan_sampler
from mugrpo_jax.sampling.programs import lower_decode as lower_decode
from mugrpo_jax.sampling.requests import Request as Request
from mugrpo_jax.sampling.requests import Response as Response
from mugrpo_jax.sampling.requests import read_ahead as read_ahead
from mugrpo_jax.sampling.requests import request_seeds as request_seeds
from mugrpo_jax.sampling.sampler import Sampler as Sampler
from mugrpo_jax.sampling.sampler import Stats as Stats
