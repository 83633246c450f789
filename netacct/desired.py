"""What should be in the kernel by configuration, policy and pods' files: for commands that run without an agent."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable

from netacct import marking, policy_file, policy_found, providers, sources
from netacct.config import Config
from netacct.errors import NetacctError
from netacct.identity import host_pods, ranges
from netacct.identity.ranges_providers import FoundRanges
from netacct.kernel import families
from netacct.kernel import plan as planning
from netacct.list_files import ListFiles
from netacct.model import Address, Network, Observation, is_cgroup
from netacct.policy import Policy
from netacct.policy_found import Merged


def observations(config: Config) -> tuple[Observation, ...]:
    """What the sources that read files say now. Raises ConfigError."""
    return tuple(seen for event in sources.once(config) for seen in event.observations)


def local_ranges(config: Config, own: Collection[Address] = ()) -> FoundRanges:
    """The local ranges, joined by the addresses of pods, with who names each. Raises ConfigError.

    Args:
        config: what is asked.
        own: the node's own addresses, which do not join.
    """
    named: dict[str, list[Network]] = {}
    for seen in observations(config):
        if seen.present and not is_cgroup(seen.ip) and seen.ip not in own:
            named.setdefault(f"source {seen.source}", []).append(ipaddress.ip_network(seen.ip))
    return providers.found(config, named)


def plan(config: Config, lists: ListFiles | None = None) -> tuple[planning.Plan, str]:
    """The plan for this node as it is now, and why it may lack the marks ("" where it does not).

    Args:
        config: what is asked.
        lists: reads the policy's lists, and tells afterwards which are not good; the agent's by default.

    Raises:
        ConfigError, DatapathError: there can be no plan.
    """
    policy = policy_file.load(
        config.policy, lists or ListFiles(config.state_dir), named_at=config.origins.get("policy", "")
    )
    decision = marking.decide(config, policy)
    own = ranges.own_addresses()
    found = local_ranges(config, own)
    marks = policy.marks if decision.enabled else None
    levels = host_pod_levels(config, (seen.sandbox for seen in observations(config) if is_cgroup(seen.ip)))
    wanted = merged(config, policy, found).policy
    made = planning.build(wanted, found.networks, own, marks, families.present(), host_pods=levels)
    return made, "" if decision.looked else decision.reason


def merged(config: Config, policy: Policy, found: FoundRanges) -> Merged:
    """The policy with the cluster's ranges that are found now, besides the local ones that were found."""
    return policy_found.merge(policy, sources.cluster_ranges(config, found.facts)[0], found.networks)


def host_pod_levels(config: Config, cgroups: Iterable[str]) -> set[int]:
    """Where in the cgroup tree hostNetwork pods are told apart: where kubelets have them, and where these are."""
    return {*host_pods.LEVELS, *map(host_pods.level, cgroups)} if config.host_pods == "cgroup" else set()


def require_enabled(config: Config) -> None:
    """Raise NetacctError where the configuration says that this node shall have no rules."""
    if not config.enabled:
        raise NetacctError("enabled is false in the configuration: rules stay removed")
