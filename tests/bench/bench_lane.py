"""A lane: a pod, its node and everything beyond, each in a namespace of its own, and the ways a packet can take.

Every variant has its own lane of the same shape, with everything installed before the first packet, so that variants
can take turns at once. Packets end where they arrive, at the first thing that the receiver runs.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench_netns import Namespace, run
from bench_product import Booked

PORT = 9999
PAYLOAD = 64
POD, NODE, PEER = "10.244.1.10", "192.168.50.1", "192.168.50.2"
INTERNET = "203.0.113.10"
GATEWAY = "169.254.1.1"
MAC = "02:00:00:00:00:{:02x}"
HERE = Path(__file__).parent
BLAST = HERE / "bin" / "blast"
SO_ATTACH_FILTER = 26  # include/uapi/asm-generic/socket.h
DROP_AT_INGRESS = """table netdev bench {
  chain arrived { type filter hook ingress device "eth0" priority 0; ip protocol udp udp dport %d counter drop; }
}"""


def compile_blast() -> None:
    """Make the sender from blast.c, where it is missing or older than its source."""
    source = HERE / "blast.c"
    if not BLAST.exists() or BLAST.stat().st_mtime < source.stat().st_mtime:
        BLAST.parent.mkdir(exist_ok=True)
        run("gcc", "-O2", "-Wall", "-Wextra", "-o", str(BLAST), str(source))


def sender_cpu() -> int:
    """The CPU that the sender is pinned to: the last one that we may use; interrupts favour the first."""
    return max(os.sched_getaffinity(0))


@dataclass(frozen=True, slots=True)
class Flow:
    """A way through a lane.

    sender: the end that sends (`pod`, `node`, `inet`).
    routes: a file of routes (source or "-", destination), which the packets take in turn.
    length: how many routes it has.
    books:  what netacct must book, in packets, when each route was taken once.
    """

    name: str
    sender: str
    routes: Path
    length: int
    books: Mapping[Booked, int]


@dataclass(frozen=True, slots=True)
class Cost:
    """What one packet took, in nanoseconds: of the sender's CPU time, and of the clock."""

    cpu: float
    wall: float


def write_routes(path: Path, routes: Iterable[tuple[str, str]]) -> Path:
    """Write a file of routes for blast; returns its path."""
    path.write_text("".join(f"{source} {destination}\n" for source, destination in routes))
    return path


class Lane:
    """One topology. `local_cidrs` is what the pod's end answers for besides `POD`."""

    def __init__(self, local_cidrs: Sequence[str] = ()) -> None:
        self.pod, self.node, self.inet = Namespace(), Namespace(), Namespace()
        self._wire(local_cidrs)
        self._end_packets()

    def _wire(self, local_cidrs: Sequence[str]) -> None:
        for namespace in (self.pod, self.node, self.inet):
            # no packet of the kernel's own, and none refused for the way it came
            namespace.run(
                "sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv4.conf.all.rp_filter=0",
                "net.ipv4.conf.default.rp_filter=0", "net.ipv4.conf.all.send_redirects=0",
                "net.ipv4.conf.default.send_redirects=0", "net.ipv6.conf.all.disable_ipv6=1",
                "net.ipv6.conf.default.disable_ipv6=1",
            )  # fmt: skip
        self.node.ip(
            f"link add vpod address {MAC.format(1)} type veth peer name eth0 address {MAC.format(2)} "
            f"netns {self.pod.path}",
            f"link add up0 address {MAC.format(3)} type veth peer name eth0 address {MAC.format(4)} "
            f"netns {self.inet.path}",
            "link set vpod up",
            "link set up0 up",
            f"addr add {GATEWAY}/32 dev vpod",
            f"addr add {NODE}/24 dev up0",
            f"neigh replace {PEER} lladdr {MAC.format(4)} dev up0 nud permanent",
            f"route add default via {PEER} dev up0",
            # the link is point to point: one neighbour entry, not one for each address behind it
            f"neigh replace 169.254.1.2 lladdr {MAC.format(2)} dev vpod nud permanent",
            *(f"route add {cidr} via 169.254.1.2 dev vpod onlink" for cidr in (f"{POD}/32", *local_cidrs)),
        )
        self.pod.ip(
            "link set eth0 up",
            f"addr add {POD}/32 dev eth0",
            *(f"route add local {cidr} dev lo" for cidr in local_cidrs),
            f"neigh replace {GATEWAY} lladdr {MAC.format(1)} dev eth0 nud permanent",
            f"route add {GATEWAY} dev eth0 scope link",
            f"route add default via {GATEWAY} dev eth0",
        )
        self.inet.ip(
            "link set eth0 up",
            f"addr add {PEER}/24 dev eth0",
            f"neigh replace {NODE} lladdr {MAC.format(3)} dev eth0 nud permanent",
            f"route add default via {NODE} dev eth0",
            "route add local 203.0.113.0/24 dev lo",
            "route add local 10.244.32.0/24 dev lo",
            "route add local 10.96.0.0/16 dev lo",
            "route add local 172.20.0.0/24 dev lo",
        )

    def _end_packets(self) -> None:
        for namespace in (self.pod, self.inet):
            namespace.run("nft", "-f", "-", text=DROP_AT_INGRESS % PORT)
        with self.node.entered():
            self._sink = _deaf_socket()

    def blast(self, flow: Flow, warm: int, count: int) -> Cost:
        """Send `warm` packets, then `count` measured ones, along a flow."""
        sender: Namespace = getattr(self, flow.sender)
        numbers = (sender_cpu(), PAYLOAD, warm, count, PORT)
        sent, cpu, wall = map(int, sender.run(str(BLAST), *map(str, numbers), str(flow.routes)).split())
        return Cost(cpu / sent, wall / sent)

    def start(self, *argv: str, **options: object) -> subprocess.Popen[bytes]:
        """Start a program on the node that dies with the bench."""
        command = self.node.command("setpriv", "--pdeathsig", "KILL", *argv)
        return subprocess.Popen(command, **options)  # type: ignore[call-overload,no-any-return]  # Popen's own options

    def close(self) -> None:
        """Take the lane down."""
        self._sink.close()
        for namespace in (self.pod, self.node, self.inet):
            namespace.close()


def _deaf_socket() -> socket.socket:
    """A UDP socket on `PORT` whose filter accepts nothing: the cheapest end that the stack has for a packet to it."""
    ret_0 = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # struct sock_filter: BPF_RET | BPF_K, 0
    deaf = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    deaf.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(ret_0)))
    deaf.bind(("", PORT))
    return deaf
