"""Which addresses are local: the node's own, followed as they change, and the ranges that belong to its pods.

The node's own addresses come from rtnetlink(7). With 220 addresses our socket costs 0.9 MB and 1.3 ms per dump,
pyroute2's IPRoute 6.9 MB and 11 ms, and each new veth (an IPv6 link-local address) causes one.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
import time
from collections.abc import Callable, Iterable
from functools import partial

from netacct import log, rtnetlink
from netacct.errors import NetacctError
from netacct.model import Address, Network
from netacct.policy import countable_own, sort_key
from netacct.rtnetlink import Message
from netacct.sleeper import Sleeper, Why

DEBOUNCE = 0.02
"""Seconds between the first change and the dump; an interface rarely gets one address alone."""

POLL = 60.0
"""Seconds between dumps when nothing was signalled."""

# linux/rtnetlink.h, linux/if_addr.h
_RTM_NEWADDR = 20
_RTM_GETADDR = 22
_RTMGRP_IPV4_IFADDR = 0x10
_RTMGRP_IPV6_IFADDR = 0x100
_IFADDRMSG = struct.Struct("=BBBBI")  # family, prefixlen, flags, scope, index
_IFA_ADDRESS = 1
_IFA_LOCAL = 2

_ALL = (_RTM_GETADDR, _IFADDRMSG.pack(socket.AF_UNSPEC, 0, 0, 0, 0))
"""A request for the addresses of both families."""


def own_addresses() -> frozenset[Address]:
    """The addresses of this network namespace, but IPv6 link-local ones, 127.0.0.0/8 and ::1.

    Other addresses on `lo` are the node's like any other. Raises NetacctError where the kernel refuses.
    """
    try:
        with rtnetlink.connect() as channel:
            return _addresses(rtnetlink.dump_whole(channel, *_ALL))
    except OSError as error:
        raise NetacctError(f"cannot list the node's addresses: {error.strerror or error}") from error


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
        self._sleeper = Sleeper("own-addresses")
        self._log = log.get(source="addresses")

    def start(self, changed: Callable[[frozenset[Address]], None]) -> frozenset[Address]:
        """Subscribe, return the addresses of now, and call `changed` with all of them whenever they differ.

        `changed` runs in a thread of this object and must not block. Raises NetacctError as `own_addresses` does.
        """
        try:
            events = rtnetlink.connect(_RTMGRP_IPV4_IFADDR | _RTMGRP_IPV6_IFADDR)
            requests = rtnetlink.connect()
        except OSError as error:
            raise NetacctError(f"cannot follow the node's addresses: {error.strerror}") from error
        self._current = own_addresses()
        self._sleeper.start(partial(self._follow, events, requests, changed))
        return self._current

    def stop(self) -> None:
        """End the thread; `changed` is not called any more once this returned. Idempotent."""
        self._sleeper.stop()

    def _follow(
        self, events: socket.socket, requests: socket.socket, changed: Callable[[frozenset[Address]], None]
    ) -> None:
        with events, requests:
            while (why := self._sleeper.sleep(self._poll, events.fileno())) is not Why.STOP:
                if why is Why.READABLE:
                    time.sleep(DEBOUNCE)
                    rtnetlink.discard(events)
                try:
                    messages = rtnetlink.dump(requests, *_ALL)
                except OSError as error:
                    self._log.warning("cannot list the node's addresses, trying again", error=str(error))
                    continue
                if messages is None:
                    continue  # a change meanwhile, whose message waits in `events`
                found = _addresses(messages)
                if found != self._current:
                    self._current = found
                    changed(found)


def _addresses(messages: Iterable[Message]) -> frozenset[Address]:
    found = (_local(message.body) for message in messages if message.kind == _RTM_NEWADDR)
    return countable_own(ip for ip in found if ip is not None)


def _local(body: bytes) -> Address | None:
    """The address of an ifaddrmsg: IFA_LOCAL; where there is none (IPv6 without a peer), IFA_ADDRESS."""
    found = rtnetlink.attributes(body, _IFADDRMSG.size)
    return found.get(_IFA_LOCAL, found.get(_IFA_ADDRESS))
