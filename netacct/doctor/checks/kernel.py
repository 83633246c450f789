"""What the kernel has, and what this process may do in it."""

from __future__ import annotations

import time
from collections.abc import Iterable

from netacct.doctor.facts import Facts
from netacct.doctor.finding import Finding, finding
from netacct.kernel.detect import DATAPATHS
from netacct.kernel.modules import HOST_PODS, HOST_PODS_OPTION, NEEDED

YEAR_2025 = 1735689600.0
_DEFAULT_INTERFACES = frozenset(("lo", "eth0", "tunl0", "sit0", "gre0", "gretap0", "erspan0", "ip6tnl0", "ip6gre0"))
"""What a pod's namespace has: its own interface, and those that modules put into every new namespace."""


def features(facts: Facts) -> Iterable[Finding]:
    """Modules of the chosen datapath that are neither there nor can be loaded; of both, where none can be had."""
    wanted = [facts.datapath.name] if facts.datapath.name else DATAPATHS
    missing = [module for name in wanted for module in NEEDED[name] if facts.modules.lacks(module)]
    if missing:
        yield finding("kernel-feature-missing", f"this kernel has no {', '.join(missing)}", "kernel")


def host_pods(facts: Facts) -> Iterable[Finding]:
    """What telling hostNetwork pods apart needs of the kernel, and of whoever mounts file systems."""
    if not facts.settings.host_pods:
        return
    missing = [module for module in HOST_PODS if facts.modules.lacks(module)]
    missing += [HOST_PODS_OPTION] if facts.modules.unset(HOST_PODS_OPTION) else []
    if missing:
        what = f"this kernel has no {', '.join(missing)}"
        yield finding("host-pods-not-told-apart", what, "kernel", "error")
    if not facts.cgroups:
        yield finding("host-pods-not-told-apart", "the whole cgroup v2 tree is mounted nowhere", "mounts")


def datapath(facts: Facts) -> Iterable[Finding]:
    """Whether the datapath can be opened: its libraries, and what the kernel answers."""
    if facts.rules.unavailable:
        yield finding("datapath-unavailable", facts.rules.unavailable, facts.datapath.name or "auto")


def sight(facts: Facts) -> Iterable[Finding]:
    """Platforms that take packets past netfilter, or forbid rules; known to who names a datapath nevertheless."""
    for what in facts.datapath.obstacles:
        yield finding("host-netfilter-blind", what, "node", "warning" if facts.datapath.named else "error")


def choice(facts: Facts) -> Iterable[Finding]:
    """Which datapath counts, and why, wherever one does; and whether another would be chosen now."""
    chosen, installed = facts.datapath, facts.datapath.installed
    if len(installed) > 1:
        what = f"both {' and '.join(installed)} have rules or counters of netacct; {chosen.name} is chosen"
        yield finding("datapath-left-over", what, "rules")
    elif installed and installed[0] != chosen.name:
        would = f"{chosen.name} would be chosen now: {chosen.reason}" if chosen.name else "none can be had"
        yield finding("datapath-outdated", f"{installed[0]} counts, and {would}", "rules")
    elif installed:
        yield finding("datapath-chosen", f"{chosen.name} counts: {chosen.reason}", "rules")


def capabilities(facts: Facts) -> Iterable[Finding]:
    """Capabilities that this process, and so a netacct started like it, does not have."""
    if facts.process.missing:
        yield finding("capability-missing", f"missing: {', '.join(facts.process.missing)}", "this process")


def pod_namespace(facts: Facts) -> Iterable[Finding]:
    """A pod without hostNetwork: told by the kubelet's environment, a namespace of its own, and one interface in it."""
    names = {link.name for link in facts.links}
    process = facts.process
    if process.kubernetes and not process.initial_namespace and names <= _DEFAULT_INTERFACES:
        what = "this is the network namespace of a pod, not of the node"
        yield finding("pod-namespace", what, "network namespace")


def clock(facts: Facts) -> Iterable[Finding]:
    """A wall clock from before this program was written."""
    if facts.wall_clock is not None and facts.wall_clock < YEAR_2025:
        shown = time.strftime("%Y-%m-%d", time.gmtime(facts.wall_clock))
        yield finding("clock-not-set", f"the wall clock says {shown}", "clock")


CHECKS = (features, host_pods, datapath, sight, choice, capabilities, pod_namespace, clock)
