"""Rules of others: before ours, in another backend, or of a kind that takes packets away from the hooks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from netacct.doctor.facts import Facts, NftChain, NftRule, XtTable
from netacct.doctor.finding import Finding, finding
from netacct.kernel.detect import IPTABLES
from netacct.kernel.layout import CHAIN_PREFIX
from netacct.kernel.xtables import rivals

MANGLE = -150
"""NF_IP_PRI_MANGLE of linux/netfilter_ipv4.h, where we count."""

HINTS = ("KUBE-IPTABLES-HINT", "KUBE-KUBELET-CANARY")
"""Chains that the kubelet keeps in table mangle of the backend that it uses."""

_HOOKS = ("INPUT", "FORWARD", "OUTPUT", "POSTROUTING")
_IPTABLES_TABLES = ("filter", "nat", "mangle", "raw", "security")


def shadowed(facts: Facts) -> Iterable[Finding]:
    """Who stands before our rules in the hooks of the mangle table and can keep packets from them."""
    for table in facts.xtables:
        if table.name != "mangle":
            continue
        for hook in _HOOKS:
            for number, entry in rivals(table.chains.get(hook, ()), table.chains.get):
                where = f"{table.tool} -t mangle, {hook} rule {number}"
                jump = f"{'-g' if entry.goto else '-j'} {entry.verdict}"
                yield finding("rules-shadowed", f"rule {number} of {hook} ({jump}) stands before ours", where)


def early_drops(facts: Facts) -> Iterable[Finding]:
    """Base chains of nftables that drop at the hooks where we count, but before we do.

    To accept there ends nothing but that chain. Verdicts in maps are not looked into.
    """
    for chain in facts.nft_chains:
        if chain.hook not in ("input", "forward", "output", "postrouting") or chain.priority >= MANGLE:
            continue
        if chain.drops or _drops(chain, facts.nft_rules):
            where = f"nft {chain.family} {chain.table} {chain.name}"
            what = f"chain {chain.name} drops packets in hook {chain.hook} at priority {chain.priority}"
            yield finding("drops-before-counting", what, where)


def _drops(base: NftChain, rules: Iterable[NftRule]) -> bool:
    """Whether a rule of the chain, or of one that it leads to, can end a packet."""
    table = [rule for rule in rules if (rule.family, rule.table) == (base.family, base.table)]
    reached: set[str] = set()
    pending = [base.name]
    while pending:
        chain = pending.pop()
        reached.add(chain)
        for rule in table:
            if rule.chain == chain:
                if rule.drops:
                    return True
                pending += [name for name in rule.jumps if name not in reached]
    return False


def backends(facts: Facts) -> Iterable[Finding]:
    """Rules of others in legacy tables and in those of iptables-nft at once; or ours alone in legacy ones."""
    legacy = Counter({f"{table.tool} {table.name}": _foreign(table) for table in facts.xtables})
    nft = Counter(
        f"{rule.family} {rule.table}"
        for rule in facts.nft_rules
        if rule.family in ("ip", "ip6") and rule.table in _IPTABLES_TABLES
    )
    hints = [f"{chain.name} in nftables" for chain in facts.nft_chains if chain.name in HINTS]
    if legacy.total() and nft.total():
        old = [f"{name} in legacy tables" for table in facts.xtables for name in table.chains if name in HINTS]
        kubelet = f"; the kubelet keeps {', '.join(sorted({*old, *hints}))}" if old or hints else ""
        what = (
            f"{legacy.total()} rules in legacy tables ({_listed(legacy)}), {nft.total()} in nftables ({_listed(nft)})"
        )
        yield finding("legacy-and-nft-mixed", what + kubelet, "iptables")
    elif hints and IPTABLES in facts.datapath.installed:
        yield finding("host-uses-nftables", f"the kubelet keeps {', '.join(sorted(set(hints)))}", "iptables")


def _foreign(table: XtTable) -> int:
    """The rules that are neither ours nor lead to ours."""
    return sum(
        not entry.ours for name, chain in table.chains.items() if not name.startswith(CHAIN_PREFIX) for entry in chain
    )


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()) if count)


def saved(facts: Facts) -> Iterable[Finding]:
    """What ran was saved as it was, with ours in it."""
    for file in facts.saved:
        yield finding("saved-with-our-rules", f"{file} has chains or tables of netacct in it", file)


def tproxy(facts: Facts) -> Iterable[Finding]:
    """Rules that hand packets for others to a process of this node."""
    for where in (*_targets(facts, "TPROXY"), *_expressions(facts, "tproxy")):
        yield finding("tproxy", f"{where} redirects packets to a proxy", where)


def flowtables(facts: Facts) -> Iterable[Finding]:
    """Flowtables that a rule puts connections into."""
    for table in facts.flowtables:
        if table.users:
            where = f"nft {table.family} {table.table} flowtable {table.name}"
            yield finding("flowtable", f"{table.users} rules use flowtable {table.name}", where)
    for where in _targets(facts, "FLOWOFFLOAD"):
        yield finding("flowtable", f"{where} offloads connections", where)


def ipvs(facts: Facts) -> Iterable[Finding]:
    """Virtual services of IPVS, or the interface that kube-proxy keeps their addresses on."""
    interface = next((link.name for link in facts.links if link.name == "kube-ipvs0"), "")
    if interface or facts.virtual_services:
        what = f"{facts.virtual_services} virtual services" + (f", interface {interface}" if interface else "")
        yield finding("ipvs", what, interface or "IPVS")


def _targets(facts: Facts, name: str) -> Iterable[str]:
    """Where legacy rules have this target, and those of iptables-nft."""
    for table in facts.xtables:
        for chain, entries in table.chains.items():
            for number, entry in enumerate(entries, 1):
                if entry.target is not None and entry.verdict == name:
                    yield f"{table.tool} -t {table.name}, {chain} rule {number}"
    yield from _expressions(facts, name)


def _expressions(facts: Facts, name: str) -> Iterable[str]:
    for rule in facts.nft_rules:
        if name in rule.expressions:
            yield f"nft {rule.family} {rule.table}, {rule.chain} rule {rule.number}"


CHECKS = (shadowed, early_drops, backends, saved, tproxy, flowtables, ipvs)
