"""Which addresses are local: the node's own, followed as they change, and the ranges that belong to its pods.

The node's own addresses come from rtnetlink(7) over a socket of ours: with 220 addresses it costs 0.9 MB and
1.3 ms per dump, pyroute2's IPRoute 6.9 MB and 11 ms, and each new veth (an IPv6 link-local address) causes one.
"""

from __future__ import annotations

import ipaddress
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from netacct import log
from netacct.errors import NetacctError
from netacct.model import Address, Network
from netacct.policy import countable_own, sort_key

DEBOUNCE = 0.02
"""Seconds between the first change and the dump; an interface rarely gets one address alone."""

POLL = 60.0
"""Seconds between dumps when nothing was signalled."""

# linux/netlink.h
_NLM_F_REQUEST = 0x1
_NLM_F_DUMP_INTR = 0x10
_NLM_F_DUMP = 0x300
_NLMSG_ERROR = 2
_NLMSG_DONE = 3
_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
_ATTRIBUTE = struct.Struct("=HH")  # nlattr: length, type

# linux/rtnetlink.h, linux/if_addr.h
_RTM_NEWADDR = 20
_RTM_GETADDR = 22
_RTMGRP_IPV4_IFADDR = 0x10
_RTMGRP_IPV6_IFADDR = 0x100
_IFADDRMSG = struct.Struct("=BBBBI")  # family, prefixlen, flags, scope, index
_IFA_ADDRESS = 1
_IFA_LOCAL = 2

_RECEIVE = 1 << 16
_DUMP_TRIES = 5


def own_addresses() -> frozenset[Address]:
    """The addresses of this network namespace, but IPv6 link-local ones, 127.0.0.0/8 and ::1.

    Other addresses on `lo` are the node's like any other. Raises NetacctError where the kernel refuses.
    """
    try:
        with _open(0) as channel:
            for _ in range(_DUMP_TRIES):
                found = _dump(channel)
                if found is not None:
                    return found
    except OSError as error:
        raise NetacctError(f"cannot list the node's addresses: {error.strerror or error}") from error
    raise NetacctError(f"cannot list the node's addresses: they changed during each of {_DUMP_TRIES} dumps")


def join(ranges: Iterable[Network], addresses: Iterable[Address]) -> tuple[Network, ...]:
    """`ranges`, and as /32 or /128 each of the `addresses` that lies in none of them; sorted, IPv4 first."""
    known = set(ranges)
    shapes = {(network.max_prefixlen, network.prefixlen) for network in known}
    masked = {(n.max_prefixlen, n.prefixlen, int(n.network_address) >> (n.max_prefixlen - n.prefixlen)) for n in known}
    joined: set[Network] = set(known)
    for ip in addresses:
        bits, number = len(ip) * 8, int.from_bytes(ip, "big")
        if not any((bits, length, number >> (bits - length)) in masked for size, length in shapes if size == bits):
            joined.add(ipaddress.ip_network(ip))
    return tuple(sorted(joined, key=sort_key))


class OwnAddresses:
    """Follows the node's own addresses in the network namespace of the thread that calls `start`.

    Every change leads to a fresh dump, so that no lost message (ENOBUFS) can leave a wrong list behind.

    Args:
        poll: seconds between dumps when nothing was signalled.
    """

    def __init__(self, poll: float = POLL) -> None:
        self._poll = poll
        self._current: frozenset[Address] = frozenset()
        self._thread: threading.Thread | None = None
        self._wake = -1
        self._log = log.get(source="addresses")

    def start(self, changed: Callable[[frozenset[Address]], None]) -> frozenset[Address]:
        """Subscribe, return the addresses of now, and call `changed` with all of them whenever they differ.

        `changed` runs in a thread of this object and must not block. Raises NetacctError as `own_addresses` does.
        """
        try:
            events = _open(_RTMGRP_IPV4_IFADDR | _RTMGRP_IPV6_IFADDR)
            requests = _open(0)
        except OSError as error:
            raise NetacctError(f"cannot follow the node's addresses: {error.strerror}") from error
        self._current = own_addresses()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(
            target=self._follow, args=(events, requests, changed), name="own-addresses", daemon=True
        )
        self._thread.start()
        return self._current

    def stop(self) -> None:
        """End the thread; `changed` is not called any more once this returned. Idempotent."""
        if self._thread is None:
            return
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._thread = None
        os.close(self._wake)

    def _follow(
        self, events: socket.socket, requests: socket.socket, changed: Callable[[frozenset[Address]], None]
    ) -> None:
        with events, requests:
            poller = select.poll()
            poller.register(self._wake, select.POLLIN)
            poller.register(events, select.POLLIN)
            while True:
                ready = [fd for fd, _ in poller.poll(self._poll * 1000)]
                if self._wake in ready:
                    return
                if ready:
                    time.sleep(DEBOUNCE)
                    _discard(events)
                try:
                    found = _dump(requests)
                except OSError as error:
                    self._log.warning("cannot list the node's addresses, trying again", error=str(error))
                    continue
                # An interrupted dump (None) means a change during it, whose message waits in `events`.
                if found is not None and found != self._current:
                    self._current = found
                    changed(found)


def _open(groups: int) -> socket.socket:
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


def _discard(events: socket.socket) -> None:
    """Read all that is queued. ENOBUFS, too, only says that there was something."""
    while True:
        try:
            events.recv(_RECEIVE)
        except BlockingIOError:
            return
        except OSError:
            continue


def _dump(channel: socket.socket) -> frozenset[Address] | None:
    """All addresses of both families; None where they changed meanwhile and the dump may have missed some."""
    sequence = time.monotonic_ns() & 0xFFFFFFFF
    request = _IFADDRMSG.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
    size = _HEADER.size + len(request)
    channel.send(_HEADER.pack(size, _RTM_GETADDR, _NLM_F_REQUEST | _NLM_F_DUMP, sequence, 0) + request)
    found: set[Address] = set()
    whole = True
    while True:
        for kind, flags, number, body in _messages(channel.recv(_RECEIVE)):
            if number != sequence:
                continue  # the rest of a dump that was given up
            whole = whole and not flags & _NLM_F_DUMP_INTR
            if kind == _NLMSG_DONE:
                return countable_own(found) if whole else None
            if kind == _NLMSG_ERROR:
                code = -int.from_bytes(body[:4], "little" if struct.pack("=H", 1)[0] else "big", signed=True)
                raise OSError(code, os.strerror(code))
            if kind == _RTM_NEWADDR:
                ip = _local(body)
                if ip is not None:
                    found.add(ip)


def _messages(data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """Type, flags, sequence and body of each netlink message."""
    offset = 0
    while offset + _HEADER.size <= len(data):
        length, kind, flags, sequence, _port = _HEADER.unpack_from(data, offset)
        if length < _HEADER.size:
            return
        yield kind, flags, sequence, data[offset + _HEADER.size : offset + length]
        offset += (length + 3) & ~3


def _local(body: bytes) -> Address | None:
    """The address of an ifaddrmsg: IFA_LOCAL; where there is none (IPv6 without a peer), IFA_ADDRESS."""
    found: dict[int, bytes] = {}
    offset = _IFADDRMSG.size
    while offset + _ATTRIBUTE.size <= len(body):
        length, kind = _ATTRIBUTE.unpack_from(body, offset)
        if length < _ATTRIBUTE.size:
            break
        found[kind] = body[offset + _ATTRIBUTE.size : offset + length]
        offset += (length + 3) & ~3
    return found.get(_IFA_LOCAL, found.get(_IFA_ADDRESS))
