#!/usr/bin/env python3
"""Time attention on packed rows, forward and backward, for one layer with the heads of SmolLM2-135M.

Prints one JSON line per measurement:

    python scripts/bench_attention.py            # on a GPU: 32,768 tokens, three kinds of lengths
    python scripts/bench_attention.py --small    # a tiny shape, to check that the script runs

The layers compute packed rows. On a GPU, attention copies their queries, keys and values to padded rows, and
packs its result again (`models.Packing`). The kinds are:

    bare     padded rows of the mean length, nothing is copied
    exact    packed rows, copied to as many padded rows as there are responses
    usual    packed rows, copied to 2 · tokens / length padded rows, of which some are empty
    offsets  cuDNN on packed rows, which gets their starts and lengths; nothing is copied
    tokamax  like `exact`, with each kernel of tokamax that runs here, if tokamax is installed
"""

import argparse
import functools
import importlib.util
import json
import time
from collections.abc import Callable
from typing import Any

import bench_run
import jax
import jax.numpy as jnp
import numpy as np

from mugrpo_jax import models

HEADS, KV_HEADS, WIDTH = 9, 3, 64
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="few tokens")
    parser.add_argument("--lengths", choices=bench_run.LENGTHS, nargs="+", default=list(bench_run.LENGTHS))
    arguments = parser.parse_args()
    print(json.dumps({"device": jax.devices()[0].device_kind, "jax": jax.__version__}), flush=True)
    for name in arguments.lengths:
        measure(name, bench_run.LENGTHS[name], tokens=1536 if arguments.small else 32_768)


def measure(name: str, lengths: bench_run.Lengths, tokens: int) -> None:
    """Time all kinds for responses of these lengths."""
    rows = draw(lengths, tokens)
    longest = -(-(lengths.prompt + lengths.longest) // 128) * 128
    mean = -(-sum(rows) // len(rows) // 8) * 8
    say = functools.partial(report, name, sum(rows))
    say("bare", len(rows), mean, seconds(models.attention, (len(rows), mean)))
    for kind, count in {"exact": len(rows), "usual": 2 * tokens // longest}.items():
        count = max(count, len(rows))
        packing = models.plan_packing([*rows, *[0] * (count - len(rows))], (count, longest), tokens=tokens)
        attend: Attend = functools.partial(copied, jax.tree.map(jnp.asarray, packing))
        say(kind, count, longest, seconds(attend, (1, tokens)))
    measure_tokamax(say, rows, longest, tokens)
    if jax.default_backend() != "gpu":
        return
    for parts in (1, 4, 8):
        attend, inside = with_offsets(rows, parts, tokens // parts)
        report(name, inside, "offsets", parts, tokens // parts, seconds(attend, (parts, tokens // parts)))


def measure_tokamax(say: Callable[..., None], rows: list[int], longest: int, tokens: int) -> None:
    """Time its kernels on padded rows; its public interface has no segment ids or offsets."""
    if importlib.util.find_spec("tokamax") is None:
        return
    import tokamax

    packing = jax.tree.map(jnp.asarray, models.plan_packing(rows, (len(rows), longest), tokens=tokens))

    def attend(kernel: str, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        sizes = {"query_seq_lengths": packing.lengths, "key_value_seq_lengths": packing.lengths}
        spread = packing.unpack(q), packing.unpack_keys(k), packing.unpack_keys(v)
        found = tokamax.dot_product_attention(*spread, is_causal=True, **sizes, implementation=kernel)
        return packing.pack(found)

    for kernel in ("mosaic", "triton", "xla_chunked"):
        try:
            spent = seconds(functools.partial(attend, kernel), (1, tokens))
        except Exception as error:  # which kernels run depends on the device and the shapes
            print(json.dumps({"kind": "tokamax", "kernel": kernel, "error": str(error)[:200]}), flush=True)
            continue
        say(f"tokamax {kernel}", len(rows), longest, spent)


def draw(lengths: bench_run.Lengths, tokens: int) -> list[int]:
    """Lengths of prompts with their responses, as many as fit, longest first as in a micro-batch."""
    drawn = lengths.prompt + lengths.draw(np.random.default_rng(1), tokens)
    count = int(np.searchsorted(np.cumsum(drawn), tokens, side="right"))
    return sorted(drawn[:count].tolist(), reverse=True)


def copied(packing: models.Packing, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """What a layer does: copy to padded rows, attend, pack."""
    rows = packing.unpack(q), packing.unpack_keys(k), packing.unpack_keys(v)
    return packing.pack(models.attention(*rows, rows=packing.lengths))


def with_offsets(rows: list[int], parts: int, room: int) -> tuple[Attend, int]:
    """Attention of cuDNN over `parts` packed rows; also the number of tokens that fit in them."""
    # jax.nn has no argument for offsets yet.
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

    packed: list[list[int]] = [[] for _ in range(parts)]
    for length in rows:
        least = min(packed, key=sum)
        if sum(least) + length <= room:
            least.append(length)
    most = max(map(len, packed))
    lengths = np.array([row + [-1] * (most - len(row)) for row in packed], np.int32)
    starts = [np.cumsum([0, *row[:-1]]).tolist() + [-1] * (most + 1 - len(row)) for row in packed]
    sizes, offsets = jnp.asarray(lengths), jnp.asarray(starts, jnp.int32)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return dot_product_attention(
            *(q, k, v, None, None, sizes, sizes, offsets, offsets),
            scale=WIDTH**-0.5,
            mask_type=MaskType.PADDING_CAUSAL,
        )

    return attend, sum(map(sum, packed))


def seconds(attend: Attend, shape: tuple[int, int], repeats: int = 20) -> float:
    """Mean time of the forward and backward pass for arrays `[*shape, heads, width]`."""
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    keys = jax.random.split(jax.random.key(0), 4)
    heads = HEADS, KV_HEADS, KV_HEADS, HEADS
    *arrays, weight = (jax.random.normal(key, (*shape, n, WIDTH), dtype) for key, n in zip(keys, heads))

    def value(q: jax.Array, k: jax.Array, v: jax.Array, weight: jax.Array) -> jax.Array:
        return (attend(q, k, v).astype(jnp.float32) * weight).sum()

    program = jax.jit(jax.value_and_grad(value, (0, 1, 2)))
    jax.block_until_ready(program(*arrays, weight))
    started, result = time.perf_counter(), None
    for _ in range(repeats):
        result = program(*arrays, weight)
    jax.block_until_ready(result)
    return (time.perf_counter() - started) / repeats


def report(lengths: str, tokens: int, kind: str, rows: int, width: int, spent: float) -> None:
    record: dict[str, Any] = {"lengths": lengths, "kind": kind, "rows": rows, "width": width}
    record |= {"tokens": tokens, "ms": round(1e3 * spent, 3), "ns_per_token": round(1e9 * spent / tokens, 2)}
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
