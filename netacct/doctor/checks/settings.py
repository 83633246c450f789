"""What the user's files say, and what they leave out."""

from __future__ import annotations

from collections.abc import Iterable

from netacct.doctor.facts import Facts
from netacct.doctor.finding import Finding, finding
from netacct.model import Network


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
            "no configuration, provider of local ranges, result of CNI or pods file names a pod's address",
            "local_ranges",
        )


def ranges_not_read(facts: Facts) -> Iterable[Finding]:
    """Providers of local ranges that do not answer now."""
    for what in facts.settings.unread if in_use(facts) else ():
        yield finding("local-ranges-not-read", f"a provider of local ranges cannot be read: {what}", "ranges.providers")


def cluster_ranges(facts: Facts) -> Iterable[Finding]:
    """Classes that only a CIDR can fill, without one."""
    unknown = facts.settings.unknown
    if in_use(facts) and unknown:
        what = f"policy {facts.settings.policy} has no CIDR for {', '.join(unknown)}, and none was found"
        if facts.settings.unused:
            what += f"; not used: {', '.join(facts.settings.unused)}"
        yield finding("cluster-ranges-unknown", what, f"policy {facts.settings.policy}")


def in_use(facts: Facts) -> bool:
    """Whether anybody has set netacct up here: configured it, installed its rules, or started it."""
    return facts.settings.configured or facts.rules.installed or facts.agent.pid is not None


def masquerades(facts: Facts) -> Iterable[Finding]:
    """Plugins that masquerade also what goes to other nodes' pods, if any range of these is known."""
    for file, plugin, ranges in facts.masquerades if in_use(facts) else ():
        beyond = [pods for pods in facts.settings.pods if any(_is_beyond(pods, own) for own in ranges)]
        own = ", ".join(map(str, ranges)) or "its own range"
        what = f"plugin {plugin} has ipMasq: true, and masquerades what leaves {own}"
        if beyond:
            what += f", also to the pods of other nodes in {', '.join(map(str, beyond))}"
        yield finding("masquerade-between-nodes", what, file, "warning" if beyond else "info")


def _is_beyond(pods: Network, own: Network) -> bool:
    return pods.version == own.version and pods.prefixlen < own.prefixlen and pods.overlaps(own)


CHECKS = (faults, no_local_range, ranges_not_read, cluster_ranges, masquerades)
