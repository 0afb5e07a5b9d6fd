"""Messages between hosts: a length and JSON."""

import asyncio
import json
import struct
from typing import Any

BEAT_S = 1.0  # time between two signs of life
_LENGTH = struct.Struct(">4sI")
_MARK = b"mugr"
_LONGEST = 1 << 30


class NotOurs(Exception):
    """What was received is no message of this program."""


def frame(message: list[Any]) -> bytes:
    """Return a message as bytes."""
    data = json.dumps(message).encode()
    return _LENGTH.pack(_MARK, len(data)) + data


async def send(writer: asyncio.StreamWriter, message: list[Any]) -> None:
    """Send one message, and wait while the connection is busy."""
    writer.write(frame(message))
    await writer.drain()


async def receive(reader: asyncio.StreamReader, longest: int = _LONGEST) -> list[Any]:
    """Return the next message; raise `EOFError` or `OSError` if the connection is closed."""
    mark, length = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if mark != _MARK or length > longest:
        raise NotOurs
    try:
        message = json.loads(await reader.readexactly(length))
    except ValueError:
        raise NotOurs from None
    if not isinstance(message, list) or not message:
        raise NotOurs
    return message
