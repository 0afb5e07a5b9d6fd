"""The update step: sum the micro-batch gradients, which have one common denominator, then call the optimizer.

An update step calls three jitted programs. `prepare` casts the weights and makes a zero gradient. For each
micro-batch, `accumulate` adds a gradient; it is compiled once per micro-batch shape. `apply` calls the
optimizer. `accumulate` and `apply` donate the arrays that they replace. If the objective takes statistics
from the whole update, `UpdateStatistics` computes these before the first `accumulate`.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mugrpo_jax import objectives
from mugrpo_jax.compiling.compiled_programs import CompiledPrograms
from mugrpo_jax.models import Model, Packing, SharedPacking, cast, token_logprobs
from mugrpo_jax.models.sharding import batch_sharding
from mugrpo_jax.rollouts import MicroBatch, Update
from mugrpo_jax.training.state import TrainState, state_sharding
from mugrpo_jax.training.update_statistics import UpdateStatistics

Objective = Callable[..., tuple[jax.Array, objectives.Metrics]]


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """Options of the loss. They are compile-time constants, so each `UpdateStep` has fixed options.

    `compute_dtype` is the dtype of the forward and backward pass. `temperature` divides the logits of the
    policy that is trained; it may differ from the temperature at which the responses were sampled.
    `Model.hidden` explains `remat`, `scan` and `attention` (there `backend`). With `share_prompts`, a prompt
    is computed once for several responses; the micro-batches must be packed for this (`SharedPacking`).

    `entropy` says whether the entropy of the policy is a metric (`value`), or also an argument of the
    objective, for an entropy bonus (`gradient`). `proximal` says which policy gives the objective its
    `proximal_logp`: the weights in `TrainState.proximal` (`state`), or the policy before this update
    (`policy`). `abandoned_ratio` is that of `objectives.diagnostics`.
    """

    compute_dtype: str = "float32"
    temperature: float = 1.0
    remat: str = "none"
    scan: bool = True
    attention: str = "auto"
    share_prompts: bool = False
    entropy: Literal["none", "value", "gradient"] = "none"
    proximal: Literal["none", "state", "policy"] = "none"
    abandoned_ratio: float = 1e-4


class UpdateStep:
    """Call `state, metrics = step(state, update)` to make one update.

    The `state` of the constructor may be abstract, because only its shapes are used. `statistics` computes
    batch statistics of the objective from the whole update; without it, the objective computes them from each
    micro-batch. `diagnose=True` adds `objectives.diagnostics` and the sampler-trainer gap to the metrics.
    With `behaviors`, the names that the array `behavior` of a micro-batch numbers, all these metrics and
    those of the objective are also computed for the responses of each behavior alone.
    `programs` are compiled ahead by `compile_step_ahead`; the others are compiled at their first call.
    If the model is a `LoraDecoder`, each call also needs `base`, its frozen weights.
    """

    def __init__(
        self,
        model: Model,
        objective: Objective,
        optimizer: optax.GradientTransformation,
        mesh: Mesh,
        options: StepOptions,
        *,
        state: TrainState,
        statistics: objectives.Statistics | None = None,
        diagnose: bool = True,
        programs: CompiledPrograms | None = None,
        behaviors: Sequence[str] = (),
    ) -> None:
        self.mesh, self.compute_dtype = mesh, jnp.dtype(options.compute_dtype)
        self._programs = CompiledPrograms() if programs is None else programs
        logprobs = functools.partial(batch_logprobs, model, options)
        self.statistics = None if statistics is None else UpdateStatistics(logprobs, statistics, mesh)
        # Explicit shardings, so that the output of one program has the input sharding of the next.
        shardings = state_sharding(mesh, model, state)
        loss = functools.partial(_loss, model, objective, options, tuple(behaviors) if diagnose else None)
        self.prepare = jax.jit(
            functools.partial(_prepare, self.compute_dtype),
            static_argnames="names",
            out_shardings=(shardings.params, shardings.params, None),
        )
        self.accumulate = jax.jit(
            functools.partial(_accumulate, loss),
            donate_argnums=(1, 2),
            out_shardings=(shardings.params, None),
        )
        self.apply = jax.jit(
            functools.partial(_apply, optimizer), donate_argnums=0, out_shardings=(shardings, None)
        )
        self._loss = loss
        self._by_behavior = bool(behaviors)
        self._names: tuple[str, ...] | None = None

    def __call__(
        self, state: TrainState, update: Update, base: Any = None
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """Return the new state and metrics without waiting for the devices. The old `state` is donated."""
        gradient, metrics = self.gradient(state, update, base)
        state, applied = self._programs.get("optimizer", lambda: self.apply)(state, gradient)
        return state, metrics | applied

    def gradient(
        self, state: TrainState, update: Update, base: Any = None
    ) -> tuple[Any, dict[str, jax.Array]]:
        """Compute the float32 gradient of the whole update, and the objective's metrics."""
        frozen, statistics = frozen_weights(state, base), {}
        with jax.set_mesh(self.mesh):
            names = self.metric_names(state, update, base)
            prepare = self._programs.get("prepare", lambda: functools.partial(self.prepare, names=names))
            compute, gradient, metrics = prepare(state.params)
            batches: Iterable[dict[str, Any]] = (batch | frozen for batch in self.place(update.micro_batches))
            # The statistics of an only micro-batch are those of the update; the objective computes them. But
            # for the metrics of one behavior it would compute those of this behavior alone.
            if self.statistics is not None and (len(update.micro_batches) > 1 or self._by_behavior):
                batches = list(batches)
                statistics = self.statistics(compute, batches)
            for batch in batches:
                name = accumulate_name(batch, statistics)
                accumulate = self._programs.get(name, lambda: self.accumulate)
                gradient, metrics = accumulate(
                    compute, gradient, metrics, batch, np.float32(update.denominator), statistics
                )
        return gradient, metrics

    def lower_accumulate(self, compute: Any, gradient: Any, batch: dict[str, Any]) -> Any:
        """Lower `accumulate` for abstract arrays, so that the caller can compile it ahead of time."""
        with jax.set_mesh(self.mesh):
            statistics = {} if self.statistics is None else self.statistics.abstract()
            if self._names is None:
                self._names = tuple(jax.eval_shape(self._loss, compute, batch, np.float32(1), statistics)[1])
            everywhere = NamedSharding(self.mesh, P())
            metrics = {
                name: jax.ShapeDtypeStruct((), jnp.float32, sharding=everywhere) for name in self._names
            }
            return self.accumulate.lower(compute, gradient, metrics, batch, np.float32(1), statistics)

    def metric_names(self, state: TrainState, update: Update, base: Any = None) -> tuple[str, ...]:
        """Return the names of the objective's metrics. The first call traces the loss to find them.

        The arrays may be abstract, to check before a run that the loss can be computed.
        """
        if self._names is None:
            batch = update.micro_batches[0] | frozen_weights(state, base)
            shapes = jax.eval_shape(self._loss, state.params, batch, np.float32(1), {})[1]
            self._names = tuple(shapes)
        return self._names

    def place(self, batches: Iterable[MicroBatch]) -> Iterable[dict[str, jax.Array]]:
        """Copy micro-batches to the devices (`batch_sharding`). A host copies only its own devices' rows."""
        sharding = batch_sharding(self.mesh)
        for batch in batches:
            if sharding.is_fully_addressable:
                yield jax.device_put(batch, sharding)
            else:
                yield {
                    name: jax.make_array_from_callback(array.shape, sharding, array.__getitem__)
                    for name, array in batch.items()
                }


def accumulate_name(batch: Mapping[str, Any], statistics: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the name of the program `accumulate` for micro-batches with the shape of this one."""
    return "update", batch["mask"].shape, batch["tokens"].shape, tuple(statistics)


def frozen_weights(state: TrainState, base: Any = None) -> dict[str, Any]:
    """Return the weights without a gradient that the loss needs; they are passed with each micro-batch."""
    found = {"proximal": state.proximal, "base": base}
    return {name: weights for name, weights in found.items() if weights is not None}


def _loss(
    model: Model,
    objective: Objective,
    options: StepOptions,
    behaviors: Sequence[str] | None,
    params: Any,
    batch: dict[str, Any],
    denominator: jax.Array,
    statistics: dict[str, Any],
) -> tuple[jax.Array, objectives.Metrics]:
    logp, entropy = batch_logprobs(model, options, params, batch, entropy=options.entropy)
    inputs = (logp, batch["behavior_logp"], batch["advantages"], batch["mask"])
    more = {"reference_logp": batch["reference_logp"]} if "reference_logp" in batch else {}
    if options.entropy == "gradient":
        more["entropy"] = entropy
    if options.proximal != "none":
        # The policy before this update has the weights with which `logp` was just computed.
        kept = options.proximal == "state"
        proximal = batch_logprobs(model, options, batch["proximal"], batch)[0] if kept else logp
        more["proximal_logp"] = jax.lax.stop_gradient(proximal)
    objective = functools.partial(objective, denominator=denominator, **more, **statistics)
    loss, metrics = objective(*inputs)
    if behaviors is not None:
        diagnose = functools.partial(_diagnostics, entropy=entropy, abandoned_ratio=options.abandoned_ratio)
        metrics = diagnose(*inputs) | metrics
        if behaviors:
            metrics |= _by_behavior(behaviors, batch["behavior"], objective, diagnose, inputs)
    return loss, metrics | {"loss": jax.lax.stop_gradient(loss)}


def _by_behavior(
    names: Sequence[str],
    numbers: jax.Array,
    objective: Objective,
    diagnose: Callable[..., objectives.Metrics],
    inputs: Sequence[jax.Array],
) -> objectives.Metrics:
    """Return all metrics for the responses of each behavior alone, under their keys, `@` and its name."""
    logp, behavior_logp, advantages, mask = jax.lax.stop_gradient(tuple(inputs))

    def found(number: jax.Array) -> objectives.Metrics:
        mine = logp, behavior_logp, advantages, mask * (numbers == number)[:, None]
        return diagnose(*mine) | objective(*mine)[1]

    # Mapped over the behaviors, so that more of them do not take longer to compile.
    values = jax.vmap(found)(jnp.arange(len(names)))
    return {f"{key}@{name}": array[i] for i, name in enumerate(names) for key, array in values.items()}


def _diagnostics(
    logp: jax.Array,
    behavior_logp: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    entropy: jax.Array | None,
    abandoned_ratio: float,
) -> objectives.Metrics:
    """Return `objectives.diagnostics`, the sampler-trainer gap, and the entropy if it is known."""
    metrics = objectives.diagnostics(logp, behavior_logp, advantages, mask, abandoned_ratio=abandoned_ratio)
    valid, count = mask != 0, jnp.maximum(mask.sum(), 1)
    gap = jnp.abs(logp - behavior_logp) * valid
    metrics |= {"gap_max": gap.max(), "gap/tokens": gap.sum() / count}
    if entropy is not None:
        metrics["entropy/tokens"] = jnp.where(valid, entropy, 0.0).sum() / count
    return jax.lax.stop_gradient(metrics)


def batch_logprobs(
    model: Model, options: StepOptions, params: Any, batch: dict[str, Any], *, entropy: str = "none"
) -> tuple[jax.Array, jax.Array | None]:
    """Compute the log-probs of the response tokens in a micro-batch, and the entropies unless `none`.

    With LoRA, `params` are the adapters, and `batch["base"]` are the frozen weights.
    """
    packing = None
    if "base" in batch:
        params = params | {"base": batch["base"]}
    if "packed_from" in batch:
        kind = SharedPacking if options.share_prompts else Packing
        packing = kind(batch["packed_from"], batch["padded_from"])
    return token_logprobs(
        model,
        params,
        batch["tokens"],
        packing=packing,
        wanted=batch["mask"],
        temperature=options.temperature,
        entropy=entropy != "none",
        entropy_gradient=entropy == "gradient",
        remat=options.remat,
        scan=options.scan,
        backend=options.attention,
    )


def _accumulate(
    loss: Any,
    compute: Any,
    gradient: Any,
    metrics: objectives.Metrics,
    batch: Any,
    denominator: jax.Array,
    statistics: dict[str, Any],
) -> tuple[Any, objectives.Metrics]:
    part, found = jax.grad(loss, has_aux=True)(compute, batch, denominator, statistics)
    gradient = jax.tree.map(lambda total, g: total + g.astype(jnp.float32), gradient, part)
    return gradient, objectives.combine_metrics([metrics, found])


def _prepare(dtype: Any, params: Any, *, names: tuple[str, ...]) -> tuple[Any, Any, objectives.Metrics]:
    """Return the weights in the compute dtype, a zero gradient, and the start value of each metric.

    The weights are cast before they are all-gathered, so that bfloat16 halves the communication.
    """
    start = {"_min": jnp.inf, "_max": -jnp.inf}
    plain = {name: name.partition("@")[0][-4:] for name in names}
    metrics = {name: jnp.full((), start.get(end, 0.0), jnp.float32) for name, end in plain.items()}
    return cast(params, dtype), jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params), metrics


def _apply(
    optimizer: optax.GradientTransformation, state: TrainState, gradient: Any
) -> tuple[TrainState, dict[str, jax.Array]]:
    norm = optax.tree.norm(gradient)
    finite = jnp.isfinite(norm)
    # If the update is skipped, the optimizer gets zeros instead of NaN, and its result is discarded.
    safe = jax.tree.map(lambda g: jnp.where(finite, g, 0.0), gradient)
    changes, opt_state = optimizer.update(safe, state.opt_state, state.params)
    changes = jax.tree.map(lambda c: jnp.where(finite, c, 0.0), changes)
    params = optax.apply_updates(state.params, changes)
    opt_state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), opt_state, state.opt_state)
    metrics = {"gradient_norm": norm, "update_norm": optax.tree.norm(changes)}
    previous = state.previous
    if state.anchor is not None:
        moved = jax.tree.map(jnp.subtract, params, state.anchor)
        metrics["drift"] = optax.tree.norm(moved)
        metrics["gradient_cosine"] = objectives.gradient_cosine(previous, safe)
        previous = jax.tree.map(lambda g, old: jnp.where(finite, g, old), safe, previous)
    metrics["skipped"] = skipped = state.skipped + (1 - finite.astype(jnp.int32))
    updates = state.updates + 1
    state = TrainState(params, opt_state, updates, skipped, state.anchor, previous, state.proximal)
    return state, metrics
