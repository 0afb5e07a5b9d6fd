"""A connection of our own between the hosts, beside those of JAX.

Process 0 has a hub. Every process, process 0 too, keeps one connection to the hub for the whole run. The
connections carry small values, stop requests and errors, and they show at once that a process is dead: the
system closes the connections of a process that ends. JAX also notices, but then ends the process with a stack
trace instead of a message. So JAX's own connections go through tunnels that stay open.
"""

import asyncio
import contextlib
import itertools
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, NoReturn, TypeVar

from mugrpo_jax.config import ConfigError
from mugrpo_jax.distributed.absence import GONE, Absent
from mugrpo_jax.distributed.frames import BEAT_S, NotOurs, receive, send
from mugrpo_jax.distributed.host_hub import SAY_AFTER_S, SAY_EVERY_S, Hub, say_waiting
from mugrpo_jax.distributed.launchers import Launch
from mugrpo_jax.distributed.tunnel import open_tunnels

_ADDRESS_S = 5.0  # longest wait for an answer of one address of process 0
_Result = TypeVar("_Result")
_ending = threading.Lock()
_at_end: list[Callable[[], None]] = []


def at_end(action: Callable[[], None]) -> None:
    """Call `action` before `end_process` ends this process, which skips all other cleaning up."""
    _at_end.append(action)


def end_process(status: int, message: str) -> NoReturn:
    """Print a message and end this process at once, without waiting for other threads or hosts."""
    _ending.acquire()  # never released: only the first message is printed
    try:
        for action in _at_end:
            with contextlib.suppress(Exception):
                action()
        print(f"mugrpo: {message}", file=sys.stderr, flush=True)
        sys.stdout.flush()
    finally:  # printing fails if the terminal or pipe is closed; the process must end all the same
        os._exit(status)


class HostLink:
    """This process's connection to the hub of process 0, served by one thread.

    If one host is asked to stop, all hosts are asked to stop. If one host fails, is gone or is silent for
    `timeout_s` seconds, all processes end, because a host that waits in a device program cannot be
    interrupted.
    """

    current: "HostLink | None" = None

    def __init__(self, launch: Launch, timeout_s: float) -> None:
        self.launch = launch
        self.stop: Any = None
        self.stop_asked = False
        self._step = (0, "")
        self._timeout_s = timeout_s
        self._calls = itertools.count()
        self._waiting: dict[int, Future[list[Any]]] = {}
        self._failed = threading.Event()
        self._closing = False
        self._hub: Hub | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="host link", daemon=True)
        self._thread.start()
        try:
            self._run(self._connect())
        except BaseException:
            self._end_thread()
            raise
        HostLink.current = self

    def gather(self, name: str, value: Any) -> list[Any]:
        """Return the values of all processes, in process order."""
        call = next(self._calls)
        answer: Future[list[Any]] = Future()
        self._waiting[call] = answer
        self._run(self._send(["gather", call, name, value]))
        return answer.result()

    def jax_address(self) -> str:
        """Return the address at which this process reaches JAX's coordination service on process 0."""
        port = self._hub.jax_port if self._hub is not None else self._run(open_tunnels(self._open))
        return f"127.0.0.1:{port}"

    def fail(self, message: str, status: int) -> NoReturn:
        """Tell the other hosts why this host ends, and end it; all end with this status."""
        with contextlib.suppress(OSError):
            self._run(self._send(["fail", message, status]))
            self._failed.wait(3 * BEAT_S)  # the hub has told all others
        end_process(status, message)

    def close(self) -> None:
        """Wait until all hosts have ended their work; afterwards nobody minds a closed connection."""
        self.gather("end", None)
        HostLink.current = None
        self._end_thread()

    def share(self, stop: Any) -> None:
        """Set `stop.requested` when any host is asked to stop, and tell the other hosts if it is set here."""
        stop.requested |= self.stop_asked
        self.stop = stop

    def reached(self, step: str) -> None:
        """Tell the hub how far this process is; all processes reach the same steps in the same order."""
        self._step = (self._step[0] + 1, step)

    def _run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _connect(self) -> None:
        if self.launch.process == 0:
            self._hub = Hub(self.launch, self._timeout_s)
            await self._hub.listen()
        began = time.monotonic()
        next_line = began + SAY_AFTER_S
        while True:
            try:
                self._reader, self._writer = await self._open("link")
                break
            except OSError as error:
                now = time.monotonic()
                if now > began + self._timeout_s:
                    raise Absent(self._unreached(error)) from None
                if now > next_line:
                    next_line = now + SAY_EVERY_S
                    say_waiting(f"process 0 at {self._where()}", now - began, self._timeout_s)
            await asyncio.sleep(0.2)
        try:
            # The hub waits for the others until its own time limit, and says who is missing.
            kind, *rest = await asyncio.wait_for(receive(self._reader), self._timeout_s + 30)
        except TimeoutError:
            raise Absent(f"process 0 at {self._where()} is silent; start all processes again") from None
        except (OSError, EOFError):
            end_process(GONE, self._gone(0, "its connection is closed"))
        except NotOurs:
            raise ConfigError(f"{self._where()} answers, but is no process of this program") from None
        if kind in ("refused", "late"):
            raise (Absent if kind == "late" else ConfigError)(rest[0])
        self._heard = time.monotonic()
        self._tasks = [asyncio.create_task(work) for work in (self._listen(), self._beat())]  # kept alive

    async def _open(self, purpose: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host = "127.0.0.1" if self.launch.process == 0 else self.launch.host
        # The blocking call tries all addresses of the host, and its errors say what is wrong.
        connected = await asyncio.to_thread(socket.create_connection, (host, self.launch.port), _ADDRESS_S)
        connected.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=connected)
        await send(writer, ["hello", purpose, self.launch.process, self.launch.processes])
        return reader, writer

    async def _send(self, message: list[Any]) -> None:
        assert self._writer is not None
        await send(self._writer, message)

    def _end_thread(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            self._run(self._disconnect())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _disconnect(self) -> None:
        if self._hub is not None:
            self._hub.close()
        if self._writer is not None:
            self._writer.close()
        self._loop.set_exception_handler(lambda *_: None)  # asyncio reports cancelled servers as errors
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _listen(self) -> None:
        try:
            while not self._closing:
                kind, *rest = await receive(self._reader)
                self._heard = time.monotonic()
                await self._handle(kind, *rest)
        except (OSError, EOFError, NotOurs):
            await self._end(GONE, self._gone(0, "its connection is closed"))

    async def _handle(self, kind: str, *rest: Any) -> None:
        if kind == "gathered":
            call, name, values = rest
            self._closing |= name == "end"
            self._waiting.pop(call).set_result(values)
        elif kind == "stop":
            self.stop_asked = True
            if self.stop is not None:
                self.stop.requested = True
        elif kind == "gone":
            await self._end(GONE, self._gone(*rest))
        elif kind == "failed":
            process, message, status = rest
            if process == self.launch.process:
                self._failed.set()
            else:
                await self._end(status, message if process is None else f"process {process}: {message}")

    async def _beat(self) -> None:
        """Send a sign of life and a stop request; end this process if process 0 sends none."""
        while not self._closing:
            asked = self.stop is not None and self.stop.requested
            with contextlib.suppress(OSError):
                await self._send(["beat", asked, *self._step])
            await asyncio.sleep(BEAT_S)
            if time.monotonic() - self._heard > self._timeout_s:
                await self._end(GONE, self._gone(0, f"no sign of life for {self._timeout_s:g} s"))

    async def _end(self, status: int, message: str) -> None:
        if self._hub is not None:
            await asyncio.sleep(0.5 * BEAT_S)  # time for the hub to tell the others
        end_process(status, message)

    def _gone(self, process: int, why: str) -> str:
        return f"another host is gone: process {process}, {why}; the same command on all hosts continues"

    def _where(self) -> str:
        return f"{self.launch.host}:{self.launch.port}"

    def _unreached(self, error: OSError) -> str:
        why = error.strerror or "no answer"
        return (
            f"{self.launch.launcher}: process 0 at {self._where()} not reached within {self._timeout_s:g} s "
            f"({why}); start it, and check its name, its port and the firewall"
        )
