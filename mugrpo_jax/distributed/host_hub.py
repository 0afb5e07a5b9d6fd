"""The hub on process 0: waits for all processes, exchanges their values, and notices who is gone."""

import asyncio
import contextlib
import errno
import os
import socket
import sys
import time
from typing import Any

from mugrpo_jax.config import ConfigError
from mugrpo_jax.distributed.absence import GONE
from mugrpo_jax.distributed.frames import BEAT_S, NotOurs, frame, receive
from mugrpo_jax.distributed.launchers import Launch
from mugrpo_jax.distributed.tunnel import join_service

SLOW_S = 60.0  # after so long, say which process the others wait for
LATEST_S = 3600.0  # longest wait for a process that is alive but slow
SAY_AFTER_S, SAY_EVERY_S = 5.0, 60.0  # when, and how often, to say which process has not come
_HELLO_S = 10.0


def say_waiting(who: str, seconds: float, limit_s: float) -> None:
    """Print who is waited for at the start of a run."""
    if seconds < limit_s:
        waited = f"{seconds:.0f} s, at most {limit_s:g} s, see --host-timeout"
        print(f"hosts: waiting for {who} ({waited})", file=sys.stderr, flush=True)


class Hub:
    """Serves the connections of all processes, including that of process 0 itself."""

    def __init__(self, launch: Launch, timeout_s: float) -> None:
        self.jax_port = _free_port()
        self._launch = launch
        self._timeout_s = timeout_s
        self._members: dict[int, asyncio.StreamWriter] = {}
        self._heard: dict[int, float] = {}
        self._values: dict[int, dict[int, Any]] = {}
        self._began: dict[int, float] = {}
        self._steps: dict[int, tuple[int, str, float]] = {}
        self._warned: set[Any] = set()
        self._all_here = asyncio.Event()
        self._ended = False
        self._stopping = False
        self._servers: list[asyncio.Server] = []

    async def listen(self) -> None:
        """Open the port and serve it in the background."""
        sockets = _listen_everywhere(self._launch)
        self._servers = [await asyncio.start_server(self._serve, sock=found) for found in sockets]
        self._watch_task = asyncio.create_task(self._watch())

    def close(self) -> None:
        """Close the port; the tasks of the loop are cancelled elsewhere."""
        for server in self._servers:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until its end."""
        try:
            hello = await asyncio.wait_for(receive(reader, 1000), _HELLO_S)
            purpose, process, processes = hello[1:]
            if problem := self._problem(purpose, process, processes):
                writer.write(frame(["refused", problem]))
            elif purpose == "tunnel":
                await join_service(reader, writer, self.jax_port)
            else:
                await self._serve_member(reader, writer, process)
        except (OSError, EOFError, TimeoutError, NotOurs, ValueError):
            pass  # somebody else, such as a port scanner
        finally:
            writer.close()

    def _problem(self, purpose: str, process: int, processes: int) -> str | None:
        if processes != self._launch.processes:
            return (
                f"this is one of {processes} processes, but process 0 was started as one of "
                f"{self._launch.processes}; start all with the same number"
            )
        if process not in range(processes):
            return f"process {process} is not one of the {processes} processes, counted from 0"
        if purpose == "link" and process in self._members:
            return f"there is already a process {process}; give each process its own number"
        return None

    async def _serve_member(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, process: int
    ) -> None:
        self._members[process], self._heard[process] = writer, time.monotonic()
        if len(self._members) == self._launch.processes:
            self._all_here.set()
            self._tell_all(["ready"])
        try:
            while True:
                self._handle(process, *await receive(reader))
                self._heard[process] = time.monotonic()
        except (OSError, EOFError, NotOurs):
            del self._members[process], self._heard[process]  # before the start it may come again
            if self._all_here.is_set() and not self._ended:
                self._tell_all(["gone", process, "its connection is closed"])

    def _handle(self, process: int, kind: str, *rest: Any) -> None:
        if kind == "gather":
            call, name, value = rest
            values = self._values.setdefault(call, {})
            self._began.setdefault(call, time.monotonic())
            values[process] = (name, value)
            if len(values) == self._launch.processes:
                self._answer(call)
        elif kind == "beat":
            asked, steps, step = rest
            if steps != self._steps.get(process, (0,))[0]:
                self._steps[process] = (steps, step, time.monotonic())
            if asked and not self._stopping:
                self._stopping = True
                self._tell_all(["stop"])
        elif kind == "fail":
            self._tell_all(["failed", process, *rest])

    def _answer(self, call: int) -> None:
        values = [self._values[call][process] for process in range(self._launch.processes)]
        del self._values[call], self._began[call]
        name = values[0][0]
        for process, (other, _) in enumerate(values):
            if other != name:
                why = f"the hosts are out of step: process {process} is at {other!r}, process 0 at {name!r}"
                self._tell_all(["failed", None, why, 2])
                return
        self._ended |= name == "end"
        self._tell_all(["gathered", call, name, [value for _, value in values]])

    async def _watch(self) -> None:
        """Send signs of life, and end the run if a process does not come, is silent or is too slow."""
        began, pause = time.monotonic(), SAY_AFTER_S
        while not self._all_here.is_set():
            left = self._timeout_s - (time.monotonic() - began)
            if left <= 0:
                self._tell_all(["late", self._did_not_come()])
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all_here.wait(), min(pause, left))
                break
            say_waiting(self._absent(), time.monotonic() - began, self._timeout_s)
            pause = SAY_EVERY_S
        while True:
            self._tell_all(["beat"])
            await asyncio.sleep(BEAT_S)
            for process, heard in self._heard.items():
                if time.monotonic() - heard > self._timeout_s and not self._ended:
                    self._tell_all(["gone", process, f"no sign of life for {self._timeout_s:g} s"])
            for call, began in list(self._began.items()):
                self._check_slow(call, time.monotonic() - began)
            if len(self._steps) == self._launch.processes:
                self._check_steps()

    def _absent(self) -> str:
        """Return which processes have not come."""
        absent = [i for i in range(self._launch.processes) if i not in self._members]
        who = f"process{'es' if len(absent) > 1 else ''} {', '.join(map(str, absent[:8]))}"
        more = f" and {len(absent) - 8} more" if len(absent) > 8 else ""
        return f"{who}{more} of {self._launch.processes}"

    def _did_not_come(self) -> str:
        return (
            f"{self._absent()} did not come within {self._timeout_s:g} s; "
            "start all of them, or wait longer with --host-timeout"
        )

    def _check_slow(self, call: int, seconds: float) -> None:
        values = self._values.get(call)
        if not values or seconds < SLOW_S:
            return
        name = next(iter(values.values()))[0]
        slow = [process for process in range(self._launch.processes) if process not in values]
        who = ", ".join(map(str, slow))
        self._report(call, seconds, f"process {who} has not reached {name!r} for {seconds:.0f} s")

    def _check_steps(self) -> None:
        """Name the process that is behind, if neither it nor the processes ahead have moved for a while."""
        _, ahead, moved = max(self._steps.values())
        for process, (steps, step, since) in self._steps.items():
            seconds = time.monotonic() - max(moved, since)
            if step != ahead and seconds > SLOW_S:
                waiting = (
                    f"process {process} has been at {step!r} for {seconds:.0f} s, others are at {ahead!r}"
                )
                self._report((process, steps), seconds, waiting)

    def _report(self, key: Any, seconds: float, waiting: str) -> None:
        """Print once that the others wait for a process; after the longest wait, end the run."""
        if seconds > LATEST_S:
            self._tell_all(["failed", None, f"{waiting}; gave up", GONE])
        elif key not in self._warned:
            self._warned.add(key)
            print(f"mugrpo: {waiting}; the others wait", file=sys.stderr, flush=True)

    def _tell_all(self, message: list[Any]) -> None:
        data = frame(message)
        for writer in self._members.values():
            writer.write(data)  # does not wait, so that a process that hangs cannot delay the others


def _listen_everywhere(launch: Launch) -> list[socket.socket]:
    """Listen on all addresses of this host: on those of IPv4, and on those of IPv6 where there are any."""
    sockets: list[socket.socket] = []
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            sockets.append(_bound(family, address, launch.port))
        except OSError as error:
            if sockets and error.errno not in (errno.EADDRINUSE, errno.EACCES):
                continue  # a host without IPv6
            for found in sockets:
                found.close()
            why = os.strerror(error.errno or 0)
            raise ConfigError(
                f"{launch.launcher}: port {launch.port} cannot be opened here ({why}); give another "
                "with --coordinator, or with JAX_COORDINATOR_PORT on all hosts"
            ) from None
    return sockets


def _bound(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    found = socket.socket(family)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        found.bind((address, port))
    except OSError:
        found.close()
        raise
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
