"""A process finds its place in the run from flags, from JAX's variables, or from its launcher."""

import contextlib
import http.server
import threading

import pytest

from mugrpo_jax.config import ConfigError
from mugrpo_jax.distributed import launchers, tpu_metadata
from mugrpo_jax.distributed.launchers import Launch, find_launch

SLURM = {
    "SLURM_JOB_ID": "70001",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
}
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
GKE = {"TPU_WORKER_HOSTNAMES": "t-0.t,t-1.t,t-2.t,t-3.t", "TPU_WORKER_ID": "2"}
SLICES = {
    "MEGASCALE_COORDINATOR_ADDRESS": "s-0.s:8080",
    "MEGASCALE_NUM_SLICES": "2",
    "MEGASCALE_SLICE_ID": "1",
}
SLURM_PORT = 61440 + 70001 % 4096


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        (SLURM, Launch("SLURM", "gpu007", SLURM_PORT, 8, 5)),
        (SLURM | {"JAX_COORDINATOR_PORT": "9000"}, Launch("SLURM", "gpu007", 9000, 8, 5)),
        # An interactive shell of `salloc --ntasks 8` is a step with one task.
        (
            SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
            Launch("SLURM", "gpu007", SLURM_PORT, 1, 0),
        ),
        # A batch script has no step.
        ({name: SLURM[name] for name in SLURM if "STEP" not in name}, None),
        (OPEN_MPI, Launch("Open MPI", "10.96.0.1", 61440 + 0, 4, 3)),
        (GKE, Launch("GKE", "t-0.t", 8482, 4, 2)),
        (GKE | SLICES, Launch("GKE, 2 slices", "s-0.s", 8482, 8, 6)),
        (
            {"JAX_COORDINATOR_ADDRESS": "[fd00::1]:80", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"},
            Launch("JAX_COORDINATOR_ADDRESS", "fd00::1", 80, 2, 1),
        ),
    ],
)
def test_a_launcher_is_recognised(environment, expected, monkeypatch):
    monkeypatch.setattr(launchers.zlib, "crc32", lambda job: 0)
    assert find_launch(environment=environment | {"TPU_SKIP_MDS_QUERY": "1"}) == expected


def test_flags_come_first_and_the_launcher_gives_the_rest():
    assert find_launch("a:1", 2, 0, SLURM) == Launch("--coordinator", "a", 1, 2, 0)
    assert find_launch("a:1", None, None, SLURM) == Launch("SLURM", "a", 1, 8, 5)


def test_open_mpi_5_on_one_host_needs_no_address_and_on_several_asks_for_it():
    five = {name: OPEN_MPI[name] for name in OPEN_MPI if "uri" not in name}
    with pytest.raises(ConfigError, match="Open MPI does not say where process 0 runs; add --coordinator"):
        find_launch(environment=five)
    assert find_launch(environment=five | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}).host == "localhost"
    assert find_launch("a:1", environment=five) == Launch("Open MPI", "a", 1, 4, 3)


@pytest.mark.parametrize(
    ("flags", "environment", "message"),
    [
        (("a:1", 2, None), {}, "--coordinator, --processes and --process go together; got a:1, 2, None"),
        (("a", 2, 0), {}, "--coordinator: expected host:port, such as 10.0.0.1:8476, got 'a'"),
        (("a:99999999", 2, 0), {}, "--coordinator: port 99999999 is not between 1 and 65535"),
        (("a:0", 2, 0), {}, "--coordinator: port 0 is not between 1 and 65535"),
        (("a:²", 2, 0), {}, "--coordinator: expected host:port, such as 10.0.0.1:8476, got 'a:²'"),
        (("a:80", 2, 2), {}, "--process: 2 is not one of the 2 processes, counted from 0"),
        (("a:80", 2, -1), {}, "--process: -1 is not one of the 2 processes, counted from 0"),
        (("a:80", 0, 0), {}, "--processes: expected at least 1, got 0"),
        ((), {"JAX_NUM_PROCESSES": "two"}, "variable JAX_NUM_PROCESSES: expected a number, got 'two'"),
        ((), SLURM | {"SLURM_PROCID": "x"}, "variable SLURM_PROCID: expected a number, got 'x'"),
        ((), SLURM | {"SLURM_JOB_ID": ""}, "variable SLURM_JOB_ID: expected a number, got ''"),
    ],
)
def test_places_that_cannot_be_are_refused_in_words(flags, environment, message):
    with pytest.raises(ConfigError) as caught:
        find_launch(*flags, environment=environment)
    assert str(caught.value).endswith(message)


@contextlib.contextmanager
def metadata_server(attributes):
    """The metadata server of a TPU VM, as far as it is asked."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            found = attributes.get(self.path.rpartition("/")[2])
            self.send_response(200 if found is not None and "Metadata-Flavor" in self.headers else 404)
            self.end_headers()
            self.wfile.write((found or "").encode())

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


VM = {"agent-worker-number": "1", "worker-network-endpoints": "u:1:10.0.0.7,v:2:10.0.0.8"}


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({}, None),
        (VM, Launch("TPU VM", "10.0.0.7", 8482, 2, 1)),
        (VM | {"worker-network-endpoints": "h0,h1"}, Launch("TPU VM", "h0", 8482, 2, 1)),
        (
            VM | {"tpu-env": "A: 'b'\n" + "\n".join(f"{name}: '{SLICES[name]}'" for name in SLICES)},
            Launch("TPU VM, 2 slices", "s-0.s", 8482, 4, 3),
        ),
    ],
)
def test_a_tpu_vm_asks_its_metadata_server(attributes, expected, monkeypatch):
    monkeypatch.setattr(tpu_metadata.importlib.util, "find_spec", lambda name: object())
    with metadata_server(attributes) as address:
        assert find_launch(environment={"GCE_METADATA_IP": address}) == expected


@pytest.mark.parametrize("environment", [SLURM, OPEN_MPI, GKE, GKE | SLICES])
def test_the_place_is_the_one_that_jax_finds(environment, monkeypatch):
    """Compares with JAX's own detection, which is private; without it there is nothing to compare."""
    clusters = pytest.importorskip("jax._src.clusters")
    cloud_tpu = pytest.importorskip("jax._src.clusters.cloud_tpu_cluster")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cloud_tpu, "running_in_cloud_tpu_vm", True)
    monkeypatch.setattr(cloud_tpu.BaseTpuCluster, "wait_for_coordinator", lambda *_: None)
    monkeypatch.setattr(cloud_tpu, "get_tpu_env_value_from_metadata", lambda name: None)
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    ours = find_launch()
    address, processes, process, _ = clusters.ClusterEnv.auto_detect_unset_distributed_params(
        None, None, None, [0], None, 1
    )
    assert (ours.processes, ours.process) == (processes, process)
    assert address.rpartition(":")[0] == ours.host
