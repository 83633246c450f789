"""A small netfilter netlink socket: dumps, and requests that are acknowledged.

Numbers and layouts: linux/netlink.h (nlmsghdr, nlattr), linux/netfilter/nfnetlink.h (nfgenmsg). Message and attribute
headers are in host byte order; the values that ipset sends are in network byte order.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from netacct.errors import DatapathError, MissingFeatureError

NLM_F_REQUEST = 0x1
NLM_F_ACK = 0x4
NLM_F_DUMP_INTR = 0x10
NLM_F_DUMP = 0x300
NLM_F_EXCL = 0x200

NLA_F_NESTED = 0x8000
NLA_F_NET_BYTEORDER = 0x4000
NLA_TYPE_MASK = 0x3FFF

_NETLINK_NETFILTER = 12
_NLMSG_ERROR = 2
_NLMSG_DONE = 3
_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
_NFGEN = struct.Struct("=BBH")  # nfgenmsg: family, version, resource id
_ATTRIBUTE = struct.Struct("=HH")  # nlattr: length, type
_ERROR = struct.Struct("=i")

_PRIVATE_ERRORS = 4096  # beyond: errors of the subsystem itself
_RECEIVE = 1 << 18  # one read takes whatever the kernel packs into one dump step (32 KiB today)
_SOCKET_BUFFER = 1 << 20
_DUMP_TRIES = 5


class NetlinkError(DatapathError):
    """The kernel answered a request with an error; `code` is an errno, or above 4096 one of ipset's own."""

    def __init__(self, code: int) -> None:
        self.code = code
        super().__init__(f"netlink error {code}" if code > _PRIVATE_ERRORS else os.strerror(code))


class Netlink:
    """A socket to nf_netlink in the network namespace of the thread that opens it. For one thread at a time.

    Errors: MissingFeatureError where the kernel has no nf_netlink.
    """

    def __init__(self, timeout: float = 5.0) -> None:
        try:
            self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_NETFILTER)
        except OSError as error:
            if error.errno in (errno.EPROTONOSUPPORT, errno.EAFNOSUPPORT):
                words = f"this kernel has no netfilter netlink (nfnetlink): {error.strerror}"
                raise MissingFeatureError(words) from error
            raise
        self._socket.bind((0, 0))
        self._socket.settimeout(timeout)
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER)
        self._sequence = 0
        self._interrupted = False
        self._buffer = bytearray(_RECEIVE)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def dump(self, kind: int, family: int, attributes: bytes) -> list[memoryview]:
        """The attribute parts of all messages that answer a dump request; asked anew where it was interrupted.

        Args:
            kind: the message type (subsystem << 8 | command).
            family: the address family in nfgenmsg.
            attributes: encoded attributes of the request.

        Errors: NetlinkError with the kernel's error; DatapathError where no consistent answer came in time.
        """
        for _ in range(_DUMP_TRIES):
            # NLM_F_ACK: ipset reports an unknown set name only to those who ask for an acknowledgement
            self._send(kind, NLM_F_REQUEST | NLM_F_ACK | NLM_F_DUMP, family, attributes)
            found = self._collect()
            if not self._interrupted:
                return found
        raise DatapathError(f"netlink: a dump was interrupted {_DUMP_TRIES} times in a row")

    def request(self, kind: int, flags: int, family: int, attributes: bytes) -> list[memoryview]:
        """Send one request and wait for its acknowledgement; returns the attribute parts of what came before that.

        Errors: NetlinkError; DatapathError on time-out.
        """
        self._send(kind, NLM_F_REQUEST | NLM_F_ACK | flags, family, attributes)
        return self._collect()

    def _send(self, kind: int, flags: int, family: int, attributes: bytes) -> None:
        self._sequence += 1
        self._interrupted = False
        length = _HEADER.size + _NFGEN.size + len(attributes)
        header = _HEADER.pack(length, kind, flags, self._sequence, 0) + _NFGEN.pack(family, 0, 0)
        try:
            self._socket.send(header + attributes)
        except OSError as error:
            raise NetlinkError(error.errno or errno.EIO) from error

    def _collect(self) -> list[memoryview]:
        found: list[memoryview] = []
        while True:
            try:
                received = self._socket.recv_into(self._buffer)
            except TimeoutError as error:
                raise DatapathError("netlink: the kernel did not answer in time") from error
            if self._take(received, found):
                return found

    def _take(self, received: int, found: list[memoryview]) -> bool:
        """Sort out what one read brought; True at the end of the answer."""
        offset = 0
        while offset < received:
            length, kind, flags, sequence, _ = _HEADER.unpack_from(self._buffer, offset)
            body = offset + _HEADER.size
            offset += (length + 3) & ~3
            if sequence != self._sequence:  # the tail of a request that was given up
                continue
            self._interrupted |= bool(flags & NLM_F_DUMP_INTR)  # but read on: a dump cannot be broken off
            if kind in (_NLMSG_ERROR, _NLMSG_DONE):
                code = -_ERROR.unpack_from(self._buffer, body)[0]
                if code > 0:
                    raise NetlinkError(code)
                return True
            start = body + _NFGEN.size
            found.append(memoryview(bytes(memoryview(self._buffer)[start : body + length - _HEADER.size])))
        return False


def attribute(kind: int, value: bytes) -> bytes:
    """One encoded attribute, padded to 4 bytes."""
    length = _ATTRIBUTE.size + len(value)
    return _ATTRIBUTE.pack(length, kind) + value + b"\0" * (-length % 4)


def nested(kind: int, *attributes: bytes) -> bytes:
    """An encoded attribute that holds others."""
    return attribute(kind | NLA_F_NESTED, b"".join(attributes))


def attributes(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Decode a run of attributes: (type without flag bits, value). Nothing is copied: a value may be half a dump."""
    offset, end = 0, len(data)
    while offset + _ATTRIBUTE.size <= end:
        length, kind = _ATTRIBUTE.unpack_from(data, offset)
        if length < _ATTRIBUTE.size:
            return
        yield kind & NLA_TYPE_MASK, data[offset + _ATTRIBUTE.size : offset + length]
        offset += (length + 3) & ~3


def find_attribute(data: memoryview, wanted: int) -> memoryview | None:
    """The value of the first attribute of a type: half the time of a search through `attributes`, in every reading."""
    offset, end = 0, len(data)
    while offset + 4 <= end:
        length, kind = _ATTRIBUTE.unpack_from(data, offset)
        if kind & NLA_TYPE_MASK == wanted:
            return data[offset + 4 : offset + length]
        if length < 4:
            return None
        offset += (length + 3) & ~3
    return None
