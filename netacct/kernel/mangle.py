"""One family's legacy mangle table: our rules in it compared and edited, through python-iptables' view of libiptc.

python-iptables shares one handle per process (each object here has its own) and mis-reads rules of others (they are
only ever looked at as bytes).
"""

from __future__ import annotations

import ctypes
import errno
import itertools
from collections import Counter
from typing import Any

from netacct.errors import DatapathError, MissingFeatureError, NetacctError, PermissionRefusedError
from netacct.kernel.layout import CHAIN_PREFIX
from netacct.kernel.position import Held, Rival
from netacct.kernel.rulebuilder import HOOKS, BuiltLayout, BuiltRule
from netacct.kernel.xtables import (
    Entry,
    chain_differences,
    decode,
    has_standard_target,
    hook_differences,
    hook_in_sync,
    jump_of,
    place,
    rivals,
)
from netacct.model import Family

_TABLE = "mangle"


class MangleTable:
    """The table as it was when this was made; edits stay in here until `commit`. Creates the table where it is missing.

    Args:
        iptc: the python-iptables module (only `iptables.py` imports it).
        family: iptables or ip6tables.

    Errors of all methods: DatapathError; MissingFeatureError; PermissionRefusedError.
    """

    def __init__(self, iptc: Any, family: Family) -> None:
        self._iptc, self._family = iptc, family
        self._changed = False
        self._table: Any = object.__new__(iptc.Table if family == 4 else iptc.Table6)
        try:
            self._table._init(_TABLE, False)  # noqa: SLF001  # Table() hands out the process-wide handle
        except iptc.IPTCError as error:
            raise self._explain("load", error) from error

    def close(self) -> None:
        """Give the handle back; what was not committed is forgotten."""
        self._table.close()

    def commit(self) -> bool:
        """Make the edits real, if there are any; False where the table changed since it was loaded."""
        if not self._changed:
            return True
        self._keep_policy_counters()
        low = self._table._iptc  # noqa: SLF001  # Table.commit() hides the errno
        if low.iptc_commit(self._table._handle) == 1:  # noqa: SLF001  # as above
            return True
        if self._errno() == errno.EAGAIN:
            return False
        raise self._explain("commit", self._table.strerror())

    def _keep_policy_counters(self) -> None:
        """Write the policies' counters back, which libiptc zeroes at every commit (rule counters it keeps).

        What a policy counts in the milliseconds between loading and committing is lost; otherwise all would be.
        """
        for name in HOOKS:
            policy, counters = self._table.get_policy(name)
            self._table.set_policy(name, policy, counters)

    def rivals(self, wanted: BuiltLayout) -> list[Rival]:
        """Who is ahead of our rules in the hooks and can hide them, or would be, were they where others keep them."""
        found = []
        for name, rules in wanted.hooks.items():
            entries = self._entries(name) or []
            hooked = any(entry.ours for entry in entries)
            ahead = rivals(entries if hooked else [*entries, *_entries_of(rules)], self._entries)
            found += [Rival(self._family, name, jump_of(entry), number, hooked) for number, entry in ahead]
        return list(dict.fromkeys(found))

    def differences(self, wanted: BuiltLayout, held: Held) -> list[str]:
        """What is wrong with our rules, in words; their place is not, in hooks where they are held."""
        found = []
        for name, rules in wanted.chains.items():
            found += chain_differences(name, _entries_of(rules), self._entries(name))
        for name, rules in wanted.hooks.items():
            entries = self._entries(name) or []
            found += hook_differences(name, _entries_of(rules), entries, self._entries, held=name in held)
        # while ours are not what they should be, these would be told twice
        found = found or [f"chain {name}: a rule that is not ours leads there" for name in self._led_to(wanted)]
        return found + [f"chain {name} is left over" for name in self._stale(wanted)]

    def apply(self, wanted: BuiltLayout, held: Held) -> list[str]:
        """Make our chains and our rules in the hooks what the layout says; what is so already stays untouched.

        Our rules come first in their hooks, but where they are held behind rivals.
        Returns the old chains of ours that stay, empty, because rules of others lead to them.
        """
        for name in wanted.chains:
            if not self._table.is_chain(name):
                self._do("create_chain", name)
        for name, rules in wanted.chains.items():
            if self._entries(name) != _entries_of(rules):
                self._do("flush_entries", name)
                for rule in rules:
                    self._do("append_entry", name, rule.buffer)
        for name, rules in wanted.hooks.items():
            self._apply_hook(name, rules, held.get(name, set()))
        return self._delete(self._stale(wanted))

    def _apply_hook(self, name: str, rules: list[BuiltRule], jumps: set[str]) -> None:
        entries = self._entries(name) or []
        if hook_in_sync(_entries_of(rules), entries, self._entries, held=bool(jumps)):
            return
        first = place(entries, jumps)
        for position in reversed([at for at, entry in enumerate(entries) if entry.ours]):
            self._delete_rule(name, position)
        for position, rule in enumerate(rules, first):
            self._do("insert_entry", name, rule.buffer, position)

    def _led_to(self, wanted: BuiltLayout) -> list[str]:
        """Our chains to which chains of others lead, so that packets count twice; nothing but a word helps."""
        rules = itertools.chain.from_iterable((*wanted.chains.values(), *wanted.hooks.values()))
        expected = Counter(rule.entry.verdict for rule in rules)
        return [name for name in wanted.chains if self._references(name) > expected[name]]

    def _stale(self, wanted: BuiltLayout) -> list[str]:
        names = [name for name in self._chains() if name.startswith(CHAIN_PREFIX) and name.isascii()]
        return [name for name in names if name not in wanted.chains]

    def _chains(self) -> list[str]:
        low, handle = self._table._iptc, self._table._handle  # noqa: SLF001  # Table.chains stumbles over foreign names
        names = []
        name = low.iptc_first_chain(handle)
        while name:
            names.append(_name(name))
            name = low.iptc_next_chain(handle)
        return names

    def _delete(self, chains: list[str]) -> list[str]:
        for name in chains:
            if self._entries(name):
                self._do("flush_entries", name)  # first all of them, because they refer to each other
        stuck = [name for name in chains if self._references(name)]
        for name in chains:
            if name not in stuck:
                self._do("delete_chain", name)
        return stuck

    def _entries(self, chain: str) -> list[Entry] | None:
        """The rules of a chain, None where it does not exist."""
        low, handle, raw = self._table._iptc, self._table._handle, _raw(chain)  # noqa: SLF001  # as in `_chains`
        if not low.iptc_is_chain(raw, handle):
            return None
        entries = []
        first = low.iptc_first_rule(raw, handle)
        entry = first[0] if first else None
        while entry:
            blob = ctypes.string_at(ctypes.addressof(entry), entry.next_offset)
            verdict = _name(self._table.get_target(entry) or b"")
            standard = has_standard_target(self._family, blob)
            entries.append(decode(self._family, blob, verdict, standard=standard))
            entry = self._table.next_rule(entry)
        return entries

    def _do(self, method: str, *arguments: Any) -> None:
        """Call a method of the table that edits it."""
        try:
            getattr(self._table, method)(*arguments)
        except self._iptc.IPTCError as error:
            raise self._explain(f"{method.replace('_', ' ')} {arguments[0]}", error) from error
        self._changed = True

    def _delete_rule(self, chain: str, position: int) -> None:
        low = self._table._iptc  # noqa: SLF001  # Table has no method to delete by number
        if low.iptc_delete_num_entry(chain.encode(), position, self._table._handle) != 1:  # noqa: SLF001  # as above
            raise self._explain(f"delete rule {position + 1} of {chain}", self._table.strerror())
        self._changed = True

    def _references(self, chain: str) -> int:
        count = ctypes.c_uint(0)
        low = self._table._iptc  # noqa: SLF001  # Table has no method for it
        low.iptc_get_references(ctypes.byref(count), chain.encode(), self._table._handle)  # noqa: SLF001  # as above
        return count.value

    def _errno(self) -> int:
        return int(self._iptc.ip4tc._get_errno_loc()[0])  # noqa: SLF001  # of libc, which libiptc sets

    def _explain(self, what: str, answer: object) -> NetacctError:
        """The error to raise for what libiptc answered."""
        code = self._errno()
        text = f"cannot {what} in table {_TABLE} (IPv{self._family}): {answer}"
        if code in (errno.EPERM, errno.EACCES):
            return PermissionRefusedError(f"{text} (CAP_NET_ADMIN and CAP_NET_RAW are needed)")
        if code in (errno.ENOENT, errno.ENOPROTOOPT):
            module = "ip_tables, iptable_mangle" if self._family == 4 else "ip6_tables, ip6table_mangle"
            return MissingFeatureError(f"{text} (needs {module}, xt_set, xt_mark, xt_multiport)")
        return DatapathError(text)


def _name(raw: bytes) -> str:
    """A name of somebody else's, who may have written it in any encoding; `_raw` gives it back."""
    return raw.decode("utf-8", "surrogateescape")


def _raw(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")


def _entries_of(rules: list[BuiltRule]) -> list[Entry]:
    return [rule.entry for rule in rules]
