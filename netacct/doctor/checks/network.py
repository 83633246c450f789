"""Interfaces: bridges that keep frames from netfilter, tunnels that the policy does not know."""

from __future__ import annotations

from collections.abc import Iterable

from netacct.doctor.facts import Facts, Link
from netacct.doctor.finding import Finding, finding
from netacct.model import Network

_PROTOCOLS = {"ipip": 4, "sit": 41, "ip6tnl": 41, "gre": 47, "gretap": 47, "erspan": 47, "ip6gre": 47, "ip6gretap": 47}
"""The protocol that each kind of tunnel sends (IANA protocol numbers), as `ip link` names the kinds."""

_CALLS = {4: "iptables", 6: "ip6tables"}


def bridges(facts: Facts) -> Iterable[Finding]:
    """Bridges with pods on them whose frames do not pass the rules."""
    for link in facts.links:
        if link.kind != "bridge":
            continue
        ports = [port for port in facts.links if port.master == link.number and port.kind == "veth"]
        blind = [
            f"bridge-nf-call-{_CALLS[version]}" for version in _pods_on(link, facts) if _blind(link, version, facts)
        ]
        if ports and blind:
            what = f"{link.name} joins {len(ports)} veth interfaces in a local range, and {', '.join(blind)} is off"
            yield finding("bridge-without-netfilter", what, link.name)


def _pods_on(bridge: Link, facts: Facts) -> list[int]:
    """The families in which a network of the bridge overlaps a local range."""
    networks = [item.network for item in facts.networks if item.link == bridge.number]
    return sorted({net.version for net in networks if any(_overlap(net, local) for local in facts.settings.local)})


def _overlap(one: Network, other: Network) -> bool:
    return one.version == other.version and one.overlaps(other)


def _blind(bridge: Link, version: int, facts: Facts) -> bool:
    """Whether neither the namespace nor the bridge itself shows frames of this family to netfilter."""
    everywhere = facts.sysctls.get(f"net.bridge.bridge-nf-call-{_CALLS[version]}", 0)
    return not everywhere and not bridge.calls[version == 6]


def tunnels(facts: Facts) -> Iterable[Finding]:
    """Tunnels that are up, and whose outer packets the policy does not count as encapsulation."""
    tunnel = facts.settings.tunnel
    for link in facts.links:
        if not link.up:
            continue
        if link.port and link.port not in tunnel.udp:
            what = f"{link.name} ({link.kind}) uses UDP port {link.port}, which is not in tunnel.udp"
            yield finding("tunnel-not-in-policy", what, link.name)
        protocol = _PROTOCOLS.get(link.kind)
        if protocol is not None and protocol not in tunnel.protocols:
            what = f"{link.name} ({link.kind}) uses IP protocol {protocol}, which is not in tunnel.protocols"
            yield finding("tunnel-not-in-policy", what, link.name)


CHECKS = (bridges, tunnels)
