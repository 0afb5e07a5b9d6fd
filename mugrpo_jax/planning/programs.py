"""Lower the programs of a run with abstract arrays, and compile them for devices that need not be present."""

import dataclasses
import functools
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from mugrpo_jax import models, training
from mugrpo_jax.config import RunConfig
from mugrpo_jax.models import Decoder, ModelConfig
from mugrpo_jax.models.sharding import placed
from mugrpo_jax.planning.chips import Chip, Topology
from mugrpo_jax.planning.program_cost import Cost, HloProgram
from mugrpo_jax.planning.run_memory import abstract_reference, abstract_state, bytes_on_device, kept_reference
from mugrpo_jax.rollouts import Buckets, Shape, abstract_micro_batch, abstract_update
from mugrpo_jax.sampling import SamplerPlan
from mugrpo_jax.sampling.lowering import lower_decode, lower_extend, lower_prefill
from mugrpo_jax.sampling.programs import abstract_slots
from mugrpo_jax.setup.auto_settings import choose_settings
from mugrpo_jax.setup.lora import abstract_run_base, trainable_model
from mugrpo_jax.setup.sizes import step_options, update_buckets, update_statistics
from mugrpo_jax.setup.stored_rollouts import behavior_names
from mugrpo_jax.training.compile_ahead import (
    abstract_batch,
    abstract_compute,
    lower_accumulate,
    lower_apply,
    lower_prepare,
)
from mugrpo_jax.training.update_step import frozen_weights

# The naive packer skips the search for fast machine code. The search takes most of the compile time and
# changes neither the memory nor the collectives.
_TPU_OPTIONS = {"xla_jf_naive_bundle_packer": True, "xla_dump_hlo_as_text": True}
_REFUSED = re.compile(r"Used ([\d.]+)([KMG]) of ([\d.]+)([KMG]) hbm")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """A compiled program and the bytes that it needs on one device.

    Attributes:
      name: the kind of the program and its shape, such as `prefill 8 × 512`.
      resident: bytes of arrays that stay on the device during the program but are not its arguments.
      outputs: bytes of the outputs, without outputs that reuse the memory of arguments.
      temporaries: bytes that the program needs only while it runs.
      cost: cost of one call; None if the compiler refused the program because of its memory.
      shards: name, shape and shape of one device's shard of every output.
    """

    name: str
    resident: int
    arguments: int
    outputs: int
    temporaries: int
    cost: Cost | None
    shards: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()

    @property
    def peak(self) -> int:
        """Return the largest number of bytes in use on the device while the program runs."""
        return self.resident + self.arguments + self.outputs + self.temporaries

    @property
    def kind(self) -> str:
        """Return the first word of the name, such as `update`, `optimizer`, `prefill` or `decode`."""
        return self.name.split()[0]

    def fits(self, chip: Chip) -> bool:
        """Return whether the program compiled and fits into the chip's memory."""
        return self.cost is not None and self.peak <= chip.usable_memory


@dataclasses.dataclass(frozen=True)
class Program:
    """A program of a run before compilation; `CompiledProgram` explains `name` and `resident`.

    Attributes:
      lower: lowers the program; None if files are read to the devices instead, without a program.
      made: the arrays that are read to the devices if `lower` is None, abstract and with shardings.
      parts: into how many parts its large outputs are split at least; 1 puts whole arrays on every device.
    """

    name: str
    resident: int
    lower: Callable[[], Any] | None
    made: Any = None
    parts: int = 1

    @property
    def kind(self) -> str:
        """Return the first word of the name, such as `update`, `optimizer`, `prefill` or `decode`."""
        return self.name.split()[0]


def compile_program(program: Program, topology: Topology) -> CompiledProgram:
    """Compile a program. If the compiler refuses it because of its memory, the result has `cost` None."""
    if program.lower is None:
        size, shards = bytes_on_device(program.made), _shards(program.made)
        return CompiledProgram(program.name, program.resident, 0, size, 0, Cost(0.0, float(size), ()), shards)
    lowered = program.lower()
    try:
        compiled, text = _compile(lowered, topology)
    except Exception as error:
        used = _REFUSED.search(str(error))
        if used is None:
            raise
        needed = int(float(used[1]) * _UNITS[used[2]])
        return CompiledProgram(program.name, program.resident, 0, 0, needed, None)
    memory = compiled.memory_analysis()
    return CompiledProgram(
        name=program.name,
        resident=program.resident,
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        cost=HloProgram(text, len(topology.devices)).cost(),
        shards=_shards(placed(lowered.out_info, compiled.output_shardings)),
    )


def _shards(tree: Any) -> tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]:
    return tuple(
        (jax.tree_util.keystr(path), leaf.shape, leaf.sharding.shard_shape(leaf.shape))
        for path, leaf in jax.tree.leaves_with_path(tree)
    )


def _compile(lowered: Any, topology: Topology) -> tuple[Any, str]:
    if topology.devices[0].platform != "tpu":
        compiled = lowered.compile()
        return compiled, compiled.as_text()
    # Read the text from the compiler's dump: jaxlib cannot always read programs of a newer libtpu.
    with tempfile.TemporaryDirectory() as folder:
        compiled = lowered.compile(compiler_options=_TPU_OPTIONS | {"xla_dump_to": folder})
        texts = [path.read_text() for path in Path(folder).glob("*jit_*.after_optimizations.txt")]
    return compiled, max(texts, key=len)


class UpdatePrograms:
    """Lowers the update step of a config on a mesh with abstract arrays, so no memory is allocated."""

    def __init__(self, config: RunConfig, model: ModelConfig, mesh: Mesh) -> None:
        config, _ = choose_settings(config, model, mesh)  # a plan has them already
        self.config, self.mesh, self.decoder = config, mesh, Decoder(model)
        self.model = trainable_model(config, self.decoder)
        self.base = abstract_run_base(config, self.decoder, mesh)
        self.optimizer = training.make_optimizer(config.optimizer, config.total_updates, self.model)
        self.state = abstract_state(config, model, mesh)
        self.behaviors = behavior_names(config)
        self.step = training.UpdateStep(
            self.model,
            config.objective.build(),
            self.optimizer,
            mesh,
            step_options(config),
            state=self.state,
            statistics=update_statistics(config),
            behaviors=self.behaviors,
        )

    @property
    def state_bytes(self) -> int:
        """Return the bytes of the training state and of all frozen weights on one device during updates."""
        return bytes_on_device((self.state, self.base, kept_reference(self.config, self.mesh)))

    @property
    def sampling_bytes(self) -> int:
        """Return the same during generation. Then the base of LoRA is in host memory, on one device."""
        return self.state_bytes - (bytes_on_device(self.base) if self.mesh.size == 1 else 0)

    @property
    def parts(self) -> int:
        """Return the number of devices that share one copy of the training state."""
        return self.mesh.shape["fsdp"] * self.mesh.shape["tensor"]

    def programs(self) -> Iterator[Program]:
        """Yield the gradient programs for the largest micro-batch shapes, and the optimizer step.

        If the objective takes statistics from the whole update, also yield the programs that compute them.
        With a KL term, yield also the program that computes the log-probs of the reference policy.
        """
        buckets, parts = update_buckets(self.config, self.mesh), self.parts
        state, shapes = self.state_bytes, largest_shapes(buckets)
        frozen = frozen_weights(self.state, self.base)
        for shape in shapes:
            yield Program(
                f"update {shape.tokens:,} tokens in rows of {shape.length}",
                state - bytes_on_device(frozen),  # arguments of the program
                functools.partial(self.accumulate, shape, buckets.parts),
                parts=parts,
            )
        yield from self._statistics_programs(shapes, buckets.parts)
        yield Program("optimizer", state - bytes_on_device(self.state), self.apply, parts=parts)
        if self.config.uses_reference:
            shape, kept = shapes[0], kept_reference(self.config, self.mesh)
            yield Program(
                f"reference {shape.tokens:,} tokens in rows of {shape.length}",
                state - bytes_on_device((kept, self._reference_base())),  # arguments of the program
                functools.partial(self.reference, shape, buckets),
            )

    def prepare(self) -> Any:
        """Lower `UpdateStep.prepare`."""
        update = abstract_update(
            update_buckets(self.config, self.mesh),
            reference=self.config.uses_reference,
            behaviors=bool(self.behaviors),
        )
        return lower_prepare(self.step, self.state, self.step.metric_names(self.state, update, self.base))

    def reference(self, shape: Shape, buckets: Buckets) -> Any:
        """Lower the program that computes the reference policy's log-probs for a micro-batch shape."""
        model, params = abstract_reference(self.config, self.mesh)
        scorer = training.ResponseScorer(model, step_options(self.config), self.mesh, buckets)
        base = self._reference_base()
        return scorer.lower(
            params if base is None else params | {"base": base}, abstract_micro_batch(shape, buckets.parts)
        )

    def _reference_base(self) -> Any:
        """Return the base of LoRA if the reference policy shares it, else None."""
        return self.base if self.config.reference.source == "start" else None

    def _statistics_programs(self, shapes: Sequence[Shape], parts: int) -> Iterator[Program]:
        statistics, compute = self.step.statistics, abstract_compute(self.step, self.state)
        if statistics is None:
            return
        resident = self.state_bytes + bytes_on_device(self.state.params)  # the gradient is already there
        for shape in shapes:
            yield Program(
                f"statistics {shape.tokens:,} tokens in rows of {shape.length}",
                resident - bytes_on_device(self.base),  # an argument of the program
                functools.partial(
                    statistics.lower_forward,
                    compute,
                    self._batch(shape, parts) | frozen_weights(self.state, self.base),
                ),
            )
        rows = self.config.batch.prompts_per_update * self.config.batch.responses_per_prompt
        longest = max(shapes, key=lambda shape: shape.length)
        capacity = statistics.capacity([longest[:2]] * -(-rows * longest.length // longest.tokens))
        yield Program(
            f"statistics of {parts * capacity:,} log-ratios",
            resident + bytes_on_device(compute),
            functools.partial(statistics.lower_finish, capacity),
        )

    def accumulate(self, shape: Shape, parts: int) -> Any:
        """Lower `UpdateStep.accumulate` for a micro-batch shape that `parts` devices split."""
        return lower_accumulate(self.step, self.state, self._batch(shape, parts), self.base)

    def _batch(self, shape: Shape, parts: int) -> dict[str, Any]:
        more = {"reference": self.config.uses_reference, "behaviors": bool(self.behaviors)}
        return abstract_batch(self.step, shape, parts, **more)

    def apply(self) -> Any:
        """Lower `UpdateStep.apply`."""
        return lower_apply(self.step, self.state)


def largest_shapes(buckets: Buckets) -> list[Shape]:
    """Return each micro-batch shape for which no other shape has at least as many tokens and as long rows."""
    return [
        shape
        for shape in buckets.shapes
        if not any(
            other.tokens >= shape.tokens and other.length >= shape.length
            for other in buckets.shapes
            if other != shape
        )
    ]


def sampler_programs(
    plan: SamplerPlan, config: RunConfig, state_bytes: int, *, evaluates: bool = True
) -> Iterator[Program]:
    """Yield prefill of the longest prompts and decoding with a full KV cache, also with top-p if used.

    `evaluates` says whether this sampler also samples for evaluations, which may use top-p.
    """
    bucket, parts = plan.prompt_buckets[-1], _mesh(plan).size
    rows = plan.prefill_rows(bucket)
    prompts = models.cache_bytes(plan.config, rows, bucket, plan.cache_dtype) // _mesh(plan).size
    yield Program(
        f"prefill {rows} × {bucket}",
        state_bytes + bytes_on_device(abstract_slots(plan)),
        functools.partial(lower_prefill, plan, bucket),
        parts=parts,
    )
    name = f"decode {plan.slots} slots, {plan.read_buckets[-1]} entries"
    yield Program(name, state_bytes + prompts, functools.partial(lower_decode, plan), parts=parts)
    if plan.turns:
        name = f"extend {plan.message_rows} × {plan.message_tokens}"
        yield Program(name, state_bytes, functools.partial(lower_extend, plan), parts=parts)
    if evaluates and config.evaluation.problems and config.evaluation.top_p < 1:
        top_p = functools.partial(lower_decode, plan, top_p=True)
        yield Program("decode with top-p (evaluation)", state_bytes + prompts, top_p, parts=parts)


def _mesh(plan: SamplerPlan) -> Mesh:
    if plan.mesh is None:
        raise ValueError("sampler: to be compiled ahead of time it needs a mesh, even of one device")
    return plan.mesh
