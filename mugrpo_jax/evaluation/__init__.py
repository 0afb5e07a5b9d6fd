"""Measure avg@k and pass@k of a model, with confidence intervals, in runs and in `mugrpo eval`."""

from mugrpo_jax.evaluation.evaluate import Generate as Generate
from mugrpo_jax.evaluation.evaluate import GeneratedResponse as GeneratedResponse
from mugrpo_jax.evaluation.evaluate import WantedResponse as WantedResponse
from mugrpo_jax.evaluation.evaluate import evaluate as evaluate
from mugrpo_jax.evaluation.evaluate import sampled_responses as sampled_responses
from mugrpo_jax.evaluation.evaluate import score_problems as score_problems
from mugrpo_jax.evaluation.results import EvalResult as EvalResult
from mugrpo_jax.evaluation.results import ScoredResponse as ScoredResponse
from mugrpo_jax.evaluation.results import as_table as as_table
from mugrpo_jax.evaluation.results import average_as_json as average_as_json
from mugrpo_jax.evaluation.results import average_results as average_results
from mugrpo_jax.evaluation.results import pack_rows as pack_rows
from mugrpo_jax.evaluation.results import summarise as summarise
from mugrpo_jax.evaluation.results import unpack_rows as unpack_rows
from mugrpo_jax.evaluation.statistics import Estimate as Estimate
from mugrpo_jax.evaluation.statistics import average_at_k as average_at_k
from mugrpo_jax.evaluation.statistics import estimate_average as estimate_average
from mugrpo_jax.evaluation.statistics import estimate_mean as estimate_mean
from mugrpo_jax.evaluation.statistics import majority as majority
from mugrpo_jax.evaluation.statistics import pass_at_k as pass_at_k
from mugrpo_jax.evaluation.statistics import standard_error as standard_error
from mugrpo_jax.evaluation.statistics import wilson as wilson
