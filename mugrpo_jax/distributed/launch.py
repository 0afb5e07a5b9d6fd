"""Several hosts as one run: how they find each other, what they agree on, and how they end together.

Arrays move between hosts inside jitted programs. What is here are the few words that hosts exchange outside
of them, through the coordination service of `jax.distributed`, every wait bounded. With one process all of
it is immediate.
"""

import contextlib
import itertools
import json
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.clusters import ClusterEnv
from jax._src.distributed import global_state
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mugrpo_jax.config import ConfigError, differing_keys

GONE = 75  # exit status of a host that stops because another one is gone: try again

_ROUND_S = 1.0  # between two looks at the other hosts
_WAIT_S = 3600.0  # for slower hosts; one that died is noticed long before
_NEWS = "mugrpo/news"
_calls = itertools.count()


class Stopped(Exception):
    """The run was asked to stop (SIGTERM or Ctrl-C), all hosts agreed, and everything is on disk."""


@contextlib.contextmanager
def hosts(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    timeout_s: float = 100.0,
) -> Iterator[None]:
    """Join the other hosts, and end together with them; to be entered before anything touches a device.

    The three together name the run's hosts. Without them, a cluster that JAX recognises by itself (SLURM,
    Open MPI, TPU) is joined, and everywhere else the run has one process.

    Args:
      coordinator: `host:port` of process 0.
      processes: how many there are.
      process: which one this is, from 0.
      timeout_s: how long to wait for the others, and for their next sign of life.
    """
    _connect(coordinator, processes, process, timeout_s)
    if global_state.client is None or jax.process_count() == 1:
        yield
        return
    watcher, stopped = _Watcher(), None
    try:
        try:
            yield
        except Stopped as agreed:
            stopped = agreed
        gather("end", None)
    except (ValueError, OSError) as error:
        watcher.fail(" ".join(str(error).split()))
    except BaseException as error:
        # If another host is gone, which is most likely, the watcher says so and ends this one meanwhile.
        if isinstance(error, jax.errors.JaxRuntimeError):
            watcher.thread.join(timeout_s + 10)
        traceback.print_exc()
        watcher.fail(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    watcher.leave()
    if stopped is not None:
        raise stopped


def _connect(coordinator: str | None, processes: int | None, process: int | None, timeout_s: float) -> None:
    if (coordinator, processes, process) == (None, None, None):
        if global_state.client is None and _in_cluster():
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
        _reach(host, int(port), timeout_s)
    _initialize(
        coordinator, timeout_s, coordinator_address=coordinator, num_processes=processes, process_id=process
    )


def _in_cluster() -> bool:
    kinds = [kind for kind in ClusterEnv._cluster_types if not kind.opt_in_only_method]
    return any(kind.is_env_present() for kind in kinds)


def _check_port(port: int) -> None:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("::", port))
        except OSError as error:
            raise ConfigError(
                f"--coordinator: port {port} cannot be opened here ({error.strerror})"
            ) from None


def _reach(host: str, port: int, timeout_s: float) -> None:
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
    jax.config.update("jax_enable_preemption_service", False)  # stopping is agreed on here
    # JAX ends the process with a stack trace when its own time is up, so ours is a little shorter.
    late = threading.Timer(
        timeout_s, _end, [2, f"not all hosts of {where} were there within {timeout_s:g} s; start all of them"]
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


def _end(status: int, message: str) -> NoReturn:
    """Leave at once: whoever waits for a host that is gone would wait in vain."""
    print(f"mugrpo: {message}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(status)


# -- words between hosts


def gather(name: str, value: Any) -> list[Any]:
    """What each host says (anything JSON), by process; all hosts must ask in the same order."""
    if jax.process_count() == 1:
        return [value]
    client, call, mine = _client(), next(_calls), jax.process_index()
    client.key_value_set(f"mugrpo/{call}/{mine}", json.dumps(value))
    client.wait_at_barrier(f"mugrpo/{call}-{name}", int(1000 * _WAIT_S))
    found = dict(client.key_value_dir_get(f"mugrpo/{call}/"))
    if call:  # everybody is here, so everybody has read the last one
        client.key_value_delete(f"mugrpo/{call - 1}/{mine}")
    return [json.loads(found[f"mugrpo/{call}/{i}"]) for i in range(jax.process_count())]


def check_same(name: str, value: Mapping[str, Any]) -> None:
    """Refuse, on all hosts, what is not the same on all of them, naming the keys."""
    first, *others = gather(name, value)
    for i, other in enumerate(others, 1):
        if differing := differing_keys(other, first):
            raise ConfigError(
                f"hosts disagree on the {name}: {'; '.join(differing)} (there: process {i}, here: "
                "process 0); start all of them with the same command"
            )


@contextlib.contextmanager
def together(name: str) -> Iterator[None]:
    """A step that hosts take side by side: an error that one can name is an error on all."""
    failure: Exception | None = None
    try:
        yield
    except (ValueError, OSError) as error:
        failure = error
    failures = gather(name, None if failure is None else str(failure))
    if failure is not None:
        raise failure
    for process, message in enumerate(failures):
        if message is not None:
            raise ConfigError(f"process {process}: {message}")


class Vote:
    """Whether any host says yes, asked on the devices, so that no host waits for the answer."""

    def __init__(self, mesh: Mesh) -> None:
        everywhere = NamedSharding(mesh, P(mesh.axis_names))
        no, yes = np.zeros(mesh.size, np.float32), np.ones(mesh.size, np.float32)
        self._no, self._yes = (
            jax.make_array_from_callback(ballots.shape, everywhere, ballots.__getitem__)
            for ballots in (no, yes)
        )
        self._count = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, P()))

    def __call__(self, answer: bool) -> jax.Array:
        """1.0 if any host says yes, once the device has come this far."""
        return self._count(self._yes if answer else self._no)


# -- ending together


def share(stop: Any) -> None:
    """From here on, `stop.requested` of one host becomes that of all, within some seconds."""
    if _Watcher.current is not None:
        _Watcher.current.stop = stop


class _Watcher:
    """A thread that looks after the other hosts.

    A stop asked of one is asked of all; a failure of one, or its silence, ends all. A host that waits for
    another inside a program on the device cannot be woken, so the end is that of the process.
    """

    current: "_Watcher | None" = None

    def __init__(self) -> None:
        self.stop: Any = None
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._look, daemon=True)
        self.thread.start()
        _Watcher.current = self

    def leave(self) -> None:
        """End the thread, as all hosts do: one that is left waiting disturbs the end of the interpreter."""
        self.ended.set()
        self.thread.join()

    def fail(self, message: str) -> NoReturn:
        """Tell the other hosts why this one ends, and end."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            _client().key_value_set(f"{_NEWS}/failed", f"process {jax.process_index()}: {message}")
            if jax.process_index() == 0:
                time.sleep(3 * _ROUND_S)  # its words are lost with it
        _end(2, message)

    def _look(self) -> None:
        try:
            for number in itertools.count():
                if self._exchange(number):
                    return
                if failure := self._hear():
                    _end(2, failure)
        except jax.errors.JaxRuntimeError as error:
            silent = re.search(r"Task (\d+) heartbeat timeout", str(error))
            who = f"process {silent[1]} gives no sign of life" if silent else "process 0 is not reached"
            _end(GONE, f"another host is gone, {who}; the same command on all hosts continues")

    def _exchange(self, number: int) -> bool:
        """Wait for all hosts, which fails when one is gone; pass on what was asked of one.

        Whether all have ended: they said so before they met here, so all leave in the same round.
        """
        client, ending = _client(), f"{_NEWS}/ended/{number}"
        if self.ended.is_set():
            client.key_value_set(f"{ending}/{jax.process_index()}", "")
        client.wait_at_barrier(f"mugrpo/round-{number}", int(1000 * _WAIT_S))
        if self.stop is not None:
            if self.stop.requested:
                client.key_value_set(f"{_NEWS}/stop/yes", "", allow_overwrite=True)
            self.stop.requested |= bool(client.key_value_dir_get(f"{_NEWS}/stop/"))
        return len(client.key_value_dir_get(f"{ending}/")) == jax.process_count()

    def _hear(self) -> str | None:
        """Why another host fails, if one does before the next round: JAX, which ends this process when the
        first host dies, leaves no time to come and ask."""
        try:
            return _client().blocking_key_value_get(f"{_NEWS}/failed", int(1000 * _ROUND_S))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            return None


def _client() -> Any:
    assert global_state.client is not None
    return global_state.client
