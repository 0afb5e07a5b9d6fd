"""The policy: decoders in Flax NNX, checkpoints in and out, log-probs without logits, sharding."""

from mugrpo_jax.models.attention import attention as attention
from mugrpo_jax.models.cache import Cache as Cache
from mugrpo_jax.models.cache import cache_bytes as cache_bytes
from mugrpo_jax.models.cache import decode_params as decode_params
from mugrpo_jax.models.cache import decode_step as decode_step
from mugrpo_jax.models.cache import empty_cache as empty_cache
from mugrpo_jax.models.cache import prefill as prefill
from mugrpo_jax.models.config import ModelConfig as ModelConfig
from mugrpo_jax.models.config import RopeScaling as RopeScaling
from mugrpo_jax.models.decoder import Decoder as Decoder
from mugrpo_jax.models.decoder import abstract as abstract
from mugrpo_jax.models.decoder import cast as cast
from mugrpo_jax.models.decoder import create as create
from mugrpo_jax.models.decoder import hidden_states as hidden_states
from mugrpo_jax.models.decoder import logits as logits
from mugrpo_jax.models.loading import LoadedModel as LoadedModel
from mugrpo_jax.models.loading import load_model as load_model
from mugrpo_jax.models.loading import tiny_model as tiny_model
from mugrpo_jax.models.logprobs import logprobs_from_hidden as logprobs_from_hidden
from mugrpo_jax.models.logprobs import token_logprobs as token_logprobs
from mugrpo_jax.models.sharding import check_mesh as check_mesh
from mugrpo_jax.models.sharding import make_mesh as make_mesh
from mugrpo_jax.models.sharding import param_sharding as param_sharding
from mugrpo_jax.models.tokenizer import CharTokenizer as CharTokenizer
from mugrpo_jax.models.tokenizer import Tokenizer as Tokenizer
from mugrpo_jax.models.tokenizer import load_tokenizer as load_tokenizer
