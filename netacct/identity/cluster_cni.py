"""The cluster's pod ranges in CNI configuration: of Calico, whose IPAM names its pools there.

Most plugins say nothing about the rest of the cluster: host-local (kindnet, kubenet, GKE, ptp, bridge) has this node's
range, Azure, AWS and Cilium have none at all, and routes and portmap conditions in a configuration name whatever their
author wants reached, which need not be pods. Calico's IPAM (type calico-ipam) takes `ipv4_pools` and `ipv6_pools`,
lists of CIDRs or of the names of pools, of which only the CIDRs say something here (calico
cni-plugin/internal/pkg/utils, ParsePools).
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterator
from typing import Any

from netacct.identity.cluster import read_cidrs
from netacct.identity.ranges_cni import objects
from netacct.policy import POD, Prefix

_KEYS = ("ipv4_pools", "ipv6_pools")


def parse(text: str, path: str) -> tuple[list[Prefix], list[str]]:
    """The facts of a network configuration (list), and what is wrong in it.

    What is no JSON says nothing and is no fault here: the provider `cni` of local ranges reports it.
    """
    facts: list[Prefix] = []
    faults: list[str] = []
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return facts, faults
    for ipam in _calico(document):
        for key in _KEYS:
            pools = ipam.get(key)
            for pool in pools if isinstance(pools, list) else ():
                if isinstance(pool, str) and _is_network(pool):
                    good, bad = read_cidrs(pool, POD, f"found in {path} ({key})")
                    facts += good
                    faults += bad
    return facts, faults


def _is_network(pool: str) -> bool:
    try:
        ipaddress.ip_network(pool)
    except ValueError:
        return False
    return True


def _calico(document: Any) -> Iterator[dict[str, Any]]:
    """Each IPAM of Calico, at any depth."""
    return (node for node in objects(document) if node.get("type") == "calico-ipam")
