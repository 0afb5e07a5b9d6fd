"""Find out from flags and environment variables which process of which run this process is.

Detection reads what the launcher sets. It does not use JAX's own detection, which is private and gives every
task of SLURM and Open MPI one device.
"""

import dataclasses
import os
import re
import zlib
from collections.abc import Callable, Mapping

from mugrpo_jax.config import ConfigError
from mugrpo_jax.distributed.tpu_metadata import tpu_attribute, tpu_environment

_LOWEST_PORT = 61440  # above the ports that systems hand out themselves; 4096 ports are left
_TPU_PORT = 8482


@dataclasses.dataclass(frozen=True)
class Launch:
    """What a launcher says about this process.

    Attributes:
      launcher: the launcher's name, for messages.
      host: name or address of the host of process 0; None if the launcher does not say it.
      port: the port at which process 0 listens.
      processes: number of processes.
      process: index of this process, from 0.
    """

    launcher: str
    host: str | None
    port: int
    processes: int
    process: int


def find_launch(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Launch | None:
    """Return this process's place among the processes of the run, or None if it runs alone.

    Flags come first. Flags that are missing are taken from JAX's variables, then from the launcher.
    """
    by_hand = "--coordinator" if coordinator else "JAX_COORDINATOR_ADDRESS"
    coordinator = coordinator or environment.get("JAX_COORDINATOR_ADDRESS")
    processes = _number(environment, "JAX_NUM_PROCESSES") if processes is None else processes
    process = _number(environment, "JAX_PROCESS_ID") if process is None else process
    given = (coordinator, processes, process)
    found = None if None not in given else _detect(environment)
    if found is None and given == (None, None, None):
        return None
    if found is None and None in given:
        raise ConfigError(
            f"--coordinator, --processes and --process go together; got {coordinator}, {processes}, {process}"
        )
    host, port = (found.host, found.port) if coordinator is None and found else _split(coordinator or "")
    launch = Launch(
        by_hand if found is None else found.launcher,
        host,
        port,
        found.processes if processes is None and found else processes or 0,
        found.process if process is None and found else process or 0,
    )
    return _checked(launch)


def _checked(launch: Launch) -> Launch:
    if launch.processes < 1:
        raise ConfigError(f"--processes: expected at least 1, got {launch.processes}")
    if not 0 <= launch.process < launch.processes:
        raise ConfigError(
            f"--process: {launch.process} is not one of the {launch.processes} processes, counted from 0"
        )
    if launch.host is None and launch.processes > 1:
        raise ConfigError(
            f"{launch.launcher} does not say where process 0 runs; add --coordinator HOST:PORT, with the "
            "name of its host and a free port"
        )
    return launch


def _split(coordinator: str) -> tuple[str, int]:
    host, _, port = coordinator.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    if not host or not port.isdecimal() or not port.isascii():
        raise ConfigError(f"--coordinator: expected host:port, such as 10.0.0.1:8476, got {coordinator!r}")
    if not 1 <= int(port) <= 65535:
        raise ConfigError(f"--coordinator: port {port} is not between 1 and 65535")
    return host, int(port)


def _detect(environment: Mapping[str, str]) -> Launch | None:
    launchers: tuple[Callable[[Mapping[str, str]], Launch | None], ...] = (_open_mpi, _slurm, _tpu)
    return next((found for launcher in launchers if (found := launcher(environment)) is not None), None)


def _slurm(environment: Mapping[str, str]) -> Launch | None:
    """Tasks of `srun`. A batch script itself has no step: without `srun`, a command runs alone."""
    needed = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
    if any(name not in environment for name in needed):
        return None
    port = _port(environment, _integer(environment, "SLURM_JOB_ID"))
    first = first_host(environment["SLURM_STEP_NODELIST"])
    tasks, task = (_integer(environment, name) for name in needed[2:])
    return Launch("SLURM", first, port, tasks, task)


def first_host(nodes: str) -> str:
    """Return the first host of a SLURM list of hosts.

    >>> [first_host(nodes) for nodes in ("gpu7", "gpu[007-009,12],login", "rack[1-2]node[3,5]", "a,b[1-2]")]
    ['gpu7', 'gpu007', 'rack1node3', 'a']
    """
    name, inside, skipping = "", False, False
    for letter in nodes:
        if letter == "," and not inside:
            break
        if letter in "[]":
            inside, skipping = letter == "[", False
        elif inside and letter in ",-":
            skipping = True
        elif not skipping:
            name += letter
    return name


def _open_mpi(environment: Mapping[str, str]) -> Launch | None:
    """Ranks of `mpirun`. Open MPI 4 says where `mpirun` runs; Open MPI 5 does not say it any more."""
    if "OMPI_COMM_WORLD_RANK" not in environment:
        return None
    size, rank = (_integer(environment, f"OMPI_COMM_WORLD_{name}") for name in ("SIZE", "RANK"))
    address = environment.get("OMPI_MCA_orte_hnp_uri", "")
    job = address.partition(";")[0] or environment.get("PMIX_NAMESPACE", "").partition("@")[0]
    # Such as 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911 or 1314521088.0;tcp6://[fe80::1,2620::2]:43370
    first = re.search(r"tcp6?://\[?([^,\]]+?)(?:,|\]|:\d+(?:;|$))", address)
    host = first[1] if first else None
    if environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") == str(size):
        host = "localhost"
    return Launch("Open MPI", host, _port(environment, zlib.crc32(job.encode())), size, rank)


def _tpu(environment: Mapping[str, str]) -> Launch | None:
    """Hosts of a TPU slice, or of several slices: variables on GKE, the metadata server on a TPU VM."""
    names = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES")
    if names is not None and "TPU_WORKER_ID" in environment:
        launcher, worker = "GKE", _integer(environment, "TPU_WORKER_ID")
        hosts = names.split(",")
        variables = environment
    elif (number := tpu_attribute("agent-worker-number", environment)) is not None:
        launcher, worker = "TPU VM", int(number)
        # An entry is a name, or name:id:address on older systems.
        workers = tpu_attribute("worker-network-endpoints", environment) or "localhost"
        hosts = [entry.rpartition(":")[2] for entry in workers.split(",")]
        variables = tpu_environment(environment) | dict(environment)
    else:
        return None
    slices = int(variables.get("MEGASCALE_NUM_SLICES") or 1)
    this_slice = int(variables.get("MEGASCALE_SLICE_ID") or 0)
    first = variables.get("MEGASCALE_COORDINATOR_ADDRESS") or hosts[0]
    return Launch(
        f"{launcher}, {slices} slices" if slices > 1 else launcher,
        first.partition(":")[0],
        _number(environment, "JAX_COORDINATOR_PORT") or _TPU_PORT,
        slices * len(hosts),
        this_slice * len(hosts) + worker,
    )


def _port(environment: Mapping[str, str], job: int) -> int:
    """Return a port that all processes of a job derive, and that differs between jobs on one host."""
    return _number(environment, "JAX_COORDINATOR_PORT") or _LOWEST_PORT + job % (65536 - _LOWEST_PORT)


def _number(environment: Mapping[str, str], variable: str) -> int | None:
    return None if variable not in environment else _integer(environment, variable)


def _integer(environment: Mapping[str, str], variable: str) -> int:
    text = environment.get(variable, "")
    if not text.isdecimal() or not text.isascii():
        raise ConfigError(f"environment variable {variable}: expected a number, got {text!r}")
    return int(text)
