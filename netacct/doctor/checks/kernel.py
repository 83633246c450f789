"""What the kernel has, and what this process may do in it."""

from __future__ import annotations

import time
from collections.abc import Iterable

from netacct.doctor.facts import Facts, Modules
from netacct.doctor.finding import Finding, finding

NEEDED: dict[str, tuple[str, ...]] = {
    "ip_tables": ("IP_NF_IPTABLES_LEGACY", "IP_NF_IPTABLES"),
    "ip6_tables": ("IP6_NF_IPTABLES_LEGACY", "IP6_NF_IPTABLES"),
    "iptable_mangle": ("IP_NF_MANGLE",),
    "ip6table_mangle": ("IP6_NF_MANGLE",),
    "ip_set": ("IP_SET",),
    "ip_set_hash_ip": ("IP_SET_HASH_IP",),
    "ip_set_hash_net": ("IP_SET_HASH_NET",),
    "ip_set_bitmap_ip": ("IP_SET_BITMAP_IP",),
    "xt_set": ("NETFILTER_XT_SET",),
    "xt_mark": ("NETFILTER_XT_MARK",),
    "xt_multiport": ("NETFILTER_XT_MATCH_MULTIPORT",),
}
"""The modules that the rules need, and the options that build them in: the first that this kernel knows decides."""

YEAR_2025 = 1735689600.0
_DEFAULT_INTERFACES = frozenset(("lo", "eth0", "tunl0", "sit0", "gre0", "gretap0", "erspan0", "ip6tnl0", "ip6gre0"))
"""What a pod's namespace has: its own interface, and those that modules put into every new namespace."""


def features(facts: Facts) -> Iterable[Finding]:
    """Modules that are neither there nor can be loaded; the target SET comes with xt_set, MARK with xt_mark."""
    missing = [name for name in NEEDED if _lacks(facts.modules, name)]
    if missing:
        yield finding("kernel-feature-missing", f"this kernel has no {', '.join(missing)}", "kernel")


def _lacks(modules: Modules, name: str) -> bool:
    """Whether it is certain that a module cannot be had; no source, no certainty."""
    files = (modules.builtin or frozenset()) | (modules.installed or frozenset())
    if name in modules.active or name in files:
        return False
    if modules.installed is not None:
        # a kernel may have things built in that its modules.builtin does not list under this name
        return _option(modules, name) != "y"
    return modules.config is not None and not _option(modules, name)


def _option(modules: Modules, name: str) -> str:
    """`y` or `m`, "" where the option is unset or the configuration is not known."""
    config = modules.config or {}
    return next((config[option] for option in NEEDED[name] if option in config), "")


def datapath(facts: Facts) -> Iterable[Finding]:
    """Whether python-iptables and its libraries load."""
    if facts.rules.unavailable:
        yield finding("datapath-unavailable", facts.rules.unavailable, "python-iptables")


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


CHECKS = (features, datapath, capabilities, pod_namespace, clock)
