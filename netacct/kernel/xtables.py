"""Rules of legacy xtables as bytes: what two rules have in common, and which rules can hide ours. Pure.

Rules are compared as the kernel holds them, so nothing has to be printed, parsed or marked with a comment (which would
cost every packet). Layouts: struct ipt_entry and ip6t_entry (linux/netfilter_ipv4/ip_tables.h,
linux/netfilter_ipv6/ip6_tables.h), xt_entry_match and xt_entry_target (linux/netfilter/x_tables.h).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Sequence
from itertools import zip_longest
from typing import NamedTuple

from netacct.kernel.layout import CHAIN_PREFIX
from netacct.model import Family

# fmt: off
CONTINUES = frozenset(
    (
        "AUDIT", "CHECKSUM", "CLASSIFY", "CONNMARK", "CONNSECMARK", "CT", "DSCP", "ECN",
        "HL", "HMARK", "IDLETIMER", "LED", "LOG", "MARK", "NFLOG", "RATEEST",
        "SECMARK", "SET", "TCPMSS", "TCPOPTSTRIP", "TEE", "TOS", "TRACE", "TTL",
        "ULOG",
    )
)
# fmt: on
"""Targets after which the next rule is looked at (they return XT_CONTINUE); any other one is taken to end traversal."""

_IP_SIZE: dict[Family, int] = {4: 84, 6: 136}  # struct ipt_ip, struct ip6t_ip6
_ENTRY_SIZE: dict[Family, int] = {4: 112, 6: 168}
_GOTO: dict[Family, tuple[int, int]] = {4: (82, 0x02), 6: (131, 0x04)}  # offset of `flags`, IP[6]T_F_GOTO
_OFFSETS = struct.Struct("=4xHH")  # nfcache, target_offset, next_offset
_EXTENSION = struct.Struct("=H29sB")  # size, name, revision of a match or target; its data follow


class Extension(NamedTuple):
    """A match, or a target that is an extension, with its parameters as the kernel stores them."""

    name: bytes
    revision: int
    data: bytes


class Entry(NamedTuple):
    """One rule.

    verdict:   the chain that it jumps or goes to, a standard verdict (ACCEPT, DROP, QUEUE, RETURN), the name of the
               target extension, or "" where the rule has no target.
    goto:      `-g` instead of `-j`.
    ip:        addresses, interfaces, protocol and flags.
    """

    verdict: str
    goto: bool
    ip: bytes
    matches: tuple[Extension, ...]
    target: Extension | None

    @property
    def ours(self) -> bool:
        """Whether the rule leads to a chain of ours."""
        return self.verdict.startswith(CHAIN_PREFIX)


ChainReader = Callable[[str], "Sequence[Entry] | None"]
"""The rules of a chain, None where there is no such chain."""


def decode(family: Family, blob: bytes, verdict: str, *, standard: bool) -> Entry:
    """Take one entry apart.

    Args:
        family: which of the two structures it is.
        blob: the entry with its matches and its target.
        verdict: what libiptc calls its target.
        standard: the target is a verdict or a chain, which are stored as offsets that differ from table to table.
    """
    begin, _ = _OFFSETS.unpack_from(blob, _IP_SIZE[family])
    offset, matches = _ENTRY_SIZE[family], []
    while offset < begin:
        matches.append(_extension(blob, offset))
        offset += _EXTENSION.unpack_from(blob, offset)[0]
    where, flag = _GOTO[family]
    return Entry(
        verdict=verdict,
        goto=bool(blob[where] & flag),
        ip=blob[: _IP_SIZE[family]],
        matches=tuple(matches),
        target=None if standard else _extension(blob, begin),
    )


def has_standard_target(family: Family, blob: bytes) -> bool:
    """Whether the target of an entry out of the kernel is a verdict or a chain: it then has no name of its own."""
    begin, _ = _OFFSETS.unpack_from(blob, _IP_SIZE[family])
    return not _extension(blob, begin).name


def _extension(blob: bytes, offset: int) -> Extension:
    size, name, revision = _EXTENSION.unpack_from(blob, offset)
    # the kernel keeps a pointer behind the name's end and does not clean it up
    return Extension(name.partition(b"\0")[0], revision, blob[offset + _EXTENSION.size : offset + size])


def rivals(entries: Sequence[Entry], chain: ChainReader) -> list[tuple[int, Entry]]:
    """Foreign rules of a hook, with their numbers, that stand before a rule of ours and can keep packets from it."""
    last = max((number for number, entry in enumerate(entries, 1) if entry.ours), default=0)
    known: dict[str, bool] = {}
    return [
        (number, entry)
        for number, entry in enumerate(entries[:last], 1)
        if not entry.ours and _can_end(entry, chain, known, builtin=True)
    ]


def _can_end(entry: Entry, chain: ChainReader, known: dict[str, bool], *, builtin: bool) -> bool:
    """Whether a packet that the rule takes may never come to the rules after it in the hook's chain.

    `known` has the chains that were looked into, each once: thousands of rules may lead to the same one, and those of a
    hook are looked at under the lock that everybody needs.
    """
    rules = chain(entry.verdict) if entry.target is None and entry.verdict not in known else None
    if rules is not None:
        known[entry.verdict] = False  # the kernel lets no chain lead back into itself
        known[entry.verdict] = any(_can_end(rule, chain, known, builtin=False) for rule in rules)
    if entry.target is None and entry.verdict in known:
        # what comes out of a chain that was gone to meets the policy, not the next rule
        return (entry.goto and builtin) or known[entry.verdict]
    if entry.verdict == "RETURN":
        return builtin
    return entry.verdict != "" and entry.verdict not in CONTINUES


def hook_in_sync(wanted: Sequence[Entry], entries: Sequence[Entry], chain: ChainReader, *, held: bool = False) -> bool:
    """Whether a hook needs no change: our rules are there once, in order, and nothing before them can hide them.

    With `held` they may be hidden: they keep their place.
    """
    return [entry for entry in entries if entry.ours] == list(wanted) and (held or not rivals(entries, chain))


def place(entries: Sequence[Entry], jumps: Collection[str]) -> int:
    """After how many rules of others ours are to be inserted, once those that are there are deleted.

    First of all, unless there are `jumps` of rivals (as `jump_of` writes them) to stay behind: then where ours were, or
    else right behind the first rival.
    """
    if not jumps:
        return 0
    ours = [number for number, entry in enumerate(entries) if entry.ours]
    theirs = [number for number, entry in enumerate(entries, 1) if jump_of(entry) in jumps]
    return [*ours, *theirs, 0][0]


def chain_differences(name: str, wanted: Sequence[Entry], found: Sequence[Entry] | None) -> list[str]:
    """What is wrong with a chain of ours, in words."""
    if found is None:
        return [f"chain {name} is missing"]
    differences = []
    for number, (want, have) in enumerate(zip_longest(wanted, found), 1):
        if have is None:
            differences.append(f"chain {name}: rule {number} ({jump_of(want)}) is missing")
        elif want is None:
            differences.append(f"chain {name}: rule {number} ({jump_of(have)}) should not be there")
        elif want != have:
            differences.append(f"chain {name}: rule {number} ({jump_of(have)}) is not what we installed")
    return differences


def hook_differences(
    name: str, wanted: Sequence[Entry], entries: Sequence[Entry], chain: ChainReader, *, held: bool = False
) -> list[str]:
    """What is wrong with our rules in a hook, in words; empty exactly when `hook_in_sync`."""
    ours = [entry for entry in entries if entry.ours]
    differences = []
    for want in dict.fromkeys(wanted):
        surplus = ours.count(want) - list(wanted).count(want)
        if surplus < 0:
            differences.append(f"hook {name}: our rule ({jump_of(want)}) is absent")
        elif surplus > 0:
            differences.append(f"hook {name}: our rule ({jump_of(want)}) is there {surplus + 1} times")
    differences += [
        f"hook {name}: a rule that we did not install leads to our chain ({jump_of(entry)})"
        for entry in dict.fromkeys(ours)
        if entry not in wanted
    ]
    if not differences and ours != list(wanted):
        differences.append(f"hook {name}: our rules are out of order")
    hiding = [] if held else rivals(entries, chain)
    return differences + [
        f"hook {name}: our rules are behind rule {number} ({jump_of(entry)}), which can end traversal"
        for number, entry in hiding
    ]


def jump_of(entry: Entry) -> str:
    """Where a rule leads, as iptables would write it."""
    if not entry.verdict:
        return "no target"
    # a chain's name may be in an encoding that cannot be printed
    name = entry.verdict.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return f"{'-g' if entry.goto else '-j'} {name}"
