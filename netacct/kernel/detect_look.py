"""Gathers the facts for the choice of a datapath. Writes nothing, makes no table, and wakes no module that sleeps.

Legacy tables are read raw and only where /proc says that they exist, because the kernel makes the table that anybody
asks for (marks_xtables.py); nf_tables and ipset are not asked where their module is certainly not loaded.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from netacct.errors import DatapathError, MissingFeatureError, PermissionRefusedError
from netacct.kernel import detect_signs, families, ipset, marks_xtables, modules, setmaker
from netacct.kernel import nft_messages as nft
from netacct.kernel.detect import (
    DATAPATHS,
    IPTABLES,
    KUBELET_HINTS,
    NFTABLES,
    PROXY_HINTS,
    PROXY_TABLE,
    Backend,
    Facts,
)
from netacct.kernel.layout import CHAIN_PREFIX, SET_PREFIX
from netacct.kernel.marks_xtables import KINDS, Kind
from netacct.kernel.modules import NEEDED, Modules
from netacct.kernel.netlink import Netlink, NetlinkError, attribute, attributes
from netacct.model import Family

_MANGLE = "mangle"
_IPTABLES_TABLES = ("filter", "nat", "mangle", "raw", "security")
_NFPROTO: Mapping[str, int] = {"ip": 2, "ip6": 10}  # linux/netfilter.h
_NO_NFTABLES = (errno.EINVAL, errno.EOPNOTSUPP, errno.EPROTONOSUPPORT, errno.ENOENT)
_TARGET = struct.Struct("=H29sB")  # xt_entry_target: size, name, revision
_VERDICT = struct.Struct("=i")  # of xt_standard_target: an offset, where it is not negative
_HEAD = b"ERROR"
"""The target that begins a chain of the user's, and ends a table (linux/netfilter/x_tables.h)."""


def look() -> Facts:
    """The facts of this thread's network namespace. Errors: DatapathError, PermissionRefusedError."""
    known = modules.look()
    facts = Facts(
        iptables=Backend(*_legacy_hints(), ours=ours(IPTABLES, known)),
        nftables=_nftables(known),
        mangle=any(_MANGLE in marks_xtables.tables(kind) for kind in KINDS),
        unusable=_unusable(known),
        obstacles=detect_signs.obstacles(),
    )
    if facts.hinted():
        return facts
    counted = replace(facts.iptables, rules=sum(table.rules for table in _legacy_tables()))
    return replace(facts, iptables=counted, nftables=replace(facts.nftables, rules=_nft_rules(known)))


def ours(name: str, known: Modules | None = None) -> bool:
    """Whether a datapath left anything in this thread's network namespace: chains and sets, or tables."""
    known = known or modules.look()
    if name == NFTABLES:
        return any(table == nft.TABLE for _, table in _nft_tables(known))
    if any(name.startswith(CHAIN_PREFIX) for table in _legacy_tables(_MANGLE) for name in table.chains):
        return True
    return any(setmaker.is_ours(name) for name in _sets(known) or ())


def _sets(known: Modules) -> list[str] | None:
    """The names of sets that begin like ours; None where this kernel has no ipset, which only asking may tell."""
    if known.sleeps("ip_set"):
        return []
    with Netlink() as link:
        try:
            return ipset.set_names(link, SET_PREFIX)
        except MissingFeatureError:
            return None


def legacy_chains() -> dict[Family, frozenset[str]]:
    """The chains of ours in table mangle of this thread's network namespace, by family. Errors: as for `look`."""
    found: dict[Family, frozenset[str]] = {4: frozenset(), 6: frozenset()}
    for kind in KINDS:
        if _MANGLE in marks_xtables.tables(kind):
            chains = _read(kind, _MANGLE).chains
            found[kind.version] = frozenset(name for name in chains if name.startswith(CHAIN_PREFIX))
    return found


def nft_families() -> list[Family]:
    """The families for which nf_tables has a table of ours. Errors: as for `look`."""
    present = {family for family, table in _nft_tables(modules.look()) if table == nft.TABLE}
    families: tuple[tuple[Family, str], ...] = ((4, "ip"), (6, "ip6"))
    return [family for family, name in families if name in present]


def _unusable(known: Modules) -> dict[str, str]:
    """Why a datapath cannot be had, as far as looking tells."""
    needless = () if 6 in families.present() else ("ip6_tables", "ip6table_mangle")
    missing = {name: [it for it in NEEDED[name] if known.lacks(it) and it not in needless] for name in DATAPATHS}
    if "ip_set" not in missing[IPTABLES] and _sets(known) is None:
        missing[IPTABLES].append("ip_set")
    return {name: f"this kernel has no {', '.join(lacking)}" for name, lacking in missing.items() if lacking}


def _nftables(known: Modules) -> Backend:
    chains = [name for family in _NFPROTO for name in _nft_chains(known, family, _MANGLE)]
    proxy = [f"table {family} {table}" for family, table in _nft_tables(known) if table == PROXY_TABLE]
    return Backend(
        kubelet=_named(chains, KUBELET_HINTS, "iptables-nft"),
        proxy=(*_named(chains, PROXY_HINTS, "iptables-nft"), *dict.fromkeys(proxy)),
        ours=ours(NFTABLES, known),
    )


def _legacy_hints() -> tuple[tuple[str, ...], tuple[str, ...]]:
    chains = [name for table in _legacy_tables(_MANGLE) for name in table.chains]
    return _named(chains, KUBELET_HINTS, "legacy tables"), _named(chains, PROXY_HINTS, "legacy tables")


def _named(chains: list[str], hints: frozenset[str], where: str) -> tuple[str, ...]:
    return tuple(f"{name} in {where}" for name in sorted(hints.intersection(chains)))


# --- legacy tables -----------------------------------------------------------------------------------------------


class LegacyTable(NamedTuple):
    """The chains of the user's in one table, and the number of rules in it that are not ours."""

    chains: frozenset[str]
    rules: int


def _legacy_tables(only: str = "") -> Iterator[LegacyTable]:
    for kind in KINDS:
        for name in marks_xtables.tables(kind):
            if only in ("", name):
                yield _read(kind, name)


def _read(kind: Kind, table: str) -> LegacyTable:
    try:
        hooks, blob = marks_xtables.entries(kind, table)
    except PermissionError as error:
        raise PermissionRefusedError(
            f"reading the {kind.tool} table {table} needs CAP_NET_ADMIN, CAP_NET_RAW"
        ) from error
    except OSError as error:
        raise DatapathError(f"reading the {kind.tool} table {table}: {error.strerror}") from error
    return parse(kind.offsets, frozenset(hooks), blob)


def parse(offsets: int, hooks: frozenset[int], blob: bytes) -> LegacyTable:
    """What one table holds.

    Args:
        offsets: where target_offset and next_offset are in an entry.
        hooks: the offsets of the built-in chains' first entries.
        blob: the entries (struct ipt_entry or ip6t_entry).
    """
    names: dict[int, str] = {}  # chains of the user's, by the offset of their first rule
    entries: list[tuple[int, int]] = []  # offset, and what a standard target says
    at = 0
    while at < len(blob):
        target, length = struct.unpack_from("=HH", blob, at + offsets)
        _, raw, _ = _TARGET.unpack_from(blob, at + target)
        kind, info = raw.rstrip(b"\0"), blob[at + target + _TARGET.size : at + length]
        if kind == _HEAD:
            names[at + length] = info.split(b"\0", 1)[0].decode("ascii", "replace")
        else:
            entries.append((at, -1 if kind else _VERDICT.unpack_from(info)[0]))
        at += length
    names.pop(len(blob), None)  # the entry that ends the table
    mine = {begin for begin, name in names.items() if name.startswith(CHAIN_PREFIX)}
    rules = ends = 0
    skipping = False
    for begin, verdict in entries:
        if begin in hooks or begin in names:
            skipping = begin in mine
            ends += not skipping  # a policy, or the RETURN that ends a chain
        rules += not skipping and verdict not in mine
    return LegacyTable(frozenset(names.values()), rules - ends)


# --- nf_tables ---------------------------------------------------------------------------------------------------


def _nft_tables(known: Modules) -> list[tuple[str, str]]:
    """(family, name) of every table."""
    return [
        (family, _text(dict(attributes(message))[nft.TABLE_NAME]))
        for family in _NFPROTO
        for message in _dump(known, nft.GET_TABLE, family)
    ]


def _nft_chains(known: Modules, family: str, table: str) -> list[str]:
    """The chains of one table."""
    wanted = attribute(nft.CHAIN_TABLE, nft.text(table))
    found = [dict(attributes(message)) for message in _dump(known, nft.GET_CHAIN, family, wanted)]
    # the kernel gives the chains of all tables
    return [_text(parts[nft.CHAIN_NAME]) for parts in found if _text(parts[nft.CHAIN_TABLE]) == table]


def _nft_rules(known: Modules) -> int:
    """How many rules are in tables of the names that iptables-nft uses."""
    return sum(
        len(_dump(known, nft.GET_RULE, family, attribute(nft.RULE_TABLE, nft.text(table))))
        for family, table in _nft_tables(known)
        if table in _IPTABLES_TABLES
    )


def _dump(known: Modules, kind: int, family: str, body: bytes = b"") -> list[memoryview]:
    if known.sleeps("nf_tables"):
        return []
    with Netlink() as link:
        try:
            return link.dump(nft.SUBSYSTEM << 8 | kind, _NFPROTO[family], body)
        except NetlinkError as error:
            if error.code in _NO_NFTABLES:
                return []
            if error.code == errno.EPERM:
                raise PermissionRefusedError("reading nftables needs CAP_NET_ADMIN") from error
            raise


def _text(value: memoryview) -> str:
    return bytes(value).rstrip(b"\0").decode("utf-8", "replace")
