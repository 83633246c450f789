"""A layout as text: input for `ipset restore` and `iptables-restore --noflush`, and lines for people. Pure.

Formats: ipset(8), iptables-restore(8), iptables-extensions(8). Lines that begin with # are comments to all three tools.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from netacct.kernel.layout import (
    HALVES,
    AddToSet,
    Chain,
    Jump,
    Layout,
    Return,
    Rule,
    SetMark,
    SetMatch,
    SetSpec,
    Target,
    hash_size,
)
from netacct.model import Address, Scope, unpack

_NOTHING: Mapping[str, str] = MappingProxyType({})
_NO_EPOCHS: Mapping[str, int] = MappingProxyType({})

_ABOUT_HOOK = {
    "INPUT": "to the node: pods that talk to it transmit, and the host receives",
    "OUTPUT": "from the node: the host transmits",
    "FORWARD": "through the node: pods transmit, to each other too",
    "POSTROUTING": "out of the node, after all NAT but SNAT: pods receive",
}


def ipset_text(
    layout: Layout,
    prefilled: Iterable[Address],
    epochs: Mapping[str, int] = _NO_EPOCHS,
    names: Mapping[str, str] = _NOTHING,
) -> str:
    """Input for `ipset restore` that makes the layout's sets and fills them.

    Args:
        layout: one family.
        prefilled: the addresses that have counters from the start (`FamilyPlan.prefilled`).
        epochs: the number for the sentinel of each pod counter set, by `SetSpec.name`; one without gets no sentinel.
        names: kernel names of sets, by `SetSpec.name`, where they differ (catch-all sets have their epoch in it).
    """
    addresses = [unpack(ip) for ip in prefilled]
    lines: list[str] = [f"# netacct: the sets of IPv{layout.family}"]
    for spec in layout.sets:
        name = names.get(spec.name, spec.name)
        lines += ["", f"# {_about(spec)}", create_line(spec, name)]
        lines += [f"add {name} {element}" for element in _elements(spec, addresses)]
        if spec.name in epochs and _is_pod_set(spec):
            lines.append(f"add {name} {unpack(spec.sentinel)} packets 1 bytes {epochs[spec.name]}")
    return "\n".join(lines) + "\n"


def create_line(spec: SetSpec, name: str) -> str:
    """The `create` command of one set, under the given kernel name."""
    counters = " counters" if spec.key is not None else ""
    if spec.range is not None:
        netmask = f" netmask {spec.netmask}" if spec.netmask else ""
        return f"create {name} {spec.type} range {'-'.join(map(unpack, spec.range))}{netmask}{counters}"
    family = "inet" if spec.family == 4 else "inet6"
    return f"create {name} {spec.type} family {family} hashsize {hash_size(spec)} maxelem {max(spec.size, 1)}{counters}"


def iptables_text(layout: Layout, names: Mapping[str, str] = _NOTHING) -> str:
    """Input for `iptables-restore --noflush` (or ip6tables-restore) that makes the chains and hooks them in.

    The sets must be there. Chains of ours that exist are emptied first, hooks that exist would be doubled: the text is
    for a node on which netacct is not installed.
    """
    lines = [f"# netacct: the chains of IPv{layout.family}, for the mangle table", "*mangle"]
    lines += [f":{chain.name} - [0:0]" for chain in layout.chains]
    for chain in layout.chains:
        lines += ["", *(f"-A {chain.name}{rule_text(rule, names)}" for rule in chain.rules)]
    for hook in layout.hooks:
        lines += ["", f"# {_ABOUT_HOOK[hook.name]}", *_hook_lines(hook, names)]
    return "\n".join([*lines, "COMMIT"]) + "\n"


def removal_text(layout: Layout, names: Mapping[str, str] = _NOTHING) -> str:
    """Input for `iptables-restore --noflush` (or ip6tables-restore) that takes the layout's hooks and chains away.

    It asks for each of them to be there once, as `iptables_text` makes them, and fails as a whole otherwise.
    """
    lines = [f"# netacct: take the chains of IPv{layout.family} out of the mangle table", "*mangle"]
    lines += [f"-D {hook.name}{rule_text(rule, names)}" for hook in layout.hooks for rule in hook.rules]
    lines += [f"-{option} {chain.name}" for option in "FX" for chain in layout.chains]
    return "\n".join([*lines, "COMMIT"]) + "\n"


def rules(layout: Layout, names: Mapping[str, str] = _NOTHING) -> list[str]:
    """The rules, one a line, hooks first: `-I HOOK N …`, then `-A CHAIN …`."""
    hooks = [line for hook in layout.hooks for line in _hook_lines(hook, names)]
    return hooks + [f"-A {chain.name}{rule_text(rule, names)}" for chain in layout.chains for rule in chain.rules]


def rule_text(rule: Rule, names: Mapping[str, str] = _NOTHING) -> str:
    """Matches and target of one rule as options of iptables, in the order in which iptables-save writes them.

    Empty, or a space and what follows it.
    """
    return "".join(f" {part}" for part in (*_matches(rule, names), *_target(rule.target, names)))


def _hook_lines(hook: Chain, names: Mapping[str, str]) -> Iterator[str]:
    return (f"-I {hook.name} {at}{rule_text(rule, names)}" for at, rule in enumerate(hook.rules, start=1))


def _matches(rule: Rule, names: Mapping[str, str]) -> Iterator[str]:
    if rule.source is not None:
        yield f"-s {rule.source}"
    if rule.destination is not None:
        yield f"-d {rule.destination}"
    if rule.not_in:
        yield f"! -i {rule.not_in}"
    if rule.not_out:
        yield f"! -o {rule.not_out}"
    if rule.protocol is not None:
        yield f"-p {rule.protocol}"
    if rule.udp_ports:
        yield f"-p udp -m multiport --dports {','.join(map(str, rule.udp_ports))}"
    if rule.unmarked is not None:
        yield f"-m mark --mark 0x0/{rule.unmarked:#x}"
    yield from (_set_match(match, names) for match in rule.sets)


def _set_match(match: SetMatch, names: Mapping[str, str]) -> str:
    negate = "! " if match.negate else ""
    counting = "" if match.update_counters else " ! --update-counters"
    return f"-m set {negate}--match-set {names.get(match.name, match.name)} {match.side}{counting}"


def _target(target: Target, names: Mapping[str, str]) -> Iterator[str]:
    match target:
        case Jump(chain, goto):
            yield f"{'-g' if goto else '-j'} {chain}"
        case Return():
            yield "-j RETURN"
        case SetMark(value, mask):
            yield f"-j MARK --set-xmark {value:#x}/{mask:#x}"
        case AddToSet(name, side):
            yield f"-j SET --add-set {names.get(name, name)} {side}"
        case None:
            return


def _is_pod_set(spec: SetSpec) -> bool:
    return spec.key is not None and spec.key.scope is Scope.POD


def _elements(spec: SetSpec, addresses: Iterable[str]) -> Iterable[str]:
    if spec.catch_all:
        return HALVES[spec.family]
    if _is_pod_set(spec):
        return addresses
    return (str(network.network_address) if spec.netmask else str(network) for network in spec.networks)


def _about(spec: SetSpec) -> str:
    if spec.key is None:
        return f"which {'blocks' if spec.netmask else 'addresses'} are {spec.name.split('-', 2)[-1]}"
    return f"{spec.key.scope} {spec.key.direction}, {spec.key.traffic}"
