"""Frames between two processes: eight bytes of length, and so many bytes."""

import socket
import struct

_LENGTH = struct.Struct("<Q")


class FrameError(ValueError):
    """A frame that is longer than any may be."""


def send(connection: socket.socket, frame: bytes) -> None:
    """Write one frame."""
    connection.sendall(_LENGTH.pack(len(frame)) + frame)


def receive(connection: socket.socket, limit: int | None = None) -> bytes:
    """Read one frame; empty if the other end is closed.

    Raises:
        FrameError: it has more than ``limit`` bytes.
    """
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size) or bytes(_LENGTH.size))
    if limit is not None and length > limit:
        raise FrameError(f"expected at most {limit} bytes, got {length}")
    return _exactly(connection, length)


def _exactly(connection: socket.socket, count: int) -> bytes:
    """So many bytes; none if the other end is closed before they have come."""
    data = bytearray(count)
    view, got = memoryview(data), 0
    while got < count:
        more = connection.recv_into(view[got:])
        if not more:
            return b""
        got += more
    return bytes(data)
