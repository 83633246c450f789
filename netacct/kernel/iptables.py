"""The iptables datapath: legacy xtables rules through python-iptables, counters in ipsets.

The sets come first, then the rules that refer to them, then what is left of an older plan is read and destroyed. An
edit of a table is: build the rules, take the lock, load the table, compare, change what differs, commit; the lock is
held for milliseconds, and nothing is committed where nothing differs. SIGTERM is held off in the calling thread
meanwhile, because a process that dies inside a commit loses the rule counters of the whole table. In a program of
several threads the signal goes to another one: there a handler for SIGTERM must be installed, as the agent does.
"""

from __future__ import annotations

import contextlib
import random
import re
import signal
import socket
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from netacct import clock
from netacct.errors import DatapathError, MissingFeatureError, PermissionRefusedError
from netacct.kernel import layout, marks_xtables
from netacct.kernel.base import Keep, keep_nothing
from netacct.kernel.counters import CounterSets
from netacct.kernel.layout import Layout
from netacct.kernel.lock import PATIENCE, xtables_lock
from netacct.kernel.mangle import MangleTable
from netacct.kernel.netlink import Netlink
from netacct.kernel.plan import Plan
from netacct.kernel.position import Position
from netacct.kernel.rulebuilder import BuiltLayout, RuleBuilder
from netacct.kernel.setmaker import Members
from netacct.lean import hidden
from netacct.model import Address, Family, Snapshot, family_of, is_cgroup

_FAMILIES: tuple[Family, ...] = (4, 6)
_KINDS = {kind.version: kind for kind in marks_xtables.KINDS}
_COMMIT_TRIES = 8
_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_NET_RAW": 13}  # linux/capability.h


class IptablesDatapath:
    """The Datapath for legacy xtables. Works in the network namespace of the thread that makes it, and in that thread.

    Args:
        patience: seconds to wait for the xtables lock.

    Errors: PermissionRefusedError without the capabilities; MissingFeatureError without python-iptables' libraries.
    """

    name = "iptables"

    def __init__(self, patience: float = PATIENCE) -> None:
        _require_capabilities()
        self._iptc = _load_iptc()
        self._patience = patience
        self._netlink = Netlink()
        self._sets = CounterSets(self._netlink)
        self._layouts: tuple[Layout, ...] = ()
        self._prefilled: dict[Family, frozenset[Address]] = {}
        self._leased: set[Address] = set()
        self.position = Position()

    def close(self) -> None:
        """Close the netlink socket. Rules and counters stay."""
        self._netlink.close()

    def install(self, plan: Plan, keep: Keep = keep_nothing) -> Snapshot:
        """See `Datapath.install`."""
        prefilled = {family.family: frozenset(family.prefilled) for family in plan.families}
        return self._install(layout.build(plan), prefilled, keep)

    def adopt(self, plan: Plan) -> None:
        """See `Datapath.adopt`."""
        self._set_plan(layout.build(plan), {family.family: frozenset(family.prefilled) for family in plan.families})

    def verify(self) -> list[str]:
        """See `Datapath.verify`. Errors also where nothing was installed or adopted yet."""
        self._require_plan()
        found = self._sets.differences(self._members())
        for family in _FAMILIES:
            found += [f"IPv{family}: {words}" for words in self._rule_differences(self._layout(family))]
        return found

    def read(self) -> Snapshot:
        """See `Datapath.read`."""
        self._require_plan()
        return self._sets.read()

    def add(self, ips: Iterable[Address]) -> None:
        """See `Datapath.add`. An address that finds no room in a set is not refused: it counts as rest."""
        self._require_plan()
        new = {ip for ip in ips if not is_cgroup(ip)}  # those are leftovers of another datapath's time
        self._sets.add(ip for ip in new if ip not in self._prefilled.get(family_of(ip), ()))
        self._leased |= new

    def discard(self, ips: Iterable[Address], keep: Keep = keep_nothing) -> Snapshot:
        """See `Datapath.discard`. Only for addresses that are silent: a packet between reading and deleting is lost."""
        self._require_plan()
        gone = {ip for ip in ips if not is_cgroup(ip) and ip not in self._prefilled.get(family_of(ip), ())}
        snapshot = self._sets.discard(gone, keep)
        self._leased -= gone
        return snapshot

    def remove(self, keep: Keep = keep_nothing) -> Snapshot:
        """See `Datapath.remove`. Errors also where a rule of somebody else refers to a set or chain of ours."""
        self._set_plan((), {})
        self._leased.clear()
        chains = [name for family in _FAMILIES for name in self._edit(self._layout(family))]
        self.position.forget()
        spares, _ = self._sets.drop(self._sets.spares(), keep)  # first: they are older than what replaced them
        others, sets = self._sets.drop(self._sets.ours(), keep)
        if chains or sets:
            raise DatapathError(f"rules that are not ours refer to what is left of ours: {', '.join(chains + sets)}")
        return _joined(spares, others)

    def _install(
        self, layouts: tuple[Layout, ...], prefilled: Mapping[Family, frozenset[Address]], keep: Keep
    ) -> Snapshot:
        self._set_plan(layouts, prefilled)
        before, _ = self._sets.drop(self._sets.spares(), keep)
        try:
            self._sets.prepare(layouts, self._members())
        finally:
            # Whatever fails from here on, the caller may read next, and must have the values that were swapped out.
            swapped, _ = self._sets.drop(self._sets.spares(), keep)
        for family in _FAMILIES:
            self._edit(self._layout(family))
        after, _ = self._sets.drop(self._sets.leftovers(), keep)
        return _joined(before, swapped, after)

    def _set_plan(self, layouts: tuple[Layout, ...], prefilled: Mapping[Family, frozenset[Address]]) -> None:
        self._layouts, self._prefilled = layouts, dict(prefilled)
        self._sets.adopt(layouts)

    def _require_plan(self) -> None:
        if not self._layouts:
            raise DatapathError("nothing is installed yet")

    def _layout(self, family: Family) -> Layout:
        """The layout of a family; an empty one where the plan does not have it."""
        found = [one for one in self._layouts if one.family == family]
        return found[0] if found else Layout(family, (), (), ())

    def _members(self) -> dict[Family, Members]:
        return {
            family: Members(
                sorted(self._prefilled.get(family, ())), [ip for ip in self._leased if family_of(ip) == family]
            )
            for family in _FAMILIES
        }

    def _rule_differences(self, wanted: Layout) -> list[str]:
        if not _mangle_exists(wanted.family):  # to look for it any other way would make it
            return ["table mangle is missing"] if wanted.chains else []
        built = self._built(wanted, self._sets.present_names())
        with self._table(wanted.family) as table:
            held = self.position.look(wanted.family, table.rivals(built), clock.now())
            return table.differences(built, held)

    def _built(self, wanted: Layout, names: Mapping[str, str]) -> BuiltLayout:
        _require_socket(wanted.family)
        return RuleBuilder(self._iptc, wanted.family, names).build(wanted)

    def _table(self, family: Family) -> contextlib.closing[MangleTable]:
        return contextlib.closing(MangleTable(self._iptc, family))

    def _edit(self, wanted: Layout) -> list[str]:
        """Bring one family's table to a layout. Returns old chains that stay because others' rules lead to them."""
        if not wanted.chains and not _mangle_exists(wanted.family):
            return []
        built = self._built(wanted, self._sets.names)  # 0.2 ms a rule: before the lock
        for attempt in range(_COMMIT_TRIES):
            with xtables_lock(self._patience), _sigterm_held_off(), self._table(wanted.family) as table:
                held = self.position.look(wanted.family, table.rivals(built), clock.now())
                stuck = table.apply(built, held)
                if table.commit():
                    self.position.moved(wanted.family, clock.now())
                    return stuck
            # somebody wrote without the lock; not cryptography: two writers shall not keep step
            time.sleep(0.005 * 2**attempt * random.uniform(0.5, 1.5))  # noqa: S311
        raise DatapathError(f"table mangle (IPv{wanted.family}) changed under {_COMMIT_TRIES} commits in a row")


def _joined(*snapshots: Snapshot) -> Snapshot:
    """All readings of several snapshots, in their order, as of the last."""
    return Snapshot(snapshots[-1].at, tuple(reading for one in snapshots for reading in one.readings))


def _mangle_exists(family: Family) -> bool:
    """Whether the namespace has the table; loading it with libiptc would create it."""
    return "mangle" in marks_xtables.tables(_KINDS[family])


def _require_socket(family: Family) -> None:
    """Refuse where there is no socket for libxtables, which would end the process (exit(1) in compatible_revision)."""
    try:
        socket.socket(_KINDS[family].family, socket.SOCK_RAW, socket.IPPROTO_RAW).close()
    except OSError as error:
        raise DatapathError(f"no socket for IPv{family} to be had, which libxtables needs: {error.strerror}") from error


@contextlib.contextmanager
def _sigterm_held_off() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _require_capabilities() -> None:
    """Refuse early and by name; libiptc itself would say "you must be root". Source: proc(5), CapEff."""
    status = Path("/proc/thread-self/status").read_text(encoding="utf-8")
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    effective = int(found[1], 16) if found else 0
    missing = [name for name, bit in _CAPABILITIES.items() if not effective >> bit & 1]
    if missing:
        raise PermissionRefusedError(f"the iptables datapath needs CAP_NET_ADMIN and CAP_NET_RAW ({missing} missing)")


def _load_iptc() -> Any:
    """Import python-iptables; 4 MB, and a tenth of a second of looking for libraries.

    With a `distutils` that can be imported it would load all of setuptools with it, 16 MB; without, it asks sysconfig.
    """
    try:
        with hidden("distutils"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its regular expressions have invalid escapes
            import iptc  # noqa: PLC0415  # commands that touch no kernel shall not pay
    except Exception as error:  # it raises whatever its search for libraries runs into
        raise MissingFeatureError(
            f"python-iptables does not load (libxtables, libip4tc, libip6tc?): {error}"
        ) from error
    return iptc
