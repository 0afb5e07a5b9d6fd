"""Carry the connections of JAX's coordination service over the port of the hub.

JAX ends a process with a stack trace as soon as its connection to process 0 is closed. A tunnel stays open
on the side of JAX, so that the process can end with a message of ours. JAX's service listens only inside its
host, so hosts need to reach only one port of process 0.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]

_CHUNK = 1 << 16


async def open_tunnels(connect: Callable[[str], Awaitable[Stream]]) -> int:
    """Listen inside this host for connections of JAX, carry each to the hub, and return the port."""

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError), contextlib.closing(writer):
            hub_reader, hub_writer = await connect("tunnel")
            with contextlib.closing(hub_writer):
                # When the hub closes its side, JAX's side stays open on purpose, until JAX closes it.
                await asyncio.gather(_copy(reader, hub_writer), _copy(hub_reader, writer, close=False))

    server = await asyncio.start_server(carry, "127.0.0.1", 0)
    return server.sockets[0].getsockname()[1]


async def join_service(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
    """Carry a connection that arrived at the hub to JAX's service on this host, once the service listens."""
    for _ in range(100):
        with contextlib.suppress(OSError):
            service_reader, service_writer = await asyncio.open_connection("127.0.0.1", port)
            with contextlib.closing(service_writer):
                await asyncio.gather(_copy(reader, service_writer), _copy(service_reader, writer))
            return
        await asyncio.sleep(0.1)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, close: bool = True) -> None:
    """Copy bytes until the reader's end; then close the writer if `close`."""
    with contextlib.suppress(OSError):
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
    if close:
        writer.close()
