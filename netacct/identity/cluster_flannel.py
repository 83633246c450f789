"""The cluster's pod ranges as flannel knows them.

/run/flannel/subnet.env     FLANNEL_NETWORK and FLANNEL_IPV6_NETWORK, several with commas (flannel
                            pkg/subnet/subnet.go, WriteSubnetFile: written aside and renamed)
net-conf.json               Network and IPv6Network, with EnableIPv4 and EnableIPv6 (flannel pkg/subnet/config.go);
                            on the node itself with k3s and RKE2, which have flannel inside
"""

from __future__ import annotations

import json

from netacct.identity.cluster import read_cidrs
from netacct.policy import POD, Prefix

SUBNET_FILE = "/run/flannel/subnet.env"

CONFIGURATION = tuple(f"/var/lib/rancher/{name}/agent/etc/flannel/net-conf.json" for name in ("k3s", "rke2"))

_KEYS = ("FLANNEL_NETWORK", "FLANNEL_IPV6_NETWORK")
_MEMBERS = {"Network": ("EnableIPv4", True), "IPv6Network": ("EnableIPv6", False)}
"""What names a network, the switch that says whether it is meant, and what that is where it is missing."""


def parse_subnet_file(text: str, path: str) -> tuple[list[Prefix], list[str]]:
    """The facts of a subnet.env, and what is wrong in it."""
    facts: list[Prefix] = []
    faults: list[str] = []
    for line in text.splitlines():
        key, _, value = line.strip().partition("=")
        if key in _KEYS:
            good, bad = read_cidrs(value.strip("\"' "), POD, f"found in {path} ({key})")
            facts += good
            faults += bad
    return facts, faults


def parse_configuration(text: str, path: str) -> tuple[list[Prefix], list[str]]:
    """The facts of a net-conf.json, and what is wrong in it."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        return [], [f"{path} is not JSON: {error}"]
    if not isinstance(document, dict):
        return [], [f"{path} is not an object"]
    facts: list[Prefix] = []
    faults: list[str] = []
    for key, (switch, default) in _MEMBERS.items():
        value = document.get(key)
        if value and document.get(switch, default):
            good, bad = read_cidrs(str(value), POD, f"found in {path} ({key})")
            facts += good
            faults += bad
    return facts, faults
