"""What momentum does to signal and noise: the power of a sum of steps, and the share of signal in a step.

A step is the exponential average m_t = β·m_{t−1} + (1 − β)·g_t of the gradients g. The average keeps a signal
that all gradients share, and leaves (1 − β)/(1 + β) of the power of independent noise.
"""

import math

import numpy as np

from mugrpo_jax.objectives._checks import check_number


def walk_power(updates: np.ndarray, momentum: float, *, first_stage: bool = False) -> np.ndarray:
    """Return the power (the mean square) of the sum of `updates` steps of pure noise with power 1 each.

    With `first_stage` the average starts empty and is divided by 1 − β^t, as in Adam. The unit is then the
    power of a later step, when the average has filled up.

    >>> walk_power(np.array([1.0, 2.0]), 0.5).tolist()  # two steps: 1 + 1 + 2 · 0.5
    [1.0, 3.0]
    """
    check_number("momentum", momentum)
    if momentum >= 1:
        raise ValueError(f"momentum is {momentum}; possible: a number of at least 0 and below 1")
    rest = 1 - momentum
    if not first_stage:  # the sum of the correlations β^|i − j| over all pairs i, j
        return updates * (1 + momentum) / rest - 2 * momentum * (1 - momentum**updates) / rest**2
    # Expected products of the average and of the sum of the steps so far, for gradients of power 1.
    average, mixed, total, powers = 0.0, 0.0, 0.0, [0.0]
    for update in range(1, math.ceil(updates.max(initial=0)) + 1):
        correction = 1 / (1 - momentum**update)
        average = momentum**2 * average + rest**2
        mixed *= momentum
        total += 2 * correction * mixed + correction**2 * average
        mixed += correction * average
        powers.append(total)
    return np.interp(updates, np.arange(len(powers)), powers) * (1 + momentum) / rest


def step_share(share: float, momentum: float) -> float:
    """Return the share of signal in the power of a step from that in the power of a gradient.

    >>> round(step_share(0.01, 0.9), 3)  # 0.01 / (0.01 + 0.99 / 19)
    0.161
    """
    return share / (share + (1 - share) * (1 - momentum) / (1 + momentum))


def gradient_share(share: float, momentum: float) -> float:
    """Return the share of signal in the power of a gradient from that in the power of a step.

    >>> round(gradient_share(step_share(0.01, 0.9), 0.9), 6)
    0.01
    """
    kept = share * (1 - momentum) / (1 + momentum)
    return kept / (kept + (1 - share))
