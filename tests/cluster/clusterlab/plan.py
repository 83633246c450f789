"""The addresses of a cluster. They are the same in every cluster: each lives in network namespaces of its own."""

from __future__ import annotations

import ipaddress
from typing import Literal, NamedTuple

Family = Literal[4, 6]
FAMILIES: tuple[Family, ...] = (4, 6)
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Pair = dict[Family, str]
"""One address, or one network, per family."""

INTERNET: Pair = {4: "203.0.113.10", 6: "2001:db8::10"}
"""The addresses of the internet host that count as `internet`."""
INTERNET_RANGES: Pair = {4: "203.0.113.0/24", 6: "2001:db8::/32"}
API_SERVICE: Pair = {4: "10.96.0.1"}
"""The service `kubernetes`, which has one family."""
PODS: Pair = {4: "10.244.0.0/16", 6: "fd00:10:244::/48"}
SERVICES: Pair = {4: "10.96.0.0/16", 6: "fd00:10:96::/112"}
HOSTS: Pair = {4: "192.168.50.0/24", 6: "fd00:50::/64"}
WIDTH: dict[Family, int] = {4: 24, 6: 64}
"""The prefix length of the fabric."""
GATEWAY: Pair = {4: "192.168.50.1", 6: "fd00:50::1"}
"""The internet host on the fabric, which is everybody's default route."""
CONTROL_PLANE: Pair = {4: "192.168.50.2", 6: "fd00:50::2"}
API_PORT = 6443


def host(number: int) -> Pair:
    """The addresses of node `number`, from 1."""
    return {4: f"192.168.50.{10 + number}", 6: f"fd00:50::{10 + number:x}"}


def pods(number: int) -> Pair:
    """The pod ranges of node `number`."""
    return {4: f"10.244.{number}.0/24", 6: f"fd00:10:244:{number}::/64"}


def pod_gateway(number: int) -> Pair:
    """The address in its pod range that the ptp plugin gives to every host-side veth of node `number`."""
    return {4: f"10.244.{number}.1", 6: f"fd00:10:244:{number}::1"}


class Class(NamedTuple):
    """A traffic class of the policy that the cluster's agents have."""

    name: str
    cidrs: tuple[str, ...]


CLASSES = (
    Class("pod", tuple(PODS.values())),
    Class("node", tuple(HOSTS.values())),
    Class("service", tuple(SERVICES.values())),
    Class("private", ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16", "fc00::/7", "fe80::/10")),
    Class("private", ("224.0.0.0/3", "ff00::/8")),
)
"""Everything else is `internet`. `private` is written out: truth must not ask the agent's code what it contains."""

POLICY = {
    "classes": {
        **{name: {"cidrs": list(cidrs)} for name, cidrs in CLASSES if name != "private"},
        "private": {"builtin": "private"},
    },
    "default": "internet",
}
"""The same as a policy file."""
