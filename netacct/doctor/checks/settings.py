"""What the user's files say, and what they leave out."""

from __future__ import annotations

from collections.abc import Iterable

from netacct.doctor.facts import Facts
from netacct.doctor.finding import Finding, finding


def faults(facts: Facts) -> Iterable[Finding]:
    """Errors in configuration, policy and pods file."""
    for where, what in facts.settings.faults:
        yield finding("configuration-invalid", what, where)


def no_local_range(facts: Facts) -> Iterable[Finding]:
    """Nothing says which addresses are pods. No fault where netacct was never set up."""
    settings = facts.settings
    if in_use(facts) and settings.enabled and not settings.local:
        yield finding(
            "no-local-range",
            "neither configuration nor pods file names an address of a pod of this node",
            "local_ranges",
        )


def cluster_ranges(facts: Facts) -> Iterable[Finding]:
    """Classes that only a CIDR can fill, without one."""
    unknown = facts.settings.unknown
    if in_use(facts) and unknown:
        what = f"policy {facts.settings.policy} has no CIDR for {', '.join(unknown)}"
        yield finding("cluster-ranges-unknown", what, f"policy {facts.settings.policy}")


def in_use(facts: Facts) -> bool:
    """Whether anybody has set netacct up here: configured it, installed its rules, or started it."""
    return facts.settings.configured or facts.rules.installed or facts.agent.pid is not None


CHECKS = (faults, no_local_range, cluster_ranges)
