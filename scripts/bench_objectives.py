"""Time value and gradient of every objective, as a ratio to plain GRPO.

    python scripts/bench_objectives.py [--rows 64] [--columns 2048] [--repeats 30]

The batch is ragged and off-policy (ratios from 1e-6 to 1e3). The programs are timed in turn, in several
rounds, so that a busy machine disturbs all of them equally. The result is the median. Exits with 1 if an
objective costs more than three times GRPO. M2PO is exempt: its bound is an order statistic of the whole
batch, which needs a sort or, as here, 31 passes over the log-ratios.
"""

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from mugrpo_jax.objectives import OBJECTIVES, diagnostics

LIMIT = 3.0
EXCUSED = {"m2po": "order statistic of the batch", "diagnostics": "no gradient, six quantiles"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--columns", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=30)
    arguments = parser.parse_args()

    batch = make_batch(arguments.rows, arguments.columns)
    programs = {name: value_and_gradient(name, batch) for name in OBJECTIVES}
    programs["diagnostics"] = functools.partial(jax.jit(diagnostics), *batch)
    medians = time_in_turn(programs, arguments.repeats)

    device = jax.devices()[0]
    print(f"{arguments.rows} x {arguments.columns} tokens on {device.device_kind}, value and gradient")
    print(f"{'objective':<16}{'ms':>9}{'x GRPO':>9}")
    too_slow = []
    for name, seconds in sorted(medians.items(), key=lambda item: item[1]):
        ratio = seconds / medians["grpo"]
        print(f"{name:<16}{1e3 * seconds:>9.3f}{ratio:>9.2f}  {EXCUSED.get(name, '')}".rstrip())
        if ratio > LIMIT and name not in EXCUSED:
            too_slow.append(name)
    if too_slow:
        print(f"above {LIMIT} x GRPO: {', '.join(too_slow)}")
    return bool(too_slow)


def make_batch(rows: int, columns: int) -> tuple[jax.Array, ...]:
    random = np.random.default_rng(0)
    behavior_logp = -random.exponential(1.0, (rows, columns))
    logp = behavior_logp + random.uniform(np.log(1e-6), np.log(1e3), (rows, columns))
    advantages = random.standard_normal(rows)
    mask = np.arange(columns) < random.integers(columns // 4, columns + 1, (rows, 1))
    return tuple(jnp.asarray(x, jnp.float32) for x in (logp, behavior_logp, advantages, mask))


def value_and_gradient(name: str, batch: tuple[jax.Array, ...]) -> Callable[[], object]:
    logp, behavior_logp, *_ = batch
    extra = {"proximal_logp": (logp + behavior_logp) / 2} if name == "decoupled_ppo" else {}
    program = jax.jit(jax.value_and_grad(functools.partial(OBJECTIVES[name], **extra), has_aux=True))
    return functools.partial(program, *batch)


def time_in_turn(programs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(repeats + 1):
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program())
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(rounds[1:]) for name, rounds in times.items()}  # the first one compiles


if __name__ == "__main__":
    sys.exit(main())
