"""Network namespaces, a small node with pods, and traffic of known size, for tests on the real kernel.

A namespace here is an open file: no name in /run/netns, nothing left behind when the test is killed. Namespaces belong
to threads, so code runs in one by running in a thread of its own, and pytest's own thread never leaves the host's.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from netacct.kernel import plan as plans
from netacct.kernel.plan import Plan
from netacct.model import Address, Count, CounterKey, Direction, Family, Scope, Snapshot, pack
from netacct.policy import MarkTable, Policy, Prefix, TrafficClass

Result = TypeVar("Result")

_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)
_HOST = Path("/proc/thread-self/ns/net").stat().st_ino

LOCAL = {4: "10.244.1.0/28", 6: "fd00:10:244:1::/124"}
POD = {4: "10.244.1.10", 6: "fd00:10:244:1::a"}
OTHER_POD = {4: "10.244.1.11", 6: "fd00:10:244:1::b"}
PEER = {4: "203.0.113.10", 6: "2001:db8::10"}
STORAGE = {4: "198.51.100.10", 6: "2001:db8:5::10"}
NODE = {4: "203.0.113.1", 6: "2001:db8::1"}
HEADERS: dict[Family, int] = {4: 28, 6: 48}
PORT = 7000

PATIENCE = 60.0
"""Seconds for what must come. Machines stand still for seconds, and only a run that fails takes all of them."""


def in_private_namespace() -> bool:
    """Whether this thread is in a network namespace that a test made."""
    return Path("/proc/thread-self/ns/net").stat().st_ino != _HOST


class Netns:
    """A network namespace of the test's own."""

    def __init__(self) -> None:
        self._fd = _in_thread(self._make)

    @staticmethod
    def _make() -> int:
        if _libc.unshare(_CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "unshare(CLONE_NEWNET)")
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)

    @property
    def path(self) -> str:
        """A path by which `ip link set ... netns` finds it."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def run(self, function: Callable[[], Result]) -> Result:
        """Call a function in this namespace and return what it returns, or raise what it raises."""

        def entered() -> Result:
            if _libc.setns(self._fd, _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
            assert in_private_namespace()
            return function()

        return _in_thread(entered)

    def sh(self, *commands: str) -> str:
        """Run commands in this namespace; returns their output."""
        return self.run(lambda: sh(*commands))

    def socket(self, family: Family, address: str, port: int = PORT) -> socket.socket:
        """A UDP socket in this namespace, bound to an address."""

        def bound() -> socket.socket:
            made = socket.socket(socket.AF_INET if family == 4 else socket.AF_INET6, socket.SOCK_DGRAM)
            made.bind((address, port))
            return made

        return self.run(bound)

    def close(self) -> None:
        """Let the namespace go, with everything in it."""
        os.close(self._fd)


def _in_thread(function: Callable[[], Result]) -> Result:
    outcome: list[Result] = []
    failure: list[BaseException] = []

    def body() -> None:
        try:
            outcome.append(function())
        except BaseException as error:  # noqa: BLE001  # pytest's outcomes (skip, fail) travel too
            failure.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return outcome[0]


def sh(*commands: str) -> str:
    """Run shell commands in this thread's namespace, which must not be the host's; returns their output."""
    assert in_private_namespace()
    script = "set -e\n" + "\n".join(commands)
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 0, f"{script}: {done.stderr}"
    return done.stdout


def table(family: Family) -> str:
    """The mangle table with counters, without the comments that carry the time."""
    text = sh(f"{'iptables' if family == 4 else 'ip6tables'}-legacy-save -c -t mangle")
    return "\n".join(line for line in text.splitlines() if not line.startswith("#"))


@dataclass
class Node:
    """A node (the namespace `netns`) with two pods and a peer behind veths, without any chatter of the kernels."""

    netns: Netns
    pod: Netns
    other_pod: Netns
    peer: Netns

    def send(
        self, family: Family, source: tuple[Netns, str], destination: tuple[Netns, str], packets: int, size: int
    ) -> Count:
        """Send datagrams and wait until they have arrived; returns what netfilter must have counted."""
        sender = source[0].socket(family, source[1], 0)
        receiver = destination[0].socket(family, destination[1])
        receiver.settimeout(PATIENCE)
        with sender, receiver:
            for _ in range(packets):
                sender.sendto(b"x" * size, (destination[1], PORT))
                receiver.recv(size + 1)
        return Count(packets * (size + HEADERS[family]), packets)


@contextlib.contextmanager
def node(netns: Netns) -> Iterator[Node]:
    """Build the node around an existing namespace."""
    pod, other_pod, peer = Netns(), Netns(), Netns()
    try:
        netns.sh("sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1")
        for index, addresses in enumerate((POD, OTHER_POD, PEER)):
            _connect(netns, (pod, other_pod, peer)[index], index, addresses)
        netns.sh(f"ip addr add {NODE[4]}/32 dev lo", f"ip addr add {NODE[6]}/128 dev lo nodad")
        for family, address in STORAGE.items():
            peer.sh(f"ip -{family} addr add {address} dev eth0 {'nodad' if family == 6 else ''}")
            netns.sh(f"ip -{family} route add {address} dev v2")
            _permanent(netns, family, address, "v2", "02:00:00:00:01:02")
        yield Node(netns, pod, other_pod, peer)
    finally:
        for made in (pod, other_pod, peer):
            made.close()


def _connect(netns: Netns, other: Netns, index: int, addresses: dict[int, str]) -> None:
    """A veth between node and pod or peer, with fixed neighbours on both ends."""
    here, there = f"02:00:00:00:00:0{index}", f"02:00:00:00:01:0{index}"
    netns.sh(f"ip link add v{index} address {here} type veth peer name eth0 address {there} netns {other.path}")
    for space, name in ((netns, f"v{index}"), (other, "eth0")):
        space.sh(
            f"sysctl -qw net.ipv6.conf.{name}.addr_gen_mode=1 net.ipv6.conf.{name}.accept_ra=0",
            f"sysctl -qw net.ipv4.conf.{name}.send_redirects=0 net.ipv4.conf.{name}.rp_filter=0",
            f"ip link set {name} up",
        )
    other.sh("ip link set lo up")
    gateways = {4: "169.254.1.1", 6: "fe80::1"}
    for family, address in addresses.items():
        other.sh(f"ip -{family} addr add {address}{'/32' if family == 4 else '/128 nodad'} dev eth0")
        other.sh(f"ip -{family} route add default via {gateways[family]} dev eth0 onlink")
        _permanent(other, family, gateways[family], "eth0", here)
        netns.sh(f"ip -{family} route add {address} dev v{index}")
        _permanent(netns, family, address, f"v{index}", there)


def _permanent(space: Netns, family: int, address: str, device: str, mac: str) -> None:
    space.sh(f"ip -{family} neigh replace {address} lladdr {mac} dev {device} nud permanent")


def policy(*, storage: bool = True) -> Policy:
    """A policy of a few classes; `storage` can be retired."""
    cidrs = {
        "pod": ("10.244.0.0/16", "fd00:10:244::/48"),
        "node": ("192.168.50.0/24",),
        "service": ("10.96.0.0/12",),
        "private": ("10.0.0.0/8", "172.16.0.0/12", "224.0.0.0/4", "fc00::/7", "fe80::/10", "ff00::/8"),
        "storage": ("198.51.100.0/24", "2001:db8:5::/48"),
    }
    if not storage:
        del cidrs["storage"]
    prefixes = tuple(
        Prefix(ipaddress.ip_network(cidr), name, "test") for name, several in cidrs.items() for cidr in several
    )
    names = (*cidrs, "internet")
    return Policy("test", "test.yaml", "0", tuple(map(TrafficClass, names)), prefixes, "internet")


def plan(
    *,
    storage: bool = True,
    local: tuple[str, ...] = (LOCAL[4], LOCAL[6]),
    marks: MarkTable | None = None,
    capacity: int = 64,
) -> Plan:
    """A plan for the node above."""
    ranges = [ipaddress.ip_network(net) for net in local]
    own = [pack(NODE[4]), pack(NODE[6])]
    return plans.build(policy(storage=storage), ranges, own, marks, dynamic_capacity=capacity)


def key(family: Family, scope: Scope, direction: Direction, traffic: str) -> CounterKey:
    """A CounterKey, in the order in which one says it."""
    return CounterKey(family, scope, direction, traffic)


def tx(family: Family, traffic: str) -> CounterKey:
    """What pods transmit."""
    return CounterKey(family, Scope.POD, Direction.TRANSMIT, traffic)


def rx(family: Family, traffic: str) -> CounterKey:
    """What pods receive."""
    return CounterKey(family, Scope.POD, Direction.RECEIVE, traffic)


def counted(snapshot: Snapshot) -> dict[tuple[CounterKey, Address], tuple[int, int]]:
    """Every counter of a snapshot that is not zero, but for the host's private ones: MLD and the like go there."""
    return {
        (reading.key, ip): (count[0], count[1])
        for reading in snapshot.readings
        for ip, count in reading.counts.items()
        if any(count) and reading.key[1::2] != (Scope.HOST, "private")
    }


def epochs(snapshot: Snapshot) -> dict[CounterKey, int]:
    """The epoch of each set of a snapshot."""
    return {reading.key: reading.epoch for reading in snapshot.readings}


def eventually(condition: Callable[[], Any], seconds: float = PATIENCE) -> None:
    """Wait until a condition holds; fail where it does not in time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)
