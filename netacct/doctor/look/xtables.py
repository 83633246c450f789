"""Legacy tables as they are: a raw read of those that exist, which makes none and takes no lock.

Layout: struct ipt_entry with its matches and target, xt_standard_target, xt_error_target (linux/netfilter/x_tables.h).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping

from netacct.doctor.facts import XtTable
from netacct.kernel import marks_xtables
from netacct.kernel.xtables import Entry, decode, has_standard_target
from netacct.model import Family

_VERDICT = struct.Struct("=i")
_TARGET_HEADER = 32  # struct xt_entry_target; a verdict, or a chain's name, follows
_STANDARD = {-1: "DROP", -2: "ACCEPT", -4: "QUEUE", -5: "RETURN"}  # -NF_DROP - 1 and so on; XT_RETURN
_HEAD = "ERROR"


def tables() -> tuple[XtTable, ...]:
    """Every legacy table of this network namespace. Errors: OSError, DatapathError."""
    found = []
    for kind in marks_xtables.KINDS:
        for name in marks_xtables.tables(kind):
            hooks, blob = marks_xtables.entries(kind, name)
            found.append(XtTable(kind.version, name, chains(kind.version, kind.offsets, hooks, blob)))
    return tuple(found)


def chains(family: Family, offsets: int, hooks: Mapping[int, str], blob: bytes) -> dict[str, tuple[Entry, ...]]:
    """The chains of a table, without the policy, or the return, that ends each.

    Args:
        family: which of the two structures it is.
        offsets: where target_offset and next_offset are in an entry.
        hooks: the names of built-in chains, by the offset of their first entry.
        blob: the entries.
    """
    names, where = dict(hooks), ""
    for at, length, target in _entries(offsets, blob):
        if target_name(blob, target) == _HEAD:
            # a head is an entry of its own: jumps go to the entry after it; the last one ends the table
            names[at + length] = _text(blob[target + _TARGET_HEADER : at + length])
    found: dict[str, list[Entry]] = {}
    for at, length, target in _entries(offsets, blob):
        where = names.get(at, where)
        if target_name(blob, target) == _HEAD:
            continue
        entry = blob[at : at + length]
        standard = has_standard_target(family, entry)
        verdict = _verdict(blob, target, at + length, names) if standard else target_name(blob, target)
        found.setdefault(where, []).append(decode(family, entry, verdict, standard=standard))
    return {name: tuple(entries[:-1]) for name, entries in found.items()}


def _entries(offsets: int, blob: bytes) -> Iterator[tuple[int, int, int]]:
    """Where each entry begins, its length, and where its target begins."""
    at = 0
    while at < len(blob):
        target, length = struct.unpack_from("=HH", blob, at + offsets)
        yield at, length, at + target
        at += length


def target_name(blob: bytes, target: int) -> str:
    """The name of the target at an offset; "" for a verdict or a chain."""
    return _text(blob[target + 2 : target + 31])


def _verdict(blob: bytes, target: int, following: int, names: Mapping[int, str]) -> str:
    """What a standard target says: a verdict, a chain, or "" for a jump to the next entry (no target)."""
    (code,) = _VERDICT.unpack_from(blob, target + _TARGET_HEADER)
    if code < 0:
        return _STANDARD.get(code, str(code))
    return "" if code == following else names.get(code, "?")


def _text(raw: bytes) -> str:
    return raw.split(b"\0", 1)[0].decode("ascii", "replace")
