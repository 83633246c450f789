"""Transactions of nf_tables over one socket that stays open, because it owns our tables.

A table with the flag `owner` can be changed through the socket that made it and no other, which no library on top of
libnftables or pyroute2 keeps apart; `persist` (Linux 6.9) lets the table outlive the socket, and the next one take it
on. Numbers and layouts: linux/netfilter/nfnetlink.h (batches), linux/netlink.h (errors).
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterable, Sequence

from netacct.errors import DatapathError, MissingFeatureError, PermissionRefusedError
from netacct.kernel.nft_messages import SUBSYSTEM, Message
from netacct.model import Family

NFPROTO: dict[Family, int] = {4: 2, 6: 10}
"""The address family in nfgenmsg."""

PIECE = 1 << 17
"""Bytes of a transaction that only fills sets; larger ones need a send buffer that a user namespace cannot have."""

_NETLINK_NETFILTER = 12
_BATCH_BEGIN, _BATCH_END = 0x10, 0x11
_REQUEST, _ACK = 0x1, 0x4  # NLM_F_*
_ERROR = 2  # NLMSG_ERROR
_CAP_ACK, _SOL_NETLINK = 10, 270  # errors carry the header of what failed, and not all of it
_SEND_BUFFER = 1 << 24
_RECEIVE_BUFFER = 1 << 20
_SO_SNDBUFFORCE = 32
_HEADER = struct.Struct("=IHHII")
_FAILURE = struct.Struct("=iIHHII")
_NO_NFTABLES = (errno.EPROTONOSUPPORT, errno.EAFNOSUPPORT, errno.EOPNOTSUPP)


class RefusedError(DatapathError):
    """The kernel refused a transaction as a whole; `code` is its errno."""

    def __init__(self, code: int, what: str) -> None:
        self.code = code
        super().__init__(f"nftables: cannot {what}: {os.strerror(code)}")


class UnsupportedError(RefusedError, MissingFeatureError):
    """The kernel has not got what a transaction asks for."""


class NftWriter:
    """Sends transactions in the network namespace of the thread that makes it. For one thread.

    Errors: MissingFeatureError where the kernel has no nf_tables.
    """

    def __init__(self) -> None:
        try:
            self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_NETFILTER)
        except OSError as error:
            raise MissingFeatureError(f"this kernel has no netfilter netlink (nfnetlink): {error.strerror}") from error
        self._socket.bind((0, 0))
        self._socket.setsockopt(_SOL_NETLINK, _CAP_ACK, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, _SEND_BUFFER)
        except PermissionError:  # in a user namespace
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        self._sequence = 0

    @property
    def port(self) -> int:
        """The netlink port by which the kernel knows the owner of a table."""
        return int(self._socket.getsockname()[0])

    def close(self) -> None:
        """Close the socket. Tables that it owned are nobody's then, and stay where the kernel lets them."""
        self._socket.close()

    def commit(self, messages: Sequence[Message]) -> None:
        """Do all of this, or nothing. Errors: RefusedError; PermissionRefusedError; MissingFeatureError."""
        if not messages:
            return
        first = self._sequence + 1
        parts = [self._encode(_BATCH_BEGIN, _REQUEST, 0, b"", SUBSYSTEM)]
        for message in messages:
            flags = _REQUEST | message.flags | (_ACK if message is messages[-1] else 0)
            kind = SUBSYSTEM << 8 | message.kind
            parts.append(self._encode(kind, flags, NFPROTO[message.family], message.body))
        parts.append(self._encode(_BATCH_END, _REQUEST, 0, b"", SUBSYSTEM))
        try:
            self._socket.send(b"".join(parts))
        except OSError as error:
            raise RefusedError(error.errno or errno.EIO, f"send {len(messages)} changes") from error
        self._answer(first, messages)

    def fill(self, messages: Iterable[Message]) -> None:
        """Send messages that need not take effect together, in transactions of bearable size. Errors: as `commit`."""
        waiting: list[Message] = []
        size = 0
        for message in messages:
            if waiting and size + len(message.body) > PIECE:
                self.commit(waiting)
                waiting, size = [], 0
            waiting.append(message)
            size += len(message.body)
        self.commit(waiting)

    def _encode(self, kind: int, flags: int, family: int, body: bytes, resource: int = 0) -> bytes:
        self._sequence += 1
        padding = b"\0" * (-len(body) % 4)
        nfgen = bytes((family, 0)) + resource.to_bytes(2, "big")
        return _HEADER.pack(20 + len(body), kind, flags, self._sequence, 0) + nfgen + body + padding

    def _answer(self, first: int, messages: Sequence[Message]) -> None:
        """Find the first error. The kernel has answered everything by the time that `send` returns."""
        acknowledged = False
        while True:
            try:
                data = self._socket.recv(_RECEIVE_BUFFER, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError as error:
                raise RefusedError(error.errno or errno.EIO, "read the kernel's answer") from error
            offset = 0
            while offset < len(data):
                length, kind, _, sequence, _ = _HEADER.unpack_from(data, offset)
                if kind == _ERROR and sequence >= first:
                    code = -_FAILURE.unpack_from(data, offset + _HEADER.size)[0]
                    if code:
                        self._raise(code, sequence - first - 1, messages)
                    acknowledged = True
                offset += (length + 3) & ~3
        if not acknowledged:
            raise RefusedError(errno.EIO, "change the ruleset: the kernel did not acknowledge it")

    def _raise(self, code: int, index: int, messages: Sequence[Message]) -> None:
        """Raise what an error means. The message before the first is the transaction as a whole."""
        self._drain()
        if index < 0 and code == errno.EPERM:
            raise PermissionRefusedError("the nftables datapath needs CAP_NET_ADMIN")
        if index < 0 and code in _NO_NFTABLES:
            raise MissingFeatureError("this kernel has no nf_tables (CONFIG_NF_TABLES)")
        what = "commit the changes"
        if index >= 0:
            what = f"{messages[index].what} (IPv{messages[index].family})"
        raise (UnsupportedError if code in _NO_NFTABLES else RefusedError)(code, what)

    def _drain(self) -> None:
        try:
            while self._socket.recv(_RECEIVE_BUFFER, socket.MSG_DONTWAIT):
                pass
        except OSError:
            return
