"""The rules of a layout built in memory, through python-iptables, as libiptc takes them and as they compare.

What python-iptables does behind one's back, and how it is kept from it: it creates every legacy table when it looks up
a jump target (`_OwnChains`); it redirects the process' stdout while it checks or decodes parameters (we never let it);
matches of one kind share state (parameters are set right after a match is created).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from netacct.errors import MissingFeatureError
from netacct.kernel.layout import CHAIN_PREFIX, AddToSet, Jump, Layout, Return, Rule, SetMark, SetMatch, Target
from netacct.kernel.xtables import Entry, decode
from netacct.model import Family

HOOKS = ("PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING")
"""The built-in chains of the mangle table."""

_NOT_IN, _NOT_OUT = 0x01, 0x02  # IPT_INV_VIA_IN, IPT_INV_VIA_OUT; ip6_tables.h has the same


class BuiltRule(NamedTuple):
    """A rule in both forms.

    buffer: the entry as libiptc takes it; None where a set that the rule refers to does not exist.
    entry:  the same to compare with; without a buffer it equals no rule of the kernel.
    """

    buffer: Any
    entry: Entry


class BuiltLayout(NamedTuple):
    """The rules of our chains, and ours of every hook (none where the layout does not name it)."""

    chains: dict[str, list[BuiltRule]]
    hooks: dict[str, list[BuiltRule]]


class _OwnChains:
    """Stands for "all tables" when python-iptables asks whether a target is a chain, so that it opens none of them."""

    @staticmethod
    def is_chain(name: str) -> bool:
        """Whether it is one of ours."""
        return name.startswith(CHAIN_PREFIX)


class RuleBuilder:
    """Builds the rules of one family.

    Args:
        iptc: the python-iptables module (only `iptables.py` imports it).
        family: iptables or ip6tables.
        names: the kernel names of the sets that exist, by `SetSpec.name`.
    """

    def __init__(self, iptc: Any, family: Family, names: Mapping[str, str]) -> None:
        self._iptc, self._family, self._names = iptc, family, names
        rule = iptc.Rule if family == 4 else iptc.Rule6
        self._rule_type = type("OwnRule", (rule,), {"tables": property(lambda _: [_OwnChains])})

    def build(self, layout: Layout) -> BuiltLayout:
        """All rules of a layout. Errors: MissingFeatureError where a match or target is not there."""
        hooks: dict[str, list[BuiltRule]] = {name: [] for name in HOOKS}
        hooks.update((hook.name, self._rules(hook.rules)) for hook in layout.hooks)
        return BuiltLayout({chain.name: self._rules(chain.rules) for chain in layout.chains}, hooks)

    def _rules(self, rules: Iterable[Rule]) -> list[BuiltRule]:
        return [self._build(rule) if _set_names(rule) <= self._names.keys() else _unbuilt(rule) for rule in rules]

    def _build(self, rule: Rule) -> BuiltRule:
        made = self._rule_type()
        if rule.source is not None:
            made.src = str(rule.source)
        if rule.destination is not None:
            made.dst = str(rule.destination)
        _set_interfaces(made.get_ip(), rule)
        if rule.udp_ports or rule.protocol is not None:
            made.protocol = str(17 if rule.udp_ports else rule.protocol)
        try:
            self._add_matches(made, rule)
            self._add_target(made, rule.target)
        except self._iptc.XTablesError as error:
            raise MissingFeatureError(f"iptables: {error} (kernel module or iptables extension missing?)") from error
        buffer = made.rule
        standard = not isinstance(rule.target, SetMark | AddToSet)
        return BuiltRule(buffer, decode(self._family, bytes(buffer), _verdict(rule.target), standard=standard))

    def _add_matches(self, made: Any, rule: Rule) -> None:
        if rule.udp_ports:
            made.create_match("multiport").set_parameter("dports", ",".join(map(str, rule.udp_ports)))
        if rule.unmarked is not None:
            made.create_match("mark").set_parameter("mark", f"0x0/{rule.unmarked:#x}")
        for match in rule.sets:
            made_match = made.create_match("set")
            made_match.set_parameter("match-set", _set_parameter(match, self._names))
            if not match.update_counters:
                made_match.set_parameter("update-counters", "!")

    def _add_target(self, made: Any, target: Target) -> None:
        made_target = made.create_target(_verdict(target), goto=isinstance(target, Jump) and target.goto)
        if isinstance(target, SetMark):
            made_target.set_parameter("set-xmark", f"{target.value:#x}/{target.mask:#x}")
        elif isinstance(target, AddToSet):
            made_target.set_parameter("add-set", [self._names[target.name], target.side])


def _verdict(target: Target) -> str:
    match target:
        case Jump():
            return target.chain
        case Return():
            return "RETURN"
        case SetMark():
            return "MARK"
        case AddToSet():
            return "SET"
        case None:
            return ""


def _set_names(rule: Rule) -> set[str]:
    names = {match.name for match in rule.sets}
    return names | {rule.target.name} if isinstance(rule.target, AddToSet) else names


def _set_parameter(match: SetMatch, names: Mapping[str, str]) -> list[str]:
    return [*(["!"] if match.negate else []), names[match.name], match.side]


def _set_interfaces(ip: Any, rule: Rule) -> None:
    """Set `! -i` and `! -o` in struct ipt_ip or ip6t_ip6.

    Not through python-iptables: for IPv6 it makes masks of 0x01 bytes, so that `lo` would also be `xyz`, or any name
    whose letters have the same lowest bits.
    """
    if rule.not_in:
        ip.iniface, ip.iniface_mask = _interface(rule.not_in)
        ip.invflags |= _NOT_IN
    if rule.not_out:
        ip.outiface, ip.outiface_mask = _interface(rule.not_out)
        ip.invflags |= _NOT_OUT


def _interface(name: str) -> tuple[bytes, bytes]:
    """Name and mask; the mask takes in the NUL at the end, so that longer names do not match."""
    return name.encode(), b"\xff" * (len(name) + 1)


def _unbuilt(rule: Rule) -> BuiltRule:
    goto = isinstance(rule.target, Jump) and rule.target.goto
    return BuiltRule(None, Entry(_verdict(rule.target), goto=goto, ip=b"", matches=(), target=None))
