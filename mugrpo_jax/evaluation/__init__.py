"""From weights and problems to avg@k, pass@k and their intervals."""

from mugrpo_jax.evaluation.evaluate import Estimate as Estimate
from mugrpo_jax.evaluation.evaluate import EvalResult as EvalResult
from mugrpo_jax.evaluation.evaluate import Generate as Generate
from mugrpo_jax.evaluation.evaluate import Request as Request
from mugrpo_jax.evaluation.evaluate import Response as Response
from mugrpo_jax.evaluation.evaluate import as_table as as_table
from mugrpo_jax.evaluation.evaluate import average_as_json as average_as_json
from mugrpo_jax.evaluation.evaluate import average_at_k as average_at_k
from mugrpo_jax.evaluation.evaluate import average_results as average_results
from mugrpo_jax.evaluation.evaluate import bootstrap as bootstrap
from mugrpo_jax.evaluation.evaluate import bootstrap_average as bootstrap_average
from mugrpo_jax.evaluation.evaluate import evaluate as evaluate
from mugrpo_jax.evaluation.evaluate import majority as majority
from mugrpo_jax.evaluation.evaluate import pass_at_k as pass_at_k
