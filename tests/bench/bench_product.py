"""The product under test: its policy, plan and datapaths, used as the agent uses them, in a given namespace."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench_netns import Namespace

from netacct import policy_file
from netacct.identity import host_pods
from netacct.kernel import plan
from netacct.kernel.iptables import IptablesDatapath
from netacct.kernel.nftables import NftablesDatapath
from netacct.model import Direction, Scope, pack

Booked = tuple[Scope, Direction, str]
"""What a packet is booked as, whoever the pod is: scope, direction, traffic class."""


DATAPATHS = {"iptables": IptablesDatapath, "nftables": NftablesDatapath}
"""The ways to count, by the name that the configuration has for them."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What netacct is told to count on one node, and how. `host_pods`: hostNetwork pods are told apart from it."""

    policy: Path
    local: Sequence[str]
    own: Sequence[str]
    marks: bool = False
    datapath: str = "iptables"
    host_pods: bool = False

    def plan(self) -> plan.Plan:
        """The plan of it."""
        policy = policy_file.load(str(self.policy))
        local = [ipaddress.ip_network(cidr) for cidr in self.local]
        own = [pack(address) for address in self.own]
        levels = host_pods.LEVELS if self.host_pods else ()
        return plan.build(policy, local, own, policy.marks if self.marks else None, host_pods=levels)


def install(node: Namespace, setup: Setup) -> None:
    """Install netacct's rules and sets on a node."""

    def inside() -> None:
        DATAPATHS[setup.datapath]().install(setup.plan())

    node.call(inside)


def booked_packets(node: Namespace, setup: Setup) -> Counter[Booked]:
    """How many packets netacct has counted on a node since it was installed, summed over all addresses."""

    def inside() -> Counter[Booked]:
        datapath, packets = DATAPATHS[setup.datapath](), Counter[Booked]()
        datapath.install(setup.plan())
        for reading in datapath.read().readings:
            _, scope, direction, traffic = reading.key
            packets[scope, direction, traffic] += sum(count[1] for count in reading.counts.values())
        return +packets

    return node.call(inside)
