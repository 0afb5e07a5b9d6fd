"""Kernel times of one run on the device, summed by kernel name."""

import collections
import gzip
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax


def kernel_times(run: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds of device time per kernel name while `run` runs; numbers in the names are removed."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (path,) = Path(folder).glob("**/*.trace.json.gz")
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    devices = {
        event["pid"]
        for event in events
        if event.get("name") == "process_name" and "/device:" in event["args"]["name"]
    }
    streams = {
        (event["pid"], event["tid"])
        for event in events
        if event.get("name") == "thread_name" and event["args"]["name"].startswith("Stream")
    }
    total: collections.Counter[str] = collections.Counter()
    for event in events:
        if event.get("ph") == "X" and event["pid"] in devices and (event["pid"], event["tid"]) in streams:
            total[re.sub(r"[._]?\d+", "", event["name"])] += event["dur"] / 1000
    return dict(total.most_common())


def summary(run: Callable[[], Any], most: int = 30) -> list[dict[str, Any]]:
    """The slowest kernels, with their share of all device time."""
    times = kernel_times(run)
    whole = sum(times.values())
    rows: list[dict[str, Any]] = [{"kernel": "all", "ms": round(whole, 2), "share": 1.0}]
    for name, ms in list(times.items())[:most]:
        rows.append({"kernel": name[:90], "ms": round(ms, 2), "share": round(ms / max(whole, 1e-9), 4)})
    return rows
