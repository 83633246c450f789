"""Who takes part in the demo, and at which addresses. Plain data.

A *place* is an address that somebody has; an *actor* is the namespace that has it. Most places are called like their
actor. A service is a place of nobody: the node rewrites it to a real place.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

Family: TypeAlias = Literal[4, 6]
FAMILIES: tuple[Family, ...] = (4, 6)


class Pod(NamedTuple):
    """A pod as the agent shall know it; `host` is the last part of both of its addresses."""

    namespace: str
    name: str
    kind: str
    workload: str
    host: int


PODS = {
    pod.name: pod
    for pod in (
        Pod("team-a", "train-0", "Job", "train", 10),
        Pod("team-a", "train-1", "Job", "train", 11),
        Pod("team-b", "eval-0", "Job", "eval", 12),
        Pod("team-b", "web-0", "Deployment", "web", 13),
        # these two come later, each at the address of one that died
        Pod("team-b", "eval-1", "Job", "eval", 11),
        Pod("team-a", "train-2", "Job", "train", 12),
    )
}
FIRST_PODS = ("train-0", "train-1", "eval-0", "web-0")
HEIRS: dict[Family, tuple[str, str]] = {4: ("train-1", "eval-1"), 6: ("eval-0", "train-2")}
"""Who dies, and who gets its addresses, while a family is driven."""

PEERS = ("other", "gateway", "remote", "private", "internet")
NEIGHBOURS = ("other", "gateway")
"""Peers on the node's own link, whose multicast it hears."""

ADDRESSES: dict[Family, dict[str, str]] = {
    4: {
        "node": "192.168.50.1",
        "node-bridge": "10.244.1.1",  # inside the pods' range, as CNI plugins do it
        "node-overlay": "10.244.1.254",
        "node-loopback": "127.0.0.1",
        "other": "192.168.50.2",
        "gateway": "192.168.50.254",
        "remote": "10.244.2.20",
        "remote-overlay": "10.244.3.20",
        "private": "172.20.0.5",
        "storage": "172.20.9.5",
        "exit": "203.0.113.10",
        "internet": "203.0.113.20",
        "service-web": "10.96.0.10",
        "service-remote": "10.96.0.11",
        **{name: f"10.244.1.{pod.host}" for name, pod in PODS.items()},
    },
    6: {
        "node": "fd00:50::1",
        "node-bridge": "fd00:10:244:1::1",
        "node-overlay": "fd00:10:244:1::254",
        "node-loopback": "::1",
        "other": "fd00:50::2",
        "gateway": "fd00:50::fe",
        "remote": "fd00:10:244:2::20",
        "remote-overlay": "fd00:10:244:3::20",
        "private": "fd12:3456::5",
        "storage": "fd12:3456:9::5",
        "exit": "2001:db8::10",
        "internet": "2001:db8::20",
        "service-web": "fd00:10:96::10",
        "service-remote": "fd00:10:96::11",
        **{name: f"fd00:10:244:1::{pod.host}" for name, pod in PODS.items()},
    },
}

ACTORS = {
    "node-bridge": "node",
    "node-overlay": "node",
    "node-loopback": "node",
    "remote-overlay": "remote",
    "storage": "private",
    "exit": "internet",
}
"""The actor of each place that is not called like its actor. `exit` is a second internet host, which only pods talk to
and only through the node's own address: what comes from there is never the host's."""

BACKENDS = {"service-web": "web-0", "service-remote": "remote"}
"""Where the node sends what is addressed to a ClusterIP."""

LOCAL_RANGES: dict[Family, str] = {4: "10.244.1.0/24", 6: "fd00:10:244:1::/64"}

CLASSES: dict[str, tuple[str, ...]] = {
    "pod": ("10.244.0.0/16", "fd00:10:244::/48"),
    "node": ("192.168.50.0/24", "fd00:50::/64"),
    "service": ("10.96.0.0/12", "fd00:10:96::/112"),
    "storage": ("172.20.9.0/24", "fd12:3456:9::/64"),
}
"""The classes of the demo's policy that have CIDRs of their own; `storage` lies inside of `private`."""

# Ports say how a packet is counted: data between these two by the sockets that sent and received it, all else by nft.
SOCKET_PORTS = (20000, 29999)
NODE_PORTS = (25000, 25899)
NODE_PORTS_REMOTE = (25900, 25999)
HOST_PORTS = (26000, 26999)
VXLAN_PORT = 4789


def actor_of(place: str) -> str:
    """The namespace that has the address of a place."""
    return ACTORS.get(place, place)


def backend_of(place: str) -> str:
    """Where a packet to this place ends up: somewhere else for a service, right there for all others."""
    return BACKENDS.get(place, place)
