"""What the plan of a running agent is made of, and making it: what is known of the node, besides its configuration."""

from __future__ import annotations

from collections.abc import Collection

from netacct.config import Config
from netacct.desired import host_pod_levels
from netacct.identity import ranges
from netacct.kernel import families
from netacct.kernel import plan as planning
from netacct.marking import Marking
from netacct.model import Address, Lease, Network, is_cgroup
from netacct.policy import Policy, Prefix, can_be_local
from netacct.policy_found import Merging


class Planner:
    """Makes plans. Worker thread only.

    Attributes:
        own: the node's own addresses, which are no pod's.
        found: what providers say the local ranges are, besides those of the configuration.
        cluster: what was found of the whole cluster's ranges.
    """

    def __init__(self) -> None:
        self.own: frozenset[Address] = frozenset()
        self.found: tuple[Network, ...] = ()
        self.cluster: tuple[Prefix, ...] = ()
        self._merge = Merging()

    def plan(
        self, config: Config, policy: Policy, marking: Marking, leases: Collection[Lease], more: Collection[Address]
    ) -> planning.Plan:
        """The plan of now: the local ranges, joined by each address that has a lease or may still have bytes.

        Args:
            config: the node's own part of what is asked for.
            policy: the traffic classes, as the file has them.
            marking: whether packets are marked.
            leases: those that are open, or that a change which is noted concerns.
            more: addresses without a lease that keep their counters.
        """
        named = {lease.ip for lease in leases}.union(more) - self.own
        # No source names other addresses; one that did, even once and long ago, must not leave a node without a plan.
        wanted = {ip for ip in named if not is_cgroup(ip) and can_be_local(ip)}
        levels = host_pod_levels(config, (lease.sandbox for lease in leases if is_cgroup(lease.ip)))
        local = ranges.join((*config.local_ranges, *self.found), wanted)
        merged = self._merge(policy, self.cluster, local).policy
        return planning.build(merged, local, self.own, marking.table(merged), families.present(), host_pods=levels)


def prefilled(plan: planning.Plan) -> set[Address]:
    """The addresses whose counters are there from the first, and never go."""
    return {ip for family in plan.families for ip in family.prefilled}
