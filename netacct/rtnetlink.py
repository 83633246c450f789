"""rtnetlink(7) over sockets of our own: dumps, and messages about what changed.

pyroute2's IPRoute takes ten times as long and 6 MB more for the same dump, and this is all of it that is needed.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

# linux/netlink.h
_NLM_F_REQUEST = 0x1
_NLM_F_ACK = 0x4
_NLM_F_DUMP_INTR = 0x10
_NLM_F_DUMP = 0x300
_NLMSG_ERROR = 2
_NLMSG_DONE = 3
_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
_ATTRIBUTE = struct.Struct("=HH")  # nlattr: length, type
_TYPE_MASK = 0x3FFF  # NLA_TYPE_MASK: without the flags for nested and byte-ordered attributes

_RECEIVE = 1 << 16
_DUMP_TRIES = 5


class Message(NamedTuple):
    """One netlink message without its header."""

    kind: int
    body: bytes


class Overrun(Exception):  # noqa: N818 -- a fact about the stream, not a failure
    """The kernel dropped messages because nobody read them in time: what was known may be wrong."""


def connect(groups: int = 0) -> socket.socket:
    """A NETLINK_ROUTE socket in this thread's network namespace: for requests, or for what these groups are told.

    The latter never blocks (and then needs no timeout, which would make Python wait in spite of MSG_DONTWAIT).
    """
    channel = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
    try:
        channel.bind((0, groups))
        channel.settimeout(0.0 if groups else 5.0)
    except OSError:
        channel.close()
        raise
    return channel


def pending(events: socket.socket) -> Iterator[Message]:
    """All messages that are queued now, oldest first; never blocks. Raises Overrun where some were lost."""
    while True:
        try:
            data = events.recv(_RECEIVE)
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno != errno.ENOBUFS:
                raise
            raise Overrun(os.strerror(errno.ENOBUFS)) from error
        for message, _flags, _sequence in _split(data):
            yield message


def discard(events: socket.socket) -> None:
    """Read all that is queued. An overrun, too, only says that there was something."""
    while True:
        try:
            for _message in pending(events):
                pass
        except Overrun:
            continue
        return


def dump(channel: socket.socket, request: int, body: bytes) -> tuple[Message, ...] | None:
    """Everything of one kind; None where it changed meanwhile and the dump may have missed some. Raises OSError.

    Args:
        channel: a socket for requests.
        request: the message type that asks (RTM_GETADDR …).
        body: that type's own header (ifaddrmsg …).
    """
    sequence = time.monotonic_ns() & 0xFFFFFFFF
    size = _HEADER.size + len(body)
    channel.send(_HEADER.pack(size, request, _NLM_F_REQUEST | _NLM_F_DUMP, sequence, 0) + body)
    found: list[Message] = []
    whole = True
    while True:
        for message, flags, number in _split(channel.recv(_RECEIVE)):
            if number != sequence:
                continue  # the rest of a dump that was given up
            whole = whole and not flags & _NLM_F_DUMP_INTR
            if message.kind in (_NLMSG_DONE, _NLMSG_ERROR):
                # of a dump that broke off in its middle, or that was refused, the last message has the error
                code = -int.from_bytes(message.body[:4], sys.byteorder, signed=True)
                if code > 0 or message.kind == _NLMSG_ERROR:
                    raise OSError(code, os.strerror(code))
                return tuple(found) if whole else None
            found.append(message)


def dump_whole(channel: socket.socket, request: int, body: bytes) -> tuple[Message, ...]:
    """As `dump`, but asked anew where it may have missed some. Raises OSError, also where that never ends."""
    for _ in range(_DUMP_TRIES):
        found = dump(channel, request, body)
        if found is not None:
            return found
    raise OSError(errno.EINTR, f"they changed during each of {_DUMP_TRIES} dumps")


def ask(channel: socket.socket, request: int, body: bytes) -> tuple[Message, ...]:
    """What answers a request for one thing (a route to an address, one interface). Raises OSError as the kernel does.

    Args:
        channel: a socket for requests.
        request: the message type that asks (RTM_GETROUTE …).
        body: that type's own header, and attributes.
    """
    sequence = time.monotonic_ns() & 0xFFFFFFFF
    size = _HEADER.size + len(body)
    channel.send(_HEADER.pack(size, request, _NLM_F_REQUEST | _NLM_F_ACK, sequence, 0) + body)
    found: list[Message] = []
    while True:
        for message, _flags, number in _split(channel.recv(_RECEIVE)):
            if number != sequence:
                continue
            if message.kind == _NLMSG_ERROR:
                code = -int.from_bytes(message.body[:4], sys.byteorder, signed=True)
                if code:
                    raise OSError(code, os.strerror(code))
                return tuple(found)
            found.append(message)


def attributes(body: bytes, offset: int) -> dict[int, bytes]:
    """The attributes of a message whose own header is `offset` bytes long."""
    found: dict[int, bytes] = {}
    while offset + _ATTRIBUTE.size <= len(body):
        length, kind = _ATTRIBUTE.unpack_from(body, offset)
        if length < _ATTRIBUTE.size:
            break
        found[kind & _TYPE_MASK] = body[offset + _ATTRIBUTE.size : offset + length]
        offset += (length + 3) & ~3
    return found


def _split(data: bytes) -> Iterator[tuple[Message, int, int]]:
    """Each message with its flags and sequence number."""
    offset = 0
    while offset + _HEADER.size <= len(data):
        length, kind, flags, sequence, _port = _HEADER.unpack_from(data, offset)
        if length < _HEADER.size:
            return
        yield Message(kind, data[offset + _HEADER.size : offset + length]), flags, sequence
        offset += (length + 3) & ~3
