"""The node's own addresses, on the real kernel, in network namespaces that each test makes for itself."""

from __future__ import annotations

import ctypes
import functools
import os
import queue
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support import PATIENCE

from netacct import rtnetlink
from netacct.identity import ranges
from netacct.identity.ranges import OwnAddresses, own_addresses
from netacct.model import Address, pack

pytestmark = pytest.mark.kernel

CLONE_NEWNET = 0x40000000


def in_private_netns(test: Callable[[], None]) -> Callable[[], None]:
    """Run a test in a thread with a network namespace of its own, which ends with the thread."""

    @functools.wraps(test)
    def wrapper() -> None:
        raised: list[BaseException] = []

        def body() -> None:
            try:
                before = Path("/proc/thread-self/ns/net").stat().st_ino
                libc = ctypes.CDLL(None, use_errno=True)
                if libc.unshare(CLONE_NEWNET):
                    pytest.skip(f"no network namespace can be made here: {os.strerror(ctypes.get_errno())}")
                assert Path("/proc/thread-self/ns/net").stat().st_ino != before
                ip("link set lo up")
                ip("link add a0 type veth peer name a1")
                ip("link set a0 up")
                test()
            except BaseException as error:  # noqa: BLE001 -- also pytest's skip, raised again in the main thread
                raised.append(error)

        thread = threading.Thread(target=body)
        thread.start()
        thread.join()
        if raised:
            raise raised[0]

    return wrapper


def ip(command: str) -> None:
    """Run `ip COMMAND` in this thread's network namespace."""
    subprocess.run(["ip", *command.split()], check=True)


@in_private_netns
def test_loopback_and_link_local_addresses_are_left_out() -> None:
    """A namespace with only lo and a veth that is up has no addresses of its own to name."""
    ip("link set a1 up")  # gives both ends an IPv6 link-local address
    assert own_addresses() == frozenset()


@in_private_netns
def test_every_other_address_is_the_nodes() -> None:
    """Addresses of both families are listed, also on lo, and of a point-to-point address the local end."""
    ip("address add 192.0.2.1/24 dev a0")
    ip("address add 2001:db8::1/64 dev a0 nodad")
    ip("address add 198.51.100.7/32 dev lo")
    ip("address add 203.0.113.1 peer 203.0.113.2 dev a0")
    ip("address add 2001:db8:1::1 peer 2001:db8:1::2 dev a0 nodad")
    expected = ("192.0.2.1", "2001:db8::1", "198.51.100.7", "203.0.113.1", "2001:db8:1::1")
    assert own_addresses() == frozenset(map(pack, expected))


@in_private_netns
def test_a_dump_of_many_addresses_is_whole() -> None:
    """More addresses than fit into one netlink message are all there."""
    commands = "".join(f"address add 10.1.{i >> 8}.{i & 255}/16 dev a0\n" for i in range(1, 1001))
    subprocess.run(["ip", "-batch", "-"], input=commands.encode(), check=True)
    assert own_addresses() == frozenset(pack(f"10.1.{i >> 8}.{i & 255}") for i in range(1, 1001))


@in_private_netns
def test_changes_are_followed() -> None:
    """Addresses that come and go at run time are told, each time as the whole set."""
    told: queue.Queue[frozenset[Address]] = queue.Queue()
    ip("address add 192.0.2.1/24 dev a0")
    follower = OwnAddresses(poll=3600.0)
    try:
        assert follower.start(told.put) == {pack("192.0.2.1")}
        ip("address add 2001:db8::1/64 dev a0 nodad")
        assert told.get(timeout=PATIENCE) == {pack("192.0.2.1"), pack("2001:db8::1")}
        ip("address del 192.0.2.1/24 dev a0")
        assert told.get(timeout=PATIENCE) == {pack("2001:db8::1")}
        ip("link set a1 up")  # a link-local address is no news
        with pytest.raises(queue.Empty):
            told.get(timeout=0.2)
    finally:
        follower.stop()
    assert not any(thread.name == "own-addresses" for thread in threading.enumerate())


@in_private_netns
def test_an_overflowed_subscription_is_read_to_its_end() -> None:
    """ENOBUFS, once the kernel had to drop messages, is taken as a sign like any other, and the rest is read."""
    with rtnetlink.connect(ranges._RTMGRP_IPV4_IFADDR) as events:
        events.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)  # the kernel's least: a few messages fill it
        commands = "".join(f"address add 10.1.0.{i}/16 dev a0\n" for i in range(1, 200))
        subprocess.run(["ip", "-batch", "-"], input=commands.encode(), check=True)
        with pytest.raises(OSError, match="No buffer space"):
            events.recv(65536)
        rtnetlink.discard(events)
        with pytest.raises(BlockingIOError):
            events.recv(65536)
    assert len(own_addresses()) == 199
