"""One family's legacy mangle table: our rules in it built, compared and edited, through python-iptables.

What python-iptables does behind one's back, and how it is kept from it: it creates every legacy table when it looks up
a jump target (`_OwnChains`); it shares one handle per process (each object here has its own); it redirects the process'
stdout while it decodes or checks parameters, and mis-reads foreign rules (we build rules, but read them as bytes and
never let it check one); matches of one kind share state (parameters are set right after a match is created).
"""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from netacct.errors import DatapathError, MissingFeatureError, NetacctError, PermissionRefusedError
from netacct.kernel.layout import CHAIN_PREFIX, AddToSet, Jump, Layout, Return, Rule, SetMark, SetMatch, Target
from netacct.kernel.xtables import (
    Entry,
    chain_differences,
    decode,
    has_standard_target,
    hook_differences,
    hook_in_sync,
)
from netacct.model import Family

_TABLE = "mangle"
_HOOKS = ("PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING")
_NOT_IN, _NOT_OUT = 0x01, 0x02  # IPT_INV_VIA_IN, IPT_INV_VIA_OUT; ip6_tables.h has the same


class _OwnChains:
    """Stands for "all tables" when python-iptables asks whether a target is a chain, so that it opens none of them."""

    @staticmethod
    def is_chain(name: str) -> bool:
        """Whether it is one of ours."""
        return name.startswith(CHAIN_PREFIX)


class MangleTable:
    """The table as it was when this was made; edits stay in here until `commit`. Creates the table where it is missing.

    Args:
        iptc: the python-iptables module (only `iptables.py` imports it).
        family: iptables or ip6tables.

    Errors of all methods: DatapathError; MissingFeatureError; PermissionRefusedError.
    """

    def __init__(self, iptc: Any, family: Family) -> None:
        self._iptc, self._family = iptc, family
        rule = iptc.Rule if family == 4 else iptc.Rule6
        self._rule_type = type("OwnRule", (rule,), {"tables": property(lambda _: [_OwnChains])})
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
        if low.iptc_commit(self._table._handle) == 1:  # noqa: SLF001
            return True
        if self._errno() == errno.EAGAIN:
            return False
        raise self._explain("commit", self._table.strerror())

    def _keep_policy_counters(self) -> None:
        """Write the policies' counters back, which libiptc zeroes at every commit (rule counters it keeps).

        What a policy counts in the milliseconds between loading and committing is lost; otherwise all would be.
        """
        for name in _HOOKS:
            policy, counters = self._table.get_policy(name)
            self._table.set_policy(name, policy, counters)

    def differences(self, wanted: Layout, names: Mapping[str, str]) -> list[str]:
        """What is wrong with our rules, in words.

        Args:
            wanted: what should be there.
            names: the kernel names of those of its sets that exist.
        """
        found = []
        for chain in wanted.chains:
            found += chain_differences(chain.name, self._expected(chain.rules, names), self._entries(chain.name))
        for name, rules in _hook_rules(wanted).items():
            entries = self._entries(name) or []
            found += hook_differences(name, self._expected(rules, names), entries, self._entries)
        return found + [f"chain {name} is left over" for name in self._stale(wanted)]

    def apply(self, wanted: Layout, names: Mapping[str, str]) -> list[str]:
        """Make our chains and our rules in the hooks what the layout says; what is so already stays untouched.

        Returns the old chains of ours that stay, empty, because rules of others lead to them.
        """
        for chain in wanted.chains:
            if not self._table.is_chain(chain.name):
                self._do("create_chain", chain.name)
        for chain in wanted.chains:
            built = self._built(chain.rules, names)
            if self._entries(chain.name) != [entry for _, entry in built]:
                self._do("flush_entries", chain.name)
                for buffer, _ in built:
                    self._do("append_entry", chain.name, buffer)
        for name, rules in _hook_rules(wanted).items():
            self._apply_hook(name, self._built(rules, names))
        return self._delete(self._stale(wanted))

    def _apply_hook(self, name: str, built: Sequence[tuple[Any, Entry]]) -> None:
        entries = self._entries(name) or []
        if hook_in_sync([entry for _, entry in built], entries, self._entries):
            return
        for position in reversed([at for at, entry in enumerate(entries) if entry.ours]):
            self._delete_rule(name, position)
        for position, (buffer, _) in enumerate(built):
            self._do("insert_entry", name, buffer, position)

    def _stale(self, wanted: Layout) -> list[str]:
        keep = {chain.name for chain in wanted.chains}
        names = [chain.name for chain in self._table.chains]
        return [name for name in names if name.startswith(CHAIN_PREFIX) and name not in keep]

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
        if not self._table.is_chain(chain):
            return None
        entries = []
        entry = self._table.first_rule(chain)
        while entry:
            blob = ctypes.string_at(ctypes.addressof(entry), entry.next_offset)
            verdict = (self._table.get_target(entry) or b"").decode("ascii", "replace")
            standard = has_standard_target(self._family, blob)
            entries.append(decode(self._family, blob, verdict, standard=standard))
            entry = self._table.next_rule(entry)
        return entries

    def _expected(self, rules: Iterable[Rule], names: Mapping[str, str]) -> list[Entry]:
        """Entries to compare with; a rule whose set does not exist cannot be built, and equals nothing."""
        return [
            self._build(rule, names)[1] if _set_names(rule) <= names.keys() else _unlike_any(rule) for rule in rules
        ]

    def _built(self, rules: Iterable[Rule], names: Mapping[str, str]) -> list[tuple[Any, Entry]]:
        return [self._build(rule, names) for rule in rules]

    def _build(self, rule: Rule, names: Mapping[str, str]) -> tuple[Any, Entry]:
        """A rule as libiptc takes it, and as it compares."""
        made = self._rule_type()
        if rule.source is not None:
            made.src = str(rule.source)
        if rule.destination is not None:
            made.dst = str(rule.destination)
        _set_interfaces(made.get_ip(), rule)
        if rule.udp_ports or rule.protocol is not None:
            made.protocol = str(17 if rule.udp_ports else rule.protocol)
        try:
            self._add_matches(made, rule, names)
            self._add_target(made, rule.target, names)
        except self._iptc.XTablesError as error:
            raise MissingFeatureError(f"iptables: {error} (kernel module or iptables extension missing?)") from error
        buffer = made.rule
        standard = not isinstance(rule.target, SetMark | AddToSet)
        return buffer, decode(self._family, bytes(buffer), _verdict(rule.target), standard=standard)

    @staticmethod
    def _add_matches(made: Any, rule: Rule, names: Mapping[str, str]) -> None:
        if rule.udp_ports:
            made.create_match("multiport").set_parameter("dports", ",".join(map(str, rule.udp_ports)))
        if rule.unmarked is not None:
            made.create_match("mark").set_parameter("mark", f"0x0/{rule.unmarked:#x}")
        for match in rule.sets:
            made_match = made.create_match("set")
            made_match.set_parameter("match-set", _set_parameter(match, names))
            if not match.update_counters:
                made_match.set_parameter("update-counters", "!")

    @staticmethod
    def _add_target(made: Any, target: Target, names: Mapping[str, str]) -> None:
        made_target = made.create_target(_verdict(target), goto=isinstance(target, Jump) and target.goto)
        if isinstance(target, SetMark):
            made_target.set_parameter("set-xmark", f"{target.value:#x}/{target.mask:#x}")
        elif isinstance(target, AddToSet):
            made_target.set_parameter("add-set", [names[target.name], target.side])

    def _do(self, method: str, *arguments: Any) -> None:
        """Call a method of the table that edits it."""
        try:
            getattr(self._table, method)(*arguments)
        except self._iptc.IPTCError as error:
            raise self._explain(f"{method.replace('_', ' ')} {arguments[0]}", error) from error
        self._changed = True

    def _delete_rule(self, chain: str, position: int) -> None:
        low = self._table._iptc  # noqa: SLF001  # Table has no method to delete by number
        if low.iptc_delete_num_entry(chain.encode(), position, self._table._handle) != 1:  # noqa: SLF001
            raise self._explain(f"delete rule {position + 1} of {chain}", self._table.strerror())
        self._changed = True

    def _references(self, chain: str) -> int:
        count = ctypes.c_uint(0)
        low = self._table._iptc  # noqa: SLF001  # Table has no method for it
        low.iptc_get_references(ctypes.byref(count), chain.encode(), self._table._handle)  # noqa: SLF001
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


def _hook_rules(wanted: Layout) -> dict[str, tuple[Rule, ...]]:
    """Our rules in each hook of the table, none where the layout does not name it."""
    return dict.fromkeys(_HOOKS, ()) | {hook.name: hook.rules for hook in wanted.hooks}


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


def _unlike_any(rule: Rule) -> Entry:
    goto = isinstance(rule.target, Jump) and rule.target.goto
    return Entry(_verdict(rule.target), goto=goto, ip=b"", matches=(), target=None)
