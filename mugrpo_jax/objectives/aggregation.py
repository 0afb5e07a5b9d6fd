"""Combine the objectives of all tokens into one loss.

`m` is the mask (1 on response tokens), `L_i` the length of response `i`, and `J` the objective of a token:

    token_mean            (1 / N) Σ_i Σ_t m J             N = Σ m
    seq_mean_token_mean   (1 / n) Σ_i (1 / L_i) Σ_t m J   n = responses with at least one token
    seq_mean_token_sum    (1 / n) Σ_i Σ_t m J
    constant              (1 / (n · L_max)) Σ_i Σ_t m J   L_max = the generation budget, the same for all

The *denominator* is N, n or n · L_max, computed from the whole update. Compute the denominator once with
`denominator`, and pass it to the objective with every micro-batch. Then losses and gradients add up.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from mugrpo_jax.objectives._checks import check_choice, check_number, check_rank

AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant")


def denominator(mask: Any, aggregation: str, *, max_length: int | None = None) -> Any:
    """Return the number by which the sum over tokens is divided.

    Pass the response mask of a whole update, or add up the denominators of its parts. Rows without a response
    token are padding and are not counted. A NumPy mask gives a NumPy scalar, a JAX mask a JAX scalar.

    Args:
      mask: `[B, T]`, non-zero on response tokens.
      aggregation: one of `AGGREGATIONS`.
      max_length: L_max, the maximum number of tokens in a response. `constant` requires it, because the
        width of a padded micro-batch may be smaller. The other aggregations do not use it.

    >>> import numpy as np
    >>> mask = np.array([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    >>> [int(denominator(mask, kind)) for kind in ("token_mean", "seq_mean_token_mean")]
    [4, 2]
    >>> int(denominator(mask, "constant", max_length=100))
    200
    """
    check_choice("aggregation", aggregation, AGGREGATIONS)
    check_rank("mask", mask, 2, "[B, T]")
    mask = mask if hasattr(mask, "dtype") else np.asarray(mask)
    valid = mask.astype(bool)
    if aggregation == "token_mean":
        return valid.sum()
    if aggregation != "constant":
        return valid.any(axis=1).sum()
    if max_length is None:
        raise ValueError("max_length is None; aggregation 'constant' needs the generation budget in tokens")
    check_number("max_length", max_length, strict=True)
    responses = valid.any(axis=1).sum()
    # An integer of JAX has 32 bits, which is too few for the tokens of a large update.
    return (responses.astype(jnp.float32) if isinstance(valid, jax.Array) else responses) * max_length


def token_shares(mask: jax.Array, aggregation: str, *, denominator: ArrayLike) -> jax.Array:
    """Return the factor `[B, T]` by which the objective of each token is multiplied; 0 on padding.

    >>> token_shares(jnp.array([[1, 1], [1, 0]]), "seq_mean_token_mean", denominator=2).tolist()
    [[0.25, 0.25], [0.5, 0.0]]
    """
    check_choice("aggregation", aggregation, AGGREGATIONS)
    check_number("denominator", denominator)
    valid = mask.astype(bool)
    # Without tokens the loss is 0, also if the denominator is 0.
    shares = jnp.where(valid, 1.0 / jnp.asarray(denominator, jnp.float32), 0.0)
    if aggregation == "seq_mean_token_mean":
        shares = shares / jnp.maximum(valid.astype(jnp.float32).sum(axis=1, keepdims=True), 1.0)
    return shares
