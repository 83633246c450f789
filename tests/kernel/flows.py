"""Conversations through the small node of `lab.py`, and where each must be counted; NAT as others install it."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

from lab import ADDRESSES, Lab

from netacct.model import Family, pack
from netacct.policy import MarkTable, Policy, Prefix, TrafficClass

CIDRS = {
    "10.244.0.0/16": "pod", "192.168.50.0/24": "node", "10.96.0.0/12": "service", "10.0.0.0/8": "private",
    "172.16.0.0/12": "private", "192.168.0.0/16": "private", "fd00:10:244::/48": "pod", "fd00:50::/64": "node",
    "fd00:10:96::/112": "service", "fc00::/7": "private", "fe80::/10": "private", "ff00::/8": "private",
}  # fmt: skip

POLICY = Policy(
    "lab",
    "lab.yaml",
    "0",
    tuple(TrafficClass(name) for name in ("pod", "node", "service", "private", "internet")),
    tuple(Prefix(ipaddress.ip_network(cidr), traffic, "lab") for cidr, traffic in CIDRS.items()),
    "internet",
)

OWN = [pack(ADDRESSES[family][name]) for family in (4, 6) for name in ("node", "gateway")]

MARKS = MarkTable(0x1F, {"pod": 1, "node": 2, "service": 3, "private": 4, "internet": 5})

PORT = 9000

REQUESTS, REQUEST, REPLY = 3, 100, 40
"""Datagrams each way, and how long their payloads are."""

HEADERS: dict[Family, int] = {4: 28, 6: 48}
VXLAN = 50
"""Outer IPv4, UDP, VXLAN and inner Ethernet header."""


@dataclass(frozen=True)
class Flow:
    """A conversation, and where its requests and replies must be counted.

    client, server: a namespace and the name of an address in it. to: the address the client sends to.
    request, reply: counters as `SET ELEMENT`, with an address name for ELEMENT; host counters as `SET` alone.
    tunnelled: it also crosses the VXLAN, whose outer packets are IPv4.
    """

    name: str
    client: tuple[str, str]
    server: tuple[str, str]
    request: tuple[str, ...]
    reply: tuple[str, ...]
    to: str = ""
    tunnelled: bool = False
    dnat: str = ""


FLOWS = (
    Flow("pod to local pod", ("poda", "poda"), ("podb", "podb"),
         ("tx-pod poda", "rx-pod podb"), ("tx-pod podb", "rx-pod poda")),
    Flow("pod to remote pod", ("poda", "poda"), ("far", "remotepod"), ("tx-pod poda",), ("rx-pod poda",)),
    Flow("remote pod to pod", ("far", "remotepod"), ("podb", "podb"), ("rx-pod podb",), ("tx-pod podb",)),
    Flow("pod to node", ("poda", "poda"), ("node", "node"),
         ("tx-node poda", "hi-pod"), ("rx-node poda", "ho-pod")),
    Flow("pod to gateway in the local range", ("poda", "poda"), ("node", "gateway"),
         ("tx-node poda", "hi-pod"), ("rx-node poda", "ho-pod")),
    Flow("node to pod", ("node", "node"), ("podb", "podb"),
         ("ho-pod", "rx-node podb"), ("tx-node podb", "hi-pod")),
    Flow("gateway to pod", ("node", "gateway"), ("podb", "podb"),
         ("ho-pod", "rx-node podb"), ("tx-node podb", "hi-pod")),
    Flow("gateway to internet", ("node", "gateway"), ("far", "internet"), ("ho-internet",), ("hi-internet",)),
    Flow("pod to internet", ("poda", "poda"), ("far", "internet"), ("tx-internet poda",), ("rx-internet poda",)),
    Flow("internet to pod", ("far", "internet"), ("podb", "podb"), ("rx-internet podb",), ("tx-internet podb",)),
    Flow("pod to private", ("poda", "poda"), ("far", "private"), ("tx-private poda",), ("rx-private poda",)),
    Flow("pod to other node", ("poda", "poda"), ("far", "othernode"), ("tx-node poda",), ("rx-node poda",)),
    Flow("host to internet", ("node", "node"), ("far", "internet"), ("ho-internet",), ("hi-internet",)),
    Flow("internet to host", ("far", "internet"), ("node", "node"), ("hi-internet",), ("ho-internet",)),
    Flow("host to private", ("node", "node"), ("far", "private"), ("ho-private",), ("hi-private",)),
    Flow("host to other node", ("node", "node"), ("far", "othernode"), ("ho-node",), ("hi-node",)),
    Flow("host to itself", ("node", "node"), ("node", "gateway"), (), ()),
    Flow("pod to ClusterIP, local backend", ("poda", "poda"), ("podb", "podb"), to="service", dnat="podb",
         request=("tx-pod poda", "rx-pod podb"), reply=("tx-pod podb", "rx-pod poda")),
    Flow("pod to ClusterIP, internet backend", ("poda", "poda"), ("far", "internet"), to="service", dnat="internet",
         request=("tx-internet poda",), reply=("rx-internet poda",)),
    Flow("host to ClusterIP, local backend", ("node", "node"), ("podb", "podb"), to="service", dnat="podb",
         request=("ho-service", "rx-node podb"), reply=("tx-node podb", "hi-pod")),
    Flow("pod through the VXLAN", ("poda", "poda"), ("far", "vxlanpod"), tunnelled=True,
         request=("tx-pod poda",), reply=("rx-pod poda",)),
)  # fmt: skip


def listener(lab: Lab, family: Family, end: tuple[str, str], port: int = PORT) -> socket.socket:
    """A UDP socket at an end of a flow."""
    return lab.socket(end[0], family, ADDRESSES[family][end[1]], port)


def talk(lab: Lab, family: Family, flow: Flow, to: str = "", port: int = PORT) -> set[str]:
    """Send the requests and answer each; the addresses from which the server saw them come."""
    seen = set()
    with listener(lab, family, flow.client, 0) as client, listener(lab, family, flow.server) as server:
        target = to or ADDRESSES[family][flow.to or flow.server[1]]
        for _ in range(REQUESTS):
            client.sendto(b"q" * REQUEST, (target, port))
            data, sender = server.recvfrom(2048)
            assert len(data) == REQUEST
            seen.add(sender[0])
            server.sendto(b"r" * REPLY, sender)
            assert len(client.recv(2048)) == REPLY
    return seen


def nat(lab: Lab, family: Family, *rules: str, backend: str = "legacy") -> None:
    """Add rules to the node's table nat, as Kubernetes does."""
    tool = f"iptables-{backend}" if family == 4 else f"ip6tables-{backend}"
    for rule in rules:
        lab.run("node", tool, "-w", "-t", "nat", *rule.split())


def dnat(lab: Lab, family: Family, server: str, backend: str = "legacy") -> None:
    """Make the service lead to a server, for pods and for the node itself."""
    ip = ADDRESSES[family][server]
    target = f"{ip}:{PORT}" if family == 4 else f"[{ip}]:{PORT}"
    service = ADDRESSES[family]["service"]
    rules = (f"-A {hook} -d {service} -p udp -j DNAT --to {target}" for hook in ("PREROUTING", "OUTPUT"))
    nat(lab, family, *rules, backend=backend)
