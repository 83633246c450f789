"""What should be in the kernel by configuration, policy and pods file alone: for commands that run without an agent."""

from __future__ import annotations

from pathlib import Path

from netacct import clock, marking, policy_file, yamlfile
from netacct.config import Config
from netacct.errors import NetacctError
from netacct.identity import pods_file, ranges
from netacct.kernel import plan as planning
from netacct.model import Network, Observation


def observations(config: Config) -> tuple[Observation, ...]:
    """What the pods file says now; nothing where there is none, or nobody asked for it. Raises ConfigError."""
    path = config.identity.file.path
    if pods_file.SOURCE not in config.identity.sources or not Path(path).exists():
        return ()
    return pods_file.parse(yamlfile.read(path), path, clock.now())


def local_ranges(config: Config) -> tuple[Network, ...]:
    """The local ranges, joined by the addresses of the pods file. Raises ConfigError."""
    return ranges.join(config.local_ranges, {seen.ip for seen in observations(config) if seen.present})


def plan(config: Config) -> planning.Plan:
    """The plan for this node as it is now. Raises ConfigError and DatapathError."""
    policy = policy_file.load(config.policy)
    allowed = policy.marks if marking.decide(config, policy).enabled else None
    own = ranges.own_addresses()
    addresses = {seen.ip for seen in observations(config) if seen.present} - own
    return planning.build(policy, ranges.join(config.local_ranges, addresses), own, allowed)


def require_enabled(config: Config) -> None:
    """Raise NetacctError where the configuration says that this node shall have no rules."""
    if not config.enabled:
        raise NetacctError("enabled is false in the configuration: rules stay removed")
