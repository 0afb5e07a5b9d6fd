"""Say in sentences which regime of the staleness law a run is in, and which learning rate follows from it."""

import math

from mugrpo_jax import objectives
from mugrpo_jax.report.run_history import History
from mugrpo_jax.report.staleness_position import (
    CLIPPED,
    ESS_LOSS,
    REPORTED,
    Position,
    position,
    shows_reported,
)

_CARRIES = {
    "noise": "noise carries the drift, so the largest learning rate falls as 1/√µ",
    "between": "noise and signal carry similar parts of the drift, so the largest learning rate falls faster "
    "than 1/√µ and slower than 1/µ",
    "ballistic": "signal carries the drift, so the largest learning rate falls as 1/µ, as in the paper",
}


def advice(run: History, fitted: objectives.StalenessFit | None = None) -> list[str]:
    """Return sentences about the regime of a run, the learning rate for its µ, and the law of the paper."""
    place = position(run)
    if not place.learning_rate or not place.updates:
        return ["The law does not apply: no update was made yet, or the learning rate is 0."]
    said = [_collapsed(place), _regime(place), _measured(place)]
    if fitted is not None:
        said += [_fitted(place, run.config.total_updates, fitted), _ordered(fitted)]
    return [sentence for sentence in (*said, _reported(place)) if sentence]


def _collapsed(place: Position) -> str:
    if place.collapse is None:
        return ""
    return f"Its reward or held-out accuracy fell below half of its best for good at update {place.collapse}."


def _regime(place: Position) -> str:
    """Name the regime by the growth of the drift, and by the cosine; say so if they disagree."""
    if not place.regime:
        return ""
    cosine = _cosine(place)
    verdict = f"{place.regime} regime at µ = {place.per_stage}: {_CARRIES[place.regime]}"
    if place.growth is None:
        return f"{cosine[:1].upper()}{cosine[1:]}. By it the run is in the {verdict}."
    told = (
        f"The drift within a stage grows with the exponent {place.growth.exponent:.2f} (random walk: "
        f"{place.walk_exponent:.2f}, straight line: 1), a share of signal of {place.growth.signal:.2g}. This "
        f"is the {verdict}."
    )
    if not cosine:
        return told
    by_cosine = place.regime_at(place.cosine_share)
    if by_cosine == place.regime:
        return f"{told} The cosine agrees: {cosine}."
    return f"{told} The cosine alone would say {by_cosine}: {cosine}. The drift of the steps decides."


def _cosine(place: Position) -> str:
    if math.isnan(place.signal):
        return ""
    found = f"the mean cosine of consecutive gradients is {place.signal:.2g} ± {place.signal_error:.1g}"
    if not place.cosine_share:
        return f"{found}, so no signal can be told from 0"
    turn = objectives.updates_until_signal(place.signal)
    return f"{found}, so signal would overtake noise after {turn:,.0f} updates"


def _measured(place: Position) -> str:
    """Advise a learning rate for this µ from the drift at which the run collapsed or came into trouble."""
    if place.collapse is not None:
        return _after_collapse(place)
    level = f"an ESS below {1 - ESS_LOSS:g} or {CLIPPED:.0%} clipped tokens"
    if math.isinf(place.batch_drift):
        return (
            f"No stage reached {level}, up to a drift of {place.largest_drift:.3g}, so there was no warning "
            "at this learning rate and µ. A higher rate may still be too high: some runs collapse without "
            "this warning."
        )
    advised = place.advised
    if advised is None:
        return ""
    found = f"A stage reached {level} at a drift of {place.batch_drift:.3g}."
    limit, now = advised.stage_limit, f"(now {place.learning_rate:.2g})"
    if place.learning_rate <= limit:
        return f"{found} For µ = {place.per_stage} this allows a learning rate of up to {limit:.2g} {now}."
    return (
        f"{found} To stay below it, the advised learning rate for µ = {place.per_stage} is at most "
        f"{limit:.2g} {now}; or keep the learning rate and use stages of {_shorter_stage(place)} updates."
    )


def _after_collapse(place: Position) -> str:
    """Advise a learning rate at which the whole run stays nearer to its start than it was at the collapse."""
    limit = place.learning_rate
    if place.advised is not None:
        limit = min(limit, place.advised.learning_rate)
    moved = ""
    if math.isfinite(place.critical_drift):
        moved = f"The weights had then moved by {place.critical_drift:.3g}. To stay below this, "
    said = (
        f"{moved}the learning rate for {place.updates} updates with µ = {place.per_stage} must be well below "
        f"{limit:.2g} (now {place.learning_rate:.2g}); try {limit / 2:.2g} first."
    )
    return said[:1].upper() + said[1:]


def _shorter_stage(place: Position) -> int:
    """Return the longest stage whose predicted drift stays below R_batch at the current learning rate."""
    size = place.update_size if place.growth is None else place.growth.update_size
    moved = objectives.updates_until_drift(
        place.batch_drift, place.learning_rate, size, place.share, place.momentum, most=place.per_stage
    )
    return max(int(min(moved, place.per_stage)) - 1, 1)


def _fitted(place: Position, updates: int, fitted: objectives.StalenessFit) -> str:
    share = place.share if math.isfinite(place.share) else 1.0
    given = max(place.lag, 1), updates, fitted.constants, share, place.momentum
    limit = objectives.largest_learning_rate(*given)
    side = {"stale": "of a stage", "horizon": "of the whole run"}[objectives.binding_constraint(*given)]
    return (
        f"Fitted to these runs: for this run a learning rate below {limit:.2g} (the drift {side} is the "
        "tighter limit)."
    )


def _ordered(fitted: objectives.StalenessFit) -> str:
    """Say by which quantity the runs that were too stale can be told from the others."""
    wrong = fitted.runs_on_the_wrong_side
    if not any(wrong):
        return ""
    counts = (
        f"Runs on the wrong side of the best limit: {wrong.lag_times_rate} by S·η, "
        f"{wrong.root_lag_times_rate} by √S·η, {wrong.stage_drift} by the predicted drift of a stage, "
        f"{wrong.rate} by η alone"
    )
    by_rate = wrong.rate < min(wrong.lag_times_rate, wrong.root_lag_times_rate)
    return counts + ("; the age of the data may not be what limits them." if by_rate else ".")


def _reported(place: Position) -> str:
    if not shows_reported([place]):
        return ""
    return (
        f"For comparison: this run has S·η = {place.lag_times_rate:.2g} and T·η = "
        f"{place.updates_times_rate:.2g}. The paper reports limits of {REPORTED.stale:.2g} and "
        f"{REPORTED.horizon:.2g} for GRPO without protection on Llama-3.2-1B and 3B; they do not hold for "
        "other methods and models. Another model can be far beyond them and healthy."
    )
