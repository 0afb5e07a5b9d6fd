"""Start the processes of a tiny run on this machine as a launcher would start them on several hosts.

Each process gets the variables or flags of the launcher, and imitated devices of the CPU.
"""

import contextlib
import dataclasses
import http.server
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import quick_programs

from mugrpo_jax import rollouts
from mugrpo_jax.setup.trained_model import trained_model

logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax logs a lot about every checkpoint
CONFIG = """
model:
  source: tiny
  tiny: {hidden_size: 16, num_layers: 1, num_heads: 2, num_kv_heads: 2, intermediate_size: 16}
  compute_dtype: float32
  sampling_dtype: float32
  remat: none
task: {name: arithmetic, options: {difficulty: 1, train: 32, test: 5}, reward: host_rewards:short, scorers: 0}
sampling: {max_prompt_tokens: 8, max_response_tokens: 12, slots: 8, prompts_per_shard: 2}
batch: {prompts_per_update: 2, responses_per_prompt: 4, updates_per_stage: 4, stages: 2,
        tokens_per_micro_batch: 256, length_multiple: 32}
optimizer: {learning_rate: 1.0e-2, eps: 1.0e-3}
warm_start: {updates: 2, rows_per_update: 8}
evaluation: {problems: 5}
checkpoints: {every: 3, keep_last: 9, keep_best: 0}
report: {samples: 0}
track_drift: false
"""
UPDATES = 8
# JAX sets TPU_SKIP_MDS_QUERY on a machine without TPU chips. A host with libtpu and without the variable asks
# the metadata server.
ON_TPU_VM = (
    "os.environ.pop('TPU_SKIP_MDS_QUERY', None); import importlib.util as u; find = u.find_spec; "
    "u.find_spec = lambda name, *more: u if name == 'libtpu' else find(name, *more)"
)
PROGRAM = "import os, jax; {before}; import sys; from mugrpo_jax.cli.main import main; sys.exit(main())"


@dataclasses.dataclass(frozen=True)
class Place:
    """What a launcher gives one process."""

    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    flags: Sequence[str] = ()
    before: str = "pass"


def free_port(low: int = 20000, high: int = 30000) -> int:
    for port in np.random.default_rng().integers(low, high, 100).tolist():
        with socket.socket() as probe:
            if probe.connect_ex(("localhost", port)):
                return port
    raise SystemExit("no free port")


def flags(count: int, host: str = "localhost") -> list[Place]:
    where = ["--coordinator", f"{host}:{free_port()}", "--processes", str(count)]
    return [Place(flags=[*where, "--process", str(i)]) for i in range(count)]


def variables(count: int) -> list[Place]:
    names = {"JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}", "JAX_NUM_PROCESSES": str(count)}
    return [Place(names | {"JAX_PROCESS_ID": str(i)}) for i in range(count)]


def slurm(nodes: int, tasks_per_node: int) -> list[Place]:
    tasks = nodes * tasks_per_node
    names = {
        "SLURM_JOB_ID": str(free_port(61440, 65535) - 61440),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": str(tasks),
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_TASKS_PER_NODE": f"{tasks_per_node}(x{nodes})",
    }
    return [
        Place(
            names
            | {
                "SLURM_PROCID": str(i),
                "SLURM_LOCALID": str(i % tasks_per_node),
                "SLURM_NODEID": str(i // tasks_per_node),
            }
        )
        for i in range(tasks)
    ]


def open_mpi(count: int, version: int) -> list[Place]:
    names = {
        "OMPI_COMM_WORLD_SIZE": str(count),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "1" if version == 4 else str(count),
    }
    if version == 4:
        names["OMPI_MCA_orte_hnp_uri"] = f"{free_port() << 12}.0;tcp://127.0.0.1:34911"
    else:
        names["PMIX_NAMESPACE"] = f"prterun-{free_port()}@1"
    local = [0] * count if version == 4 else range(count)
    return [
        Place(names | {"OMPI_COMM_WORLD_RANK": str(i), "OMPI_COMM_WORLD_LOCAL_RANK": str(local[i])})
        for i in range(count)
    ]


def gke(slices: int, hosts: int) -> list[Place]:
    names = {
        "TPU_WORKER_HOSTNAMES": ",".join(["localhost"] * hosts),
        "JAX_COORDINATOR_PORT": str(free_port()),
    }
    if slices > 1:
        names |= {"MEGASCALE_NUM_SLICES": str(slices), "MEGASCALE_COORDINATOR_ADDRESS": "localhost:8080"}
    return [
        Place(names | {"TPU_WORKER_ID": str(i % hosts), "MEGASCALE_SLICE_ID": str(i // hosts)})
        for i in range(slices * hosts)
    ]


@contextlib.contextmanager
def tpu_vm(count: int) -> Iterator[list[Place]]:
    """Hosts of a TPU slice, each with its metadata server."""
    port, servers, places = str(free_port()), [], []
    for i in range(count):
        attributes = {"agent-worker-number": str(i)}
        attributes["worker-network-endpoints"] = ",".join(["unknown:unknown:127.0.0.1"] * count)

        class Handler(http.server.BaseHTTPRequestHandler):
            found = attributes

            def do_GET(self) -> None:
                text = self.found.get(self.path.rpartition("/")[2])
                self.send_response(404 if text is None else 200)
                self.end_headers()
                self.wfile.write((text or "").encode())

            def log_message(self, *arguments: Any) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        names = {"GCE_METADATA_IP": f"127.0.0.1:{server.server_port}", "JAX_COORDINATOR_PORT": port}
        places.append(Place(names, before=ON_TPU_VM))
    try:
        yield places
    finally:
        for server in servers:
            server.shutdown()


def prepare(work: Path) -> None:
    """Write the config and the reward of the tiny run."""
    work.mkdir(parents=True, exist_ok=True)
    (work / "hosts.yaml").write_text(CONFIG)
    (work / "host_rewards.py").write_text("def short(text, problem):\n    return 1.0 / (1 + len(text))\n")


def environment(out: Path, devices: int, processes: int = 2) -> dict[str, str]:
    """Return the variables of a process with imitated devices; compiled programs are shared between runs."""
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {quick_programs.flags()}",
        **quick_programs.THREADS,
        "PYTHONPATH": os.pathsep.join([str(out.parent), str(Path(__file__).parents[1])]),
        "JAX_COMPILATION_CACHE_DIR": str(out.parent / f"programs-{processes}"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


def start(
    out: Path, places: Sequence[Place], devices_each: int, *overrides: str, timeout: int = 60
) -> list[subprocess.Popen[bytes]]:
    """Start the processes of a run; process I writes its output to OUT-I.log beside the run's folder."""
    running = []
    for i, place in enumerate(places):
        command = [
            sys.executable,
            "-c",
            PROGRAM.format(before=place.before),
            "train",
            str(out.parent / "hosts.yaml"),
        ]
        with log(out, i).open("wb") as shown:
            process = subprocess.Popen(
                [*command, "--out", str(out), "--host-timeout", str(timeout), *place.flags, *overrides],
                env=environment(out, devices_each, len(places)) | dict(place.variables),
                stdout=shown,
                stderr=subprocess.STDOUT,
            )
        running.append(process)
    return running


def log(out: Path, process: int) -> Path:
    return out.parent / f"{out.name}-{process}.log"


def wait(running: Sequence[subprocess.Popen[bytes]], seconds: float) -> list[int | None]:
    """Wait for all processes and return their exit statuses; after `seconds`, kill those that still run."""
    end = time.monotonic() + seconds
    codes: list[int | None] = []
    for process in running:
        try:
            codes.append(process.wait(max(0.1, end - time.monotonic())))
        except subprocess.TimeoutExpired:
            process.kill()
            codes.append(None)
    return codes


def difference(a: Path, b: Path) -> tuple[bool, float]:
    """Compare the ends of two runs: are all sampled tokens equal, and how far apart are the weights?"""
    tokens = []
    for folder in (a, b):
        stages = sorted((folder / "rollouts").iterdir())
        groups = [group for stage in stages for group in rollouts.read_groups(rollouts.open_stage(stage))]
        tokens.append([rollout.tokens.tolist() for group in groups for rollout in group.rollouts])
    weights = [jax.tree.leaves(jax.device_get(trained_model(folder, UPDATES).params)) for folder in (a, b)]
    return tokens[0] == tokens[1], max(float(np.abs(x - y).max()) for x, y in zip(*weights, strict=True))
