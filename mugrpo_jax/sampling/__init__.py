"""Sample from a model: a `Sampler` takes requests and yields responses with their log-probs."""

from mugrpo_jax.sampling.compile_ahead import compile_sampler_ahead as compile_sampler_ahead
from mugrpo_jax.sampling.generate_text import generate as generate
from mugrpo_jax.sampling.generate_text import generate_file as generate_file
from mugrpo_jax.sampling.logits import draw as draw
from mugrpo_jax.sampling.logits import transform_logits as transform_logits
from mugrpo_jax.sampling.lowering import lower_decode as lower_decode
from mugrpo_jax.sampling.requests import Request as Request
from mugrpo_jax.sampling.requests import Response as Response
from mugrpo_jax.sampling.requests import SamplingSettings as SamplingSettings
from mugrpo_jax.sampling.requests import encode_prompt as encode_prompt
from mugrpo_jax.sampling.requests import make_request as make_request
from mugrpo_jax.sampling.requests import prompt_text as prompt_text
from mugrpo_jax.sampling.requests import read_ahead as read_ahead
from mugrpo_jax.sampling.requests import request_seeds as request_seeds
from mugrpo_jax.sampling.requests import sampling_settings as sampling_settings
from mugrpo_jax.sampling.sampler import Sampler as Sampler
from mugrpo_jax.sampling.sampler_plan import SamplerPlan as SamplerPlan
from mugrpo_jax.sampling.sampler_plan import plan_for_requests as plan_for_requests
from mugrpo_jax.sampling.sampler_plan import plan_sampler as plan_sampler
from mugrpo_jax.sampling.slot_scheduler import SamplerStats as SamplerStats
from mugrpo_jax.sampling.turns import Dialogue as Dialogue
from mugrpo_jax.sampling.turns import Reply as Reply
from mugrpo_jax.sampling.turns import Turns as Turns
