"""What matters of the nftables ruleset, in which the rules of iptables-nft are too, by raw netlink dumps.

Numbers: linux/netfilter/nfnetlink.h, nf_tables.h, nf_tables_compat.h. All are in network byte order.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Iterable

from netacct.doctor.facts import Flowtable, NftChain, NftRule
from netacct.kernel.marks_nft import OWN_TABLE
from netacct.kernel.netlink import Netlink, NetlinkError, attributes

_NFTABLES = 10 << 8  # NFNL_SUBSYS_NFTABLES
_GET_CHAIN, _GET_RULE, _GET_FLOWTABLE = _NFTABLES | 4, _NFTABLES | 7, _NFTABLES | 23
_FAMILIES = {"inet": 1, "ip": 2, "ip6": 10}  # NFPROTO_*
_CHAIN_TABLE, _CHAIN_NAME, _CHAIN_HOOK, _CHAIN_POLICY = 1, 3, 4, 5
_HOOK_NUMBER, _HOOK_PRIORITY = 1, 2
_HOOKS = ("prerouting", "input", "forward", "output", "postrouting", "ingress")
_RULE_TABLE, _RULE_CHAIN, _RULE_EXPRESSIONS = 1, 2, 4
_EXPRESSION_NAME, _EXPRESSION_DATA = 1, 2
_IMMEDIATE_DATA, _DATA_VERDICT, _VERDICT_CODE, _VERDICT_CHAIN = 2, 2, 1, 2
_FLOWTABLE_TABLE, _FLOWTABLE_NAME, _FLOWTABLE_USE = 1, 2, 4
_DROP, _QUEUE = 0, 3  # NF_DROP, NF_QUEUE; the upper half of a verdict has its parameters
_JUMPS = (-3, -4)  # NFT_JUMP, NFT_GOTO
_ENDS = ("queue", "reject")
_ENDING_TARGETS = ("DROP", "REJECT", "NFQUEUE")
_NO_NFTABLES = (errno.EINVAL, errno.EOPNOTSUPP, errno.EPROTONOSUPPORT, errno.ENOENT)


def ruleset() -> tuple[tuple[NftChain, ...], tuple[NftRule, ...], tuple[Flowtable, ...]]:
    """Chains, rules and flowtables of others in this network namespace. Errors: DatapathError."""
    chains: list[NftChain] = []
    rules: list[NftRule] = []
    flowtables: list[Flowtable] = []
    with Netlink() as link:
        for name, number in _FAMILIES.items():
            chains += [parse_chain(name, message) for message in _dump(link, _GET_CHAIN, number)]
            rules += parse_rules(name, _dump(link, _GET_RULE, number))
            flowtables += [parse_flowtable(name, message) for message in _dump(link, _GET_FLOWTABLE, number)]
    return (
        tuple(chain for chain in chains if chain.table != OWN_TABLE),
        tuple(rule for rule in rules if rule.table != OWN_TABLE),
        tuple(flowtables),
    )


def _dump(link: Netlink, kind: int, family: int) -> list[memoryview]:
    try:
        return link.dump(kind, family, b"")
    except NetlinkError as error:
        if error.code in _NO_NFTABLES:
            return []
        raise


def parse_chain(family: str, message: memoryview) -> NftChain:
    """One chain, from the attributes of NFT_MSG_NEWCHAIN."""
    parts = dict(attributes(message))
    table, name = _text(parts[_CHAIN_TABLE]), _text(parts[_CHAIN_NAME])
    if _CHAIN_HOOK not in parts:
        return NftChain(family, table, name)
    hook = dict(attributes(parts[_CHAIN_HOOK]))
    priority = int.from_bytes(hook[_HOOK_PRIORITY], "big", signed=True)
    drops = _CHAIN_POLICY in parts and _number(parts[_CHAIN_POLICY]) == _DROP
    return NftChain(family, table, name, _HOOKS[_number(hook[_HOOK_NUMBER])], priority, drops)


def parse_rules(family: str, messages: Iterable[memoryview]) -> list[NftRule]:
    """Rules, from the attributes of NFT_MSG_NEWRULE, numbered within their chains."""
    numbers: Counter[tuple[str, str]] = Counter()
    found = []
    for message in messages:
        parts = dict(attributes(message))
        table, chain = _text(parts[_RULE_TABLE]), _text(parts[_RULE_CHAIN])
        numbers[table, chain] += 1
        drops, jumps, names = _judge(parts.get(_RULE_EXPRESSIONS, memoryview(b"")))
        found.append(NftRule(family, table, chain, numbers[table, chain], drops, jumps, names))
    return found


def parse_flowtable(family: str, message: memoryview) -> Flowtable:
    """One flowtable, from the attributes of NFT_MSG_NEWFLOWTABLE."""
    parts = dict(attributes(message))
    users = _number(parts[_FLOWTABLE_USE]) if _FLOWTABLE_USE in parts else 0
    return Flowtable(family, _text(parts[_FLOWTABLE_TABLE]), _text(parts[_FLOWTABLE_NAME]), users)


def _judge(expressions: memoryview) -> tuple[bool, tuple[str, ...], frozenset[str]]:
    """Whether a rule can end a packet, where it leads, and which expressions and xt targets it has."""
    drops, jumps, names = False, [], set()
    for _, value in attributes(expressions):
        parts = dict(attributes(value))
        name = _text(parts[_EXPRESSION_NAME])
        data = dict(attributes(parts[_EXPRESSION_DATA])) if _EXPRESSION_DATA in parts else {}
        if name == "target":
            name = _text(data[1])
        code, chain = _immediate(data) if name == "immediate" else (None, "")
        if code in _JUMPS:
            jumps.append(chain)
        elif code is not None and code & 0xFFFF in (_DROP, _QUEUE):
            drops = True
        drops |= name in _ENDS or name in _ENDING_TARGETS
        names.add(name)
    return drops, tuple(jumps), frozenset(names)


def _immediate(data: dict[int, memoryview]) -> tuple[int | None, str]:
    """The verdict that an `immediate` expression gives; None where it loads a value."""
    value = dict(attributes(data.get(_IMMEDIATE_DATA, memoryview(b""))))
    if _DATA_VERDICT not in value:
        return None, ""
    verdict = dict(attributes(value[_DATA_VERDICT]))
    code = int.from_bytes(verdict[_VERDICT_CODE], "big", signed=True)
    return code, _text(verdict[_VERDICT_CHAIN]) if _VERDICT_CHAIN in verdict else ""


def _number(value: memoryview) -> int:
    return int.from_bytes(value, "big")


def _text(value: memoryview) -> str:
    return bytes(value).rstrip(b"\0").decode("utf-8", "replace")
