"""A small node with two pods and the world beyond it, in network namespaces, for tests of rules on the real kernel.

    poda, podb   pods of the node, routed veths, 10.244.1.10 and .11, gateway 10.244.1.1 (the node's own)
    node         192.168.50.1, the namespace under test
    far          another node 192.168.50.2, a remote pod 10.244.2.20, a private host 172.20.0.5, the internet
                 203.0.113.10, and behind a VXLAN of that node another remote pod 10.244.3.20

Neighbours are permanent, redirects and router solicitations off, and no interface has a link-local address: every
packet in these namespaces is one that a test sends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from support import PATIENCE

from netacct.model import Family

CLONE_NEWNET = 0x40000000

ADDRESSES: dict[Family, dict[str, str]] = {
    4: {
        "poda": "10.244.1.10", "podb": "10.244.1.11", "gateway": "10.244.1.1", "node": "192.168.50.1",
        "othernode": "192.168.50.2", "remotepod": "10.244.2.20", "private": "172.20.0.5",
        "internet": "203.0.113.10", "vxlanpod": "10.244.3.20", "service": "10.96.0.10",
    },
    6: {
        "poda": "fd00:10:244:1::a", "podb": "fd00:10:244:1::b", "gateway": "fd00:10:244:1::1", "node": "fd00:50::1",
        "othernode": "fd00:50::2", "remotepod": "fd00:10:244:2::20", "private": "fd12:3456::5",
        "internet": "2001:db8::10", "vxlanpod": "fd00:10:244:3::20", "service": "fd00:10:96::10",
    },
}  # fmt: skip

PODS: dict[Family, str] = {4: "10.244.1.0/24", 6: "fd00:10:244:1::/120"}

_EVERYWHERE: dict[Family, str] = {4: "0.0.0.0/0", 6: "::/0"}

_WIDEST: dict[Family, int] = {4: 32, 6: 128}

_MACS = {"poda": "02:00:00:00:01:0a", "podb": "02:00:00:00:01:0b", "up": "02:00:00:00:50:01", "vx": "02:00:00:00:99:01"}
_PEER_MACS = {name: mac.replace("02:00", "02:ff", 1) for name, mac in _MACS.items()}

_SYSCTLS = (
    "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1",
    *(
        f"net.{key}"
        for scope in ("all", "default")
        for key in (
            f"ipv4.conf.{scope}.rp_filter=0", f"ipv4.conf.{scope}.send_redirects=0",
            f"ipv4.conf.{scope}.route_localnet=1", f"ipv6.conf.{scope}.accept_dad=0",
            f"ipv6.conf.{scope}.accept_ra=0", f"ipv6.conf.{scope}.router_solicitations=0",
            f"ipv6.conf.{scope}.mldv1_unsolicited_report_interval=1",
            f"ipv6.conf.{scope}.mldv2_unsolicited_report_interval=1",
            f"ipv6.conf.{scope}.addr_gen_mode=1",
        )
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Lab:
    """The namespaces of one topology, by the prefix of their names."""

    prefix: str

    def name(self, place: str) -> str:
        """The namespace of a place."""
        return f"{self.prefix}-{place}"

    def run(self, place: str, *command: str, text: str | None = None) -> str:
        """Run a command in a namespace; its output. An error shows what the command said."""
        done = subprocess.run(
            ["ip", "netns", "exec", self.name(place), *command], input=text, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}"
        return done.stdout

    def socket(self, place: str, family: Family, address: str, port: int = 0) -> socket.socket:
        """A UDP socket that lives in a namespace, bound to an address there, with a timeout."""
        with inside(self.name(place)):
            made = socket.socket(socket.AF_INET if family == 4 else socket.AF_INET6, socket.SOCK_DGRAM)
        made.settimeout(PATIENCE)
        made.bind((address, port))
        return made


@contextlib.contextmanager
def inside(name: str) -> Iterator[None]:
    """Move the calling thread into a network namespace that a test made, and back."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/proc/thread-self/ns/net").open("rb") as home, (Path("/run/netns") / name).open("rb") as there:
        assert os.fstat(there.fileno()).st_ino != Path("/proc/self/ns/net").stat().st_ino, "never where the test began"
        if libc.setns(there.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
        try:
            yield
        finally:
            if libc.setns(home.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns back")


@contextlib.contextmanager
def namespace(prefix: str) -> Iterator[Lab]:
    """One empty namespace, `node`, that is gone at the end."""
    lab = Lab(f"{prefix}{os.getpid()}")
    try:
        _ip("netns", "add", lab.name("node"))
        lab.run("node", "ip", "link", "set", "lo", "up")
        yield lab
    finally:
        subprocess.run(["ip", "netns", "del", lab.name("node")], capture_output=True, check=False)


@contextlib.contextmanager
def topology(prefix: str) -> Iterator[Lab]:
    """The whole topology, that is gone at the end."""
    lab = Lab(f"{prefix}{os.getpid()}")
    places = ("node", "poda", "podb", "far")
    try:
        for place in places:
            _ip("netns", "add", lab.name(place))
            lab.run(place, "sysctl", "-qw", *_SYSCTLS)
            lab.run(place, "ip", "link", "set", "lo", "up")
        for pod in ("poda", "podb"):
            _wire_pod(lab, pod)
        _wire_far(lab)
        _wire_vxlan(lab)
        _wait_for_silence(lab)
        yield lab
    finally:
        for place in places:
            subprocess.run(["ip", "netns", "del", lab.name(place)], capture_output=True, check=False)


def counters(lab: Lab) -> dict[str, dict[str, tuple[int, int]]]:
    """All counters of our sets that are not 0, as `ipset save` shows them: set -> element -> (packets, bytes)."""
    found: dict[str, dict[str, tuple[int, int]]] = {}
    pattern = re.compile(r"^add (\S+) (\S+) packets (\d+) bytes (\d+)$", re.MULTILINE)
    for name, element, packets, octets in pattern.findall(lab.run("node", "ipset", "save")):
        if int(packets):
            found.setdefault(name, {})[element] = (int(packets), int(octets))
    return found


def _wait_for_silence(lab: Lab) -> None:
    """Let the reports of multicast membership pass that new addresses cause."""
    before = ""
    for _ in range(300):
        time.sleep(0.2)
        now = lab.run("node", "cat", "/proc/net/dev")
        if now == before:
            return
        before = now
    raise AssertionError("the topology never falls silent")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def _lines(lab: Lab, place: str, *lines: str) -> None:
    """Run lines of `ip`, for the family that the addresses in them have."""
    family = "-6" if any("::" in line for line in lines) else "-4"
    lab.run(place, "ip", family, "-batch", "-", text="\n".join(lines) + "\n")


def _wire_pod(lab: Lab, pod: str) -> None:
    near, far = _MACS[pod], _PEER_MACS[pod]
    _lines(
        lab,
        "node",
        f"link add v{pod} address {near} type veth peer name eth0 address {far} netns {lab.name(pod)}",
        f"link set v{pod} up",
    )
    _lines(lab, pod, "link set eth0 up")
    for family, bits in _WIDEST.items():
        ip, gateway = ADDRESSES[family][pod], ADDRESSES[family]["gateway"]
        _lines(
            lab,
            "node",
            f"addr add {gateway}/{bits} dev v{pod}",
            f"route add {ip}/{bits} dev v{pod}",
            f"neigh add {ip} lladdr {far} dev v{pod} nud permanent",
        )
        _lines(
            lab,
            pod,
            f"addr add {ip}/{bits} dev eth0",
            f"route add {gateway}/{bits} dev eth0",
            f"route add default via {gateway} dev eth0",
            f"neigh add {gateway} lladdr {near} dev eth0 nud permanent",
        )


def _wire_far(lab: Lab) -> None:
    _lines(
        lab,
        "node",
        f"link add up0 address {_MACS['up']} type veth"
        f" peer name eth0 address {_PEER_MACS['up']} netns {lab.name('far')}",
        "link set up0 up",
    )
    _lines(lab, "far", "link set eth0 up")
    for family, bits in _WIDEST.items():
        subnet = 24 if family == 4 else 64
        known = ADDRESSES[family]
        node, other = known["node"], known["othernode"]
        _lines(
            lab,
            "node",
            f"addr add {node}/{subnet} dev up0",
            f"neigh add {other} lladdr {_PEER_MACS['up']} dev up0 nud permanent",
            f"route add default via {other}",
        )
        _lines(
            lab,
            "far",
            f"addr add {other}/{subnet} dev eth0",
            *(f"addr add {known[place]}/{bits} dev lo" for place in ("remotepod", "private", "internet")),
            f"neigh add {node} lladdr {_MACS['up']} dev eth0 nud permanent",
            f"route add {PODS[family]} via {node}",
        )


def _wire_vxlan(lab: Lab) -> None:
    ends = {"node": ("node", "othernode", "vx"), "far": ("othernode", "node", "vx")}
    for place, (local, remote, mac) in ends.items():
        address = _MACS[mac] if place == "node" else _PEER_MACS[mac]
        _lines(
            lab,
            place,
            f"link add vx0 address {address} type vxlan id 7 local {ADDRESSES[4][local]} remote {ADDRESSES[4][remote]}"
            " dstport 8472 nolearning",
            "link set vx0 up",
        )
    for family, bits in _WIDEST.items():
        known = ADDRESSES[family]
        _lines(
            lab,
            "node",
            f"route add {known['vxlanpod']}/{bits} dev vx0",
            f"neigh add {known['vxlanpod']} lladdr {_PEER_MACS['vx']} dev vx0 nud permanent",
        )
        _lines(
            lab,
            "far",
            f"addr add {known['vxlanpod']}/{bits} dev vx0",
            f"rule add from {known['vxlanpod']} lookup 100",
            f"route add {_EVERYWHERE[family]} dev vx0 table 100",
            f"neigh add {known['poda']} lladdr {_MACS['vx']} dev vx0 nud permanent",
        )
