"""Traffic classes: which address is which kind of peer.

A policy maps CIDRs to classes; the longest prefix wins across all classes; what no CIDR covers is the default class.
This module holds the values and the pure functions on them; `policy_file.py` reads them from YAML.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from netacct.model import Network

MAY_BE_EMPTY = ("pod", "node", "service")
"""Classes that need no CIDR in the file, because they are found at run time."""


class Prefix(NamedTuple):
    """One CIDR of one class. `origin` says where it comes from, for people: `default.yaml:7`, `built-in private`."""

    network: Network
    traffic: str
    origin: str


@dataclass(frozen=True, slots=True)
class TrafficClass:
    """A class of the policy, apart from its CIDRs."""

    name: str
    zone: str = ""
    region: str = ""


@dataclass(frozen=True, slots=True)
class Tunnel:
    """What counts as encapsulation on the host's own packets: UDP destination ports, IP protocol numbers."""

    udp: tuple[int, ...] = (4789, 6081, 8472, 51820)
    protocols: tuple[int, ...] = (4, 41, 47, 50)


@dataclass(frozen=True, slots=True)
class MarkTable:
    """The fwmark value of each class inside one mask. A class without a value gets no mark."""

    mask: int
    values: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Policy:
    """A set of traffic classes. Every address has exactly one class (`pod`, `node`, `service` always exist)."""

    name: str
    path: str
    hash: str
    classes: tuple[TrafficClass, ...]
    prefixes: tuple[Prefix, ...]
    default: str
    tunnel: Tunnel = Tunnel()
    marks: MarkTable | None = None
