"""Connect the hosts of a run, and end the run on all hosts together."""

import contextlib
import socket
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

import jax

from mugrpo_jax.config import ConfigError
from mugrpo_jax.distributed.host_agreement import gather
from mugrpo_jax.distributed.host_watchdog import Watcher, end_process
from mugrpo_jax.distributed.jax_internals import coordination_client, in_cluster


class Stopped(Exception):
    """Raised after a stop request (SIGTERM or Ctrl-C), when all hosts agreed and everything is on disk."""


@contextlib.contextmanager
def hosts(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    timeout_s: float = 100.0,
) -> Iterator[None]:
    """Connect to the other hosts for a `with` block that must start before anything uses a device.

    If a host fails, all hosts end. Give all of the first three arguments or none. With none, JAX connects the
    processes of a cluster that it detects (SLURM, Open MPI, TPU); everywhere else the run has one process.

    Args:
      coordinator: `host:port` of process 0.
      processes: number of processes.
      process: index of this process, from 0.
      timeout_s: longest wait, in seconds, for the other hosts to start, and later for their heartbeats.
    """
    _connect(coordinator, processes, process, timeout_s)
    if coordination_client() is None or jax.process_count() == 1:
        yield
        return
    watcher, stopped = Watcher(), None
    try:
        try:
            yield
        except Stopped as agreed:
            stopped = agreed
        gather("end", None)
    except (ValueError, OSError) as error:
        watcher.fail(" ".join(str(error).split()))
    except BaseException as error:
        # Most likely another host is gone. Then the watcher reports it and ends this process while we wait.
        if isinstance(error, jax.errors.JaxRuntimeError):
            watcher.thread.join(timeout_s + 10)
        traceback.print_exc()
        watcher.fail(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    watcher.leave()
    if stopped is not None:
        raise stopped


def _connect(coordinator: str | None, processes: int | None, process: int | None, timeout_s: float) -> None:
    if (coordinator, processes, process) == (None, None, None):
        if coordination_client() is None and in_cluster():
            _initialize("the cluster", timeout_s)
        return
    if coordinator is None or processes is None or process is None:
        raise ConfigError(
            f"--coordinator, --processes and --process go together; got {coordinator}, {processes}, {process}"
        )
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"--coordinator: expected host:port, such as 10.0.0.1:8476, got {coordinator!r}")
    if not 0 <= process < processes:
        raise ConfigError(f"--process: {process} is not one of the {processes} processes, counted from 0")
    if processes == 1:
        return
    if process == 0:
        _check_port(int(port))
    else:
        _wait_for_port(host, int(port), timeout_s)
    _initialize(
        coordinator, timeout_s, coordinator_address=coordinator, num_processes=processes, process_id=process
    )


def _check_port(port: int) -> None:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("::", port))
        except OSError as error:
            raise ConfigError(
                f"--coordinator: port {port} cannot be opened here ({error.strerror})"
            ) from None


def _wait_for_port(host: str, port: int, timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host, port), timeout=timeout_s).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                why = error.strerror or error
                raise ConfigError(
                    f"--coordinator: {host}:{port} not reached within {timeout_s:g} s ({why})"
                ) from None
        time.sleep(0.2)


def _initialize(where: str, timeout_s: float, **settings: Any) -> None:
    jax.config.update("jax_enable_preemption_service", False)  # `StopRequest` handles SIGTERM
    # At its own timeout JAX ends the process with a stack trace; ours is shorter and prints one line.
    late = threading.Timer(
        timeout_s,
        end_process,
        [2, f"not all hosts of {where} were there within {timeout_s:g} s; start all of them"],
    )
    late.daemon = True
    late.start()
    jax.distributed.initialize(
        **settings,
        initialization_timeout=int(timeout_s) + 30,
        heartbeat_timeout_seconds=max(1, int(timeout_s)),
        shutdown_timeout_seconds=max(1, int(timeout_s)),
    )
    late.cancel()
