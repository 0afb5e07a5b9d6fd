"""The objectives once more, in float64 NumPy: loops over responses and gradients worked out by hand.

Nothing is shared with the package. `reference` returns the loss, its gradient with respect to `logp`, and the
scale of both: the sum of the absolute values of the terms they are made of. A float32 result can be right to
1e-6 of that scale; relative to a difference of large terms it cannot.
"""

import numpy as np


def reference(name, logp, behavior_logp, advantages, mask, *, denominator=None, aggregation, **knobs):
    logp, behavior_logp, advantages = (np.asarray(x, np.float64) for x in (logp, behavior_logp, advantages))
    valid = np.asarray(mask) != 0
    if advantages.ndim == 1:
        advantages = np.repeat(advantages[:, None], logp.shape[1], axis=1)
    arrays = {key: np.asarray(knobs.pop(key), np.float64) for key in PER_TOKEN if knobs.get(key) is not None}
    coefficients = {key: knobs.pop(key, 0.0) for key in ("kl_coef", "entropy_coef")}
    estimator = knobs.pop("kl_estimator", "k3")
    max_length = knobs.pop("max_length", logp.shape[1])

    lengths = valid.sum(axis=1)
    if denominator is None:
        denominator = count(valid, aggregation, max_length)
    log_ratio = np.where(valid, logp - behavior_logp, 0.0)
    statistic = STATISTICS.get(name, lambda *_, **__: None)(log_ratio[valid], advantages[valid], **knobs)

    loss, loss_scale = 0.0, 0.0
    gradient, gradient_scale = np.zeros_like(logp), np.zeros_like(logp)
    for i in np.flatnonzero(lengths):
        at = valid[i]
        share = 1.0 / denominator / (lengths[i] if aggregation == "seq_mean_token_mean" else 1.0)
        own = {key: value[i][at] for key, value in arrays.items()}
        response = Response(logp[i][at], log_ratio[i][at], advantages[i][at], statistic, own)
        value, slope, slope_scale, *precision = METHODS[name](response, **knobs)
        weights = own.get("weights", np.ones(lengths[i]))
        value_scale = precision[0] if precision else np.abs(value)
        parts, part_scales = -weights * value, np.abs(weights) * value_scale
        slopes, slope_scales = -weights * slope, np.abs(weights) * slope_scale
        if name == "gspo" and knobs.get("level", "sequence") == "sequence":  # all tokens move the one ratio
            slopes, slope_scales = np.full(at.sum(), slopes.mean()), np.full(at.sum(), slope_scales.mean())
        if name == "gmpo":  # all tokens move the one ratio, but for those that are clipped
            free = ~gmpo_clipped(response, **knobs)
            slopes, slope_scales = free * slopes.mean(), free * slope_scales.mean() + 1e-30
        if name == "p3o":
            kl, kl_slope = p3o_kl(response.l, knobs.get("safe_kl", False))
            reverse = np.exp(np.clip(-response.l, -10, 10))
            parts = parts + (1 - statistic) * kl
            part_scales = part_scales + (1 - statistic) * (np.abs(response.l) + reverse + 1)
            slopes = slopes + (1 - statistic) * kl_slope
            slope_scales = slope_scales + (1 - statistic) * (reverse + 1)
        if "reference_logp" in own:
            x = response.logp - own["reference_logp"]
            kl, kl_slope, kl_scale = kl_to_reference(x, estimator, response.rho)
            parts = parts + coefficients["kl_coef"] * kl
            part_scales = part_scales + coefficients["kl_coef"] * (np.abs(x) + kl_scale)
            slopes = slopes + coefficients["kl_coef"] * kl_slope
            slope_scales = slope_scales + coefficients["kl_coef"] * kl_scale
        if "entropy" in own:
            parts = parts - coefficients["entropy_coef"] * own["entropy"]
            part_scales = part_scales + coefficients["entropy_coef"] * np.abs(own["entropy"])
        loss += share * parts.sum()
        loss_scale += share * part_scales.sum()
        gradient[i, at], gradient_scale[i, at] = share * slopes, share * slope_scales
    return loss, gradient, loss_scale, gradient_scale


def count(mask, aggregation, max_length):
    """Tokens, responses, or responses times the budget."""
    responses = np.any(mask, axis=1).sum()
    return {"token_mean": np.sum(mask), "constant": responses * max_length}.get(aggregation, responses)


PER_TOKEN = ("weights", "reference_logp", "entropy", "proximal_logp")


class Response:
    """One response without padding: log-probs, log-ratios, advantages; the statistic of the batch."""

    def __init__(self, logp, l, advantages, statistic, own):  # noqa: E741
        self.logp, self.l, self.a = logp, l, advantages
        self.rho = np.exp(l)
        self.statistic, self.own = statistic, own


def clipped_surrogate(ratio, a, low, high, dual_clip=None):
    """min(ρA, clip(ρ)A), at least cA where A < 0, and whether ρA is the one that counts."""
    plain, bounded = ratio * a, np.clip(ratio, low, high) * a
    value, active = np.minimum(plain, bounded), plain <= bounded
    if dual_clip is None:
        return value, active
    return np.where(a < 0, np.maximum(value, dual_clip * a), value), active & ~((a < 0) & (ratio > dual_clip))


def min_form(r, clip_low, clip_high, dual_clip=None):
    value, active = clipped_surrogate(r.rho, r.a, clip_low, clip_high, dual_clip)
    slope = np.where(active, r.rho * r.a, 0.0)
    return value, slope, np.abs(slope)


def mu_grpo(r, clip_low=0.0, clip_high=5.0, veto="suffix", veto_ratio=1e-4, dual_clip=None):
    value, slope, scale = min_form(r, clip_low, clip_high, dual_clip)
    triggers = [t for t in range(len(r.a)) if r.a[t] < 0 and r.l[t] < np.log(veto_ratio)]
    keep = np.ones(len(r.a))
    for t in range(len(r.a)):
        behind = bool(triggers) and t > triggers[0]
        vetoed = {
            "none": False,
            "trigger": t in triggers,
            "suffix": behind,
            "suffix_non_trigger": behind and t not in triggers,
            "sequence": bool(triggers),
        }[veto]
        keep[t] = not (vetoed and r.a[t] < 0)
    return keep * value, keep * slope, keep * scale


def grpo(r, clip_low=0.8, clip_high=1.2, dual_clip=None):
    return min_form(r, clip_low, clip_high, dual_clip)


def dapo(r, clip_low=0.8, clip_high=1.28):
    return min_form(r, clip_low, clip_high)


def decoupled_ppo(r, clip_low=0.8, clip_high=1.2, behavior_cap=5.0):
    log_behavior = r.own["proximal_logp"] - (r.logp - r.l)
    weight = np.minimum(np.exp(log_behavior), behavior_cap)
    u = np.exp(r.logp - r.own["proximal_logp"])
    value, active = clipped_surrogate(u, r.a, clip_low, clip_high)
    slope = weight * np.where(active, u * r.a, 0.0)
    return weight * value, slope, np.abs(slope)


def cispo(r, clip_low=0.0, clip_high=5.0):
    slope = np.clip(r.rho, clip_low, clip_high) * r.a
    return slope * r.logp, slope, np.abs(slope)


def gppo(r, clip_low=0.8, clip_high=1.28, dual_clip=None):
    value, _ = clipped_surrogate(r.rho, r.a, clip_low, clip_high, dual_clip)
    far = np.zeros(len(r.a), bool) if dual_clip is None else (r.a < 0) & (r.rho > dual_clip)
    return value, np.where(far, 0.0, value), np.abs(value)


def sapo(r, temperature_positive=1.0, temperature_negative=1.05):
    tau = np.where(r.a > 0, temperature_positive, temperature_negative)
    x = tau * (r.rho - 1)
    up, down = np.exp(-np.logaddexp(0, -x)), np.exp(-np.logaddexp(0, x))
    slope = 4 * up * down * r.rho * r.a
    # The tail exp(−τρ) turns a relative error of ρ into τρ times as much: inherent, and part of the scale.
    return 4 / tau * up * r.a, slope, np.abs(slope) * (1 + tau * r.rho)


def gspo(r, clip_low=1 - 3e-4, clip_high=1 + 4e-4, level="sequence"):
    n = len(r.l)
    s = np.exp(r.l.sum() / n)
    value, active = clipped_surrogate(np.full(n, s), r.a, clip_low, clip_high)
    slope = np.where(active, s * r.a, 0.0)  # of each term with respect to log s
    return value, slope, np.abs(slope)


def topr(r, length_normalized=False):
    log_weight = r.l.mean() if length_normalized else r.l.sum()
    slope = np.where(r.a < 0, np.exp(min(log_weight, 0.0)), 1.0) * r.a
    # exp of a sum of n log-ratios: its relative error is the absolute error of the sum, which grows with it.
    return slope * r.logp, slope, np.abs(slope) * (1 + (0.0 if length_normalized else np.abs(r.l).sum() / 8))


def pnpo(r, clip_low=0.8, clip_high=1.2):
    weight = np.array([np.exp(np.mean(r.l[: t + 1])) for t in range(len(r.l))])
    value, active = clipped_surrogate(weight, r.a, clip_low, clip_high)
    slope = np.where(active, weight * r.a, 0.0)
    return value, slope, np.abs(slope)


def ctpo(r, log_low=0.025, log_high=0.05, growth=0.5):
    weight = np.exp(np.cumsum(r.l))
    width = np.arange(1, len(r.l) + 1) ** growth
    value, active = clipped_surrogate(weight, r.a, np.exp(-log_low * width), np.exp(log_high * width))
    slope = np.where(active, weight * r.a, 0.0)
    # exp of a sum of n log-ratios, as in TOPR.
    error = 1 + np.abs(r.l).cumsum() / 8
    return value, slope, np.abs(slope) * error, np.abs(value) * error


def gmpo_bounded(r, clip_low, clip_high):
    return np.where(r.a > 0, np.minimum(r.l, np.log(clip_high)), np.maximum(r.l, np.log(clip_low)))


GMPO_LOW, GMPO_HIGH = np.exp(-0.4), np.exp(0.4)


def gmpo_clipped(r, clip_low=GMPO_LOW, clip_high=GMPO_HIGH):
    return gmpo_bounded(r, clip_low, clip_high) != r.l


def gmpo(r, clip_low=GMPO_LOW, clip_high=GMPO_HIGH):
    slope = np.exp(gmpo_bounded(r, clip_low, clip_high).mean()) * r.a  # of each term with respect to log G
    return slope, slope, np.abs(slope)


def vespo(r, k_positive=2.0, lambda_positive=3.0, k_negative=3.0, lambda_negative=2.0):
    total = r.l.sum()
    k, decay = np.where(r.a >= 0, [[k_positive], [lambda_positive]], [[k_negative], [lambda_negative]])
    slope = np.exp(k * total + decay * (1 - np.exp(total))) * r.a
    # The relative error of φ is the error of the sum times |k − λ W|.
    error = 1 + np.abs(k - decay * np.exp(total)) * np.abs(r.l).sum() / 8
    return slope * r.logp, slope, np.abs(slope) * error, np.abs(slope * r.logp) * error


def dppo(r, divergence="tv", threshold=None, ratio_cap=5.0):
    policy, behavior = np.exp(r.logp), np.exp(r.logp - r.l)
    if divergence == "tv":
        distance = np.abs(policy - behavior)
    else:
        distance = behavior * np.log(behavior / policy)
        distance = distance + (1 - behavior) * np.log((1 - behavior) / (1 - policy))
    further = ((r.a > 0) & (policy > behavior)) | ((r.a < 0) & (policy < behavior))
    limit = {"tv": 0.15, "kl": 0.05}[divergence] if threshold is None else threshold
    slope = np.where(further & (distance > limit), 0.0, np.minimum(r.rho, ratio_cap) * r.a)
    return slope * r.logp, slope, np.abs(slope)


def minpro(r):
    prefix = np.array([np.exp(min(r.l[:t])) if t else 1.0 for t in range(len(r.l))])
    slope = prefix * r.rho * r.a
    # A product of two ratios has the error of both.
    return slope, slope, 2 * np.abs(slope)


def p3o(r, safe_kl=False):
    slope = np.minimum(r.rho, r.statistic) * r.a
    return slope * r.logp, slope, np.abs(slope)


def p3o_kl(l, safe):  # noqa: E741
    reverse = np.exp(np.clip(-l, -10, 10))
    inside = np.abs(l) <= 10
    return l + reverse - 1, np.where(inside | safe, 1 - reverse, 1.0)


def effective_sample_size(l, advantages, **_):  # noqa: E741
    rho = np.exp(l)
    return rho.sum() ** 2 / ((rho**2).sum() + 1e-8) / len(rho) if len(rho) else 1.0


def m2po(r, threshold=0.04, form="winsorize", dual_clip=None):
    if form == "winsorize":
        return min_form(r, np.exp(-r.statistic), np.exp(r.statistic), dual_clip)
    harmful = ((r.a > 0) & (r.rho > 1)) | ((r.a < 0) & (r.rho < 1))
    keep = ~(harmful & (np.abs(r.l) > r.statistic))
    value, slope, scale = min_form(r, 0.0, np.inf, dual_clip)
    return keep * value, keep * slope, keep * scale


def m2po_bound(l, advantages, threshold=0.04, form="winsorize", **_):  # noqa: E741
    harmful = ((advantages > 0) & (l > 0)) | ((advantages < 0) & (l < 0))
    v = np.sort(l[harmful] ** 2)
    n = len(v)
    if n == 0 or v.mean() <= threshold:
        return np.inf
    if form == "winsorize":
        for k in range(n):
            if v[: k + 1].sum() + (n - k - 1) * v[k] >= threshold * n:
                return np.sqrt(v[k - 1]) if k else 0.0
    while len(v) and v.mean() > threshold:
        v = v[v < v[-1]]
    return np.sqrt(v[-1]) if len(v) else 0.0


def bapo(r, dual_clip=None, **_):
    return min_form(r, *r.statistic, dual_clip)


def bapo_bounds(
    l,  # noqa: E741
    advantages,
    clip_low=0.6,
    clip_low_max=0.8,
    clip_high=1.2,
    clip_high_max=2.0,
    step=0.05,
    target=1.0,
    **_,
):
    def short():
        value = clipped_surrogate(np.exp(l), advantages, clip_low, clip_high)[0]
        return value[value > 0].sum() < target * -value[value < 0].sum()

    while short() and clip_low < clip_low_max - 1e-9:
        clip_low = min(clip_low + step, clip_low_max)
    while short() and clip_high < clip_high_max - 1e-9:
        clip_high = min(clip_high + step, clip_high_max)
    return clip_low, clip_high


def kl_to_reference(x, estimator, rho):
    if estimator == "k1":
        return x, np.ones_like(x), np.ones_like(x)
    if estimator == "k2":
        return x**2 / 2, x, np.abs(x)
    k3, slope, scale = np.exp(-x) - 1 + x, 1 - np.exp(-x), 1 + np.exp(-x)
    if estimator == "k3":
        return k3, slope, scale
    return rho * k3, rho * x, rho * (2 * scale + np.abs(x))


METHODS = {
    "mu_grpo": mu_grpo,
    "grpo": grpo,
    "dr_grpo": grpo,
    "dapo": dapo,
    "gspo": gspo,
    "cispo": cispo,
    "m2po": m2po,
    "p3o": p3o,
    "bapo": bapo,
    "topr": topr,
    "gppo": gppo,
    "sapo": sapo,
    "pnpo": pnpo,
    "minpro": minpro,
    "decoupled_ppo": decoupled_ppo,
    "gmpo": gmpo,
    "vespo": vespo,
    "ctpo": ctpo,
    "dppo": dppo,
}
STATISTICS = {"p3o": effective_sample_size, "m2po": m2po_bound, "bapo": bapo_bounds}
