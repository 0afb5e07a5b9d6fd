"""Connect the hosts of a run, and end the run on all hosts together."""

import contextlib
import os
import signal
import threading
import time
import traceback
from collections.abc import Iterator

import jax

from mugrpo_jax.config import ConfigError
from mugrpo_jax.distributed.absence import GONE, Absent
from mugrpo_jax.distributed.host_link import HostLink, end_process
from mugrpo_jax.distributed.launchers import Launch, find_launch
from mugrpo_jax.distributed.local_devices import choose_devices, view_devices

_MERCY_S = 5.0  # an error of JAX may come from the death of a host; wait so long to hear of it
_JAX_LATER_S = 60  # JAX ends processes with a stack trace; it must notice a silent host after us


class Stopped(Exception):
    """Raised after a stop request (SIGTERM or Ctrl-C), when all hosts agreed and everything is on disk.

    Its text says what is saved.
    """


@contextlib.contextmanager
def hosts(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    timeout_s: float = 100.0,
) -> Iterator[None]:
    """Connect to the other hosts for a `with` block that must start before anything uses a device.

    If a host fails, all hosts end. Arguments that are None come from environment variables: those of JAX, or
    those of SLURM, Open MPI and TPU slices. Without any, the run has one process.

    Args:
      coordinator: `host:port` of process 0.
      processes: number of processes.
      process: index of this process, from 0.
      timeout_s: longest wait, in seconds, for the other hosts to start, and later for their signs of life.
    """
    if not 0 < timeout_s < float("inf"):
        raise ConfigError(f"--host-timeout: expected a number of seconds above 0, got {timeout_s:g}")
    launch = find_launch(coordinator, processes, process)
    if launch is None or launch.processes == 1:
        _announce(launch)
        yield
        return
    link, stopped = HostLink(launch, timeout_s), None
    try:
        _initialize_jax(link, timeout_s)
        _announce(launch)
        try:
            yield
        except Stopped as agreed:
            stopped = agreed
        link.gather("done", None)
        jax.distributed.shutdown()
    except (ValueError, OSError) as error:
        link.fail(" ".join(str(error).split()), GONE if isinstance(error, Absent) else 2)
    except KeyboardInterrupt:
        link.fail("interrupted; the same command on all hosts continues", 128 + signal.SIGINT)
    except BaseException as error:
        if isinstance(error, jax.errors.JaxRuntimeError):
            time.sleep(_MERCY_S)  # if a host is gone, the link ends this process meanwhile
        traceback.print_exc()
        link.fail(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}", 1)
    link.close()
    if stopped is not None:
        raise stopped


def _initialize_jax(link: HostLink, timeout_s: float) -> None:
    views = link.gather("devices", view_devices())
    devices = [choose_devices(views, process) for process in range(link.launch.processes)]
    jax.config.update("jax_enable_preemption_service", False)  # `StopRequest` handles SIGTERM
    # At its own timeout JAX ends the process with a stack trace; ours is shorter and prints one line.
    late = threading.Timer(
        timeout_s, end_process, [GONE, f"JAX did not connect the processes within {timeout_s:g} s"]
    )
    late.daemon = True
    late.start()
    _avoid_proxies()
    address = link.jax_address()
    jax.distributed.initialize(
        coordinator_address=address,
        coordinator_bind_address=address,
        num_processes=link.launch.processes,
        process_id=link.launch.process,
        local_device_ids=devices[link.launch.process],
        cluster_detection_method="deactivate",
        initialization_timeout=int(timeout_s) + _JAX_LATER_S,
        heartbeat_timeout_seconds=int(timeout_s) + _JAX_LATER_S,
        shutdown_timeout_seconds=int(timeout_s) + _JAX_LATER_S,
    )
    late.cancel()


def _avoid_proxies() -> None:
    """Keep JAX from asking a proxy of the environment for a connection inside this host."""
    if not any(name.lower() in ("grpc_proxy", "http_proxy", "https_proxy") for name in os.environ):
        return
    direct = os.environ.get("no_grpc_proxy", os.environ.get("no_proxy", ""))  # noqa: SIM112 (gRPC reads these)
    os.environ["no_grpc_proxy"] = ",".join(filter(None, [direct, "127.0.0.1"]))  # noqa: SIM112


def _announce(launch: Launch | None) -> None:
    """Print which processes and devices were found, and check that all processes have equally many."""
    link = HostLink.current
    mine = f"{jax.local_device_count()} {jax.default_backend()}"
    found = [mine] if link is None else link.gather("found", mine)
    for process, other in enumerate(found):
        if other != found[0]:
            raise ConfigError(
                f"process {process} has {other} devices, but process 0 has {found[0]} devices; all processes "
                "need the same number of the same kind"
            )
    if jax.process_index() == 0:
        through = "" if launch is None else f" through {launch.launcher}"
        each = f", {jax.local_device_count()} in each process" if len(found) > 1 else ""
        print(
            f"hosts: {len(found)} process{'es' if len(found) > 1 else ''}{through}, {jax.device_count()} "
            f"{jax.default_backend()} device{'s' if jax.device_count() > 1 else ''}{each}",
            flush=True,
        )
