"""What the kernel shall count: policy, local ranges and the node's own addresses, made into one value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from netacct.model import Address, Family, Network
from netacct.policy import MarkTable, Tunnel

PREFILL_LIMIT = 4096
"""So many local addresses, over both families, have their counters from the start."""


class Group(NamedTuple):
    """CIDRs of one class that lie in one layer."""

    traffic: str
    networks: tuple[Network, ...]


@dataclass(frozen=True, slots=True)
class FamilyPlan:
    """The plan for one address family.

    local:     the local ranges, canonical (no overlaps, sorted).
    dynamic:   those of them that are too large to prefill: an address gets its counters by lease or first packet.
    prefilled: every address of the others, minus the node's own, sorted.
    own:       the node's own addresses (no IPv6 link-local ones), sorted: class `node`, ahead of every CIDR.
    loopback:  127.0.0.0/8 or ::1/128: class `node`, ahead of every CIDR.
    layers:    all CIDRs, so that testing the layers in order, and each layer's groups in any order, gives the class
               with the longest prefix; what no group covers is the plan's default class. Redundant CIDRs are gone.
    """

    family: Family
    local: tuple[Network, ...]
    dynamic: tuple[Network, ...]
    prefilled: tuple[Address, ...]
    own: tuple[Address, ...]
    loopback: Network
    layers: tuple[tuple[Group, ...], ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a datapath installs. Equal plans mean the same kernel state.

    classes: every class name a packet can get, default included, `tunnel` not; in the policy's order.
    marks:   None where no mark shall be set.
    dynamic_capacity: counters for so many addresses of dynamic ranges fit in, per family.
    """

    policy: str
    policy_hash: str
    classes: tuple[str, ...]
    default: str
    tunnel: Tunnel
    marks: MarkTable | None
    families: tuple[FamilyPlan, ...]
    dynamic_capacity: int = 16384
