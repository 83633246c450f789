"""What the user's files ask for, with every error in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

from netacct import config as configuration
from netacct import desired, policy_file
from netacct.config import Config
from netacct.doctor.facts import Fault, Settings
from netacct.errors import ConfigError
from netacct.identity.ranges_providers import FoundRanges
from netacct.kernel import marks
from netacct.list_files import ListFiles
from netacct.policy import CLUSTER, MAY_BE_EMPTY, NODE, POD
from netacct.policy_found import Merged


def settings(path: str | None, flags: Mapping[str, str | list[str]]) -> tuple[Config, Settings]:
    """The configuration (with defaults where it has errors), and what it comes to."""
    config, errors = configuration.examine(path, flags)
    policy, local = None, FoundRanges(config.local_ranges)
    lists = ListFiles(config.state_dir)
    try:
        policy = policy_file.load(config.policy, lists, named_at=config.origins.get("policy", ""))
    except ConfigError as error:
        errors.append(error)
    errors += lists.stale.values()
    try:
        local = desired.local_ranges(config)
    except ConfigError as error:
        errors.append(error)
    found = Settings(
        configured=any(origin != "default" for origin in config.origins.values()),
        enabled=config.enabled,
        local=local.networks,
        unread=local.faults,
        marks=cast("marks.Mode", config.marks.mode),  # the configuration accepts nothing else
        host_pods=config.host_pods == "cgroup",
        faults=tuple(Fault(_where(error), str(error)) for error in errors),
    )
    return config, found if policy is None else _with_policy(found, desired.merged(config, policy, local))


def _with_policy(found: Settings, merged: Merged) -> Settings:
    policy, unused = merged
    known = {prefix.traffic for prefix in policy.prefixes}
    if CLUSTER in known:  # pods and nodes that no CIDR tells apart
        known |= {POD, NODE}
    return replace(
        found,
        policy=policy.name,
        unknown=tuple(name for name in MAY_BE_EMPTY if name not in known),
        unused=tuple(f"{fact.network} {fact.traffic} ({fact.origin}): {why}" for fact, why in unused),
        pods=tuple(prefix.network for prefix in policy.prefixes if prefix.traffic == POD),
        tunnel=policy.tunnel,
        mask=policy.marks.mask if policy.marks else 0,
    )


def _where(error: ConfigError) -> str:
    return error.file if error.line is None else f"{error.file}:{error.line}"
