"""The nftables datapath: a table of our own for each family, written and read by raw netlink.

What a new plan needs is made first: sets that count, counters, maps. Then one transaction moves the rules over; chains
whose rules do not differ are not touched, and no counter is in a rule. Last, what no rule counts in any more is read,
kept and deleted. Where the kernel can (Linux 6.9), the tables are `owner, persist`: nobody else changes them, not even
`nft flush ruleset`, while the process that installed them lives; when it ends they stay and go on counting, and the
next one takes them on.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Iterable, Mapping

from netacct import clock
from netacct.errors import DatapathError, MissingFeatureError
from netacct.kernel import nft_chains, nft_layout, nft_sets
from netacct.kernel import nft_messages as nft
from netacct.kernel.base import Keep, keep_nothing
from netacct.kernel.nft_messages import DORMANT, OWNER, PERSIST, TABLE, Message, element
from netacct.kernel.nft_parts import Layout
from netacct.kernel.nft_reader import NftReader
from netacct.kernel.nft_sets import Members, NftSets, Present
from netacct.kernel.nft_writer import NftWriter, RefusedError
from netacct.kernel.plan import Plan
from netacct.kernel.position import Position
from netacct.model import Address, Family, Reading, Scope, Snapshot, family_of, is_cgroup

_FAMILIES: tuple[Family, ...] = (4, 6)
_TABLES: dict[Family, str] = {4: f"table ip {TABLE}", 6: f"table ip6 {TABLE}"}

_GRACE = 0.02
"""Seconds after a transaction in which packets that were under way may still count by the rules before it (RCU)."""

_NO_SUCH_MATCH = (errno.ENOENT, errno.EOPNOTSUPP, errno.ERANGE)  # no such expression, key of it, or level
_NO_SUCH_FLAG = (errno.EINVAL, errno.EOPNOTSUPP)


class NftablesDatapath:
    """The Datapath for nf_tables. Works in the network namespace of the thread that makes it, and in that thread.

    Errors: MissingFeatureError where the kernel has no nf_tables; PermissionRefusedError without CAP_NET_ADMIN.
    """

    name = "nftables"

    def __init__(self) -> None:
        self._reader = NftReader()
        self._writer: NftWriter | None = None
        self._layouts: tuple[Layout, ...] = ()
        self._sets: dict[Family, NftSets] = {}
        self._prefilled: dict[Family, frozenset[Address]] = {}
        self._leased: set[Address] = set()
        self._checked: int | None = None  # the generation in which all was found as it should be
        self._filled: set[tuple[Family, str]] = set()  # maps and the like that hold what they should
        self.position = Position()  # nobody is before us: our chains are of their own, and all chains of a hook are run

    def close(self) -> None:
        """Close the sockets. The tables stay, and are nobody's where they were ours."""
        self._reader.close()
        self.release()

    def release(self) -> None:
        """Let others write to the tables, until the next write of ours."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def install(self, plan: Plan, keep: Keep = keep_nothing) -> Snapshot:
        """See `Datapath.install`."""
        self._set_plan(nft_layout.build(plan), {family.family: frozenset(family.prefilled) for family in plan.families})
        if not self._only_ours():
            self._filled.clear()  # somebody may have changed them
        for layout in self._layouts:
            self._claim(layout.family, make=True)
        return self._bring_about(keep)

    def adopt(self, plan: Plan) -> None:
        """See `Datapath.adopt`."""
        self._set_plan(nft_layout.build(plan), {family.family: frozenset(family.prefilled) for family in plan.families})
        for layout in self._layouts:
            self._take_up(layout, nft_sets.look(self._reader, layout.family))

    def verify(self) -> list[str]:
        """See `Datapath.verify`. Errors also where nothing was installed or adopted yet."""
        self._require_plan()
        generation = self._reader.generation()
        if self._checked is not None and (generation == self._checked or self._only_ours()):
            return []
        found = []
        for family in _FAMILIES:
            found += [f"IPv{family}: {words}" for words in self._differences(family)]
        self._checked = None if found else generation
        return found

    def read(self) -> Snapshot:
        """See `Datapath.read`."""
        self._require_plan()
        at = clock.now()
        readings, unreadable = [], []
        for layout in self._layouts:
            found, missing = self._sets[layout.family].read()
            readings += found
            unreadable += missing
        if unreadable:
            self._checked = None  # `nft reset` takes epochs away and leaves the generation as it is
        return Snapshot(at, tuple(readings), tuple(unreadable))

    def add(self, ips: Iterable[Address]) -> None:
        """See `Datapath.add`. An address that finds no room in a set is not refused: it counts as rest."""
        self._require_plan()
        new = set(ips)
        for family, sets in self._sets.items():
            for width in {len(ip) for ip in new}:
                self._add(family, sets.holding(width), [element(ip) for ip in sorted(new) if len(ip) == width])
        self._leased |= new

    def discard(self, ips: Iterable[Address], keep: Keep = keep_nothing) -> Snapshot:
        """See `Datapath.discard`. Only for addresses that are silent: a packet between reading and deleting is lost."""
        self._require_plan()
        gone = {ip for ip in ips if ip not in self._prefilled.get(family_of(ip), ())}
        at = clock.now()
        doomed: list[tuple[str, Reading]] = []
        unreadable = []
        for family, sets in self._sets.items():
            if some := [ip for ip in gone if is_cgroup(ip) or family_of(ip) == family]:
                found, missing = sets.doomed(some)
                doomed += found
                unreadable += missing
        snapshot = Snapshot(at, tuple(reading for _, reading in doomed), tuple(unreadable))
        if doomed:
            keep(snapshot)
            deleted = [
                nft.delete_elements(one.key.family, name, [element(ip) for ip in one.counts]) for name, one in doomed
            ]
            self._open().fill(message for several in deleted for message in several)
        for sets in self._sets.values():
            sets.forget(gone)
        self._leased -= gone
        return snapshot

    def remove(self, keep: Keep = keep_nothing) -> Snapshot:
        """See `Datapath.remove`."""
        self._set_plan((), {})
        self._leased.clear()
        return self._bring_about(keep)

    def _set_plan(self, layouts: tuple[Layout, ...], prefilled: Mapping[Family, frozenset[Address]]) -> None:
        self._checked = None
        self._layouts, self._prefilled = layouts, dict(prefilled)
        self._sets = {family: sets for family, sets in self._sets.items() if family in self._prefilled}

    def _require_plan(self) -> None:
        if not self._layouts:
            raise DatapathError("nothing is installed yet")

    def _take_up(self, layout: Layout, present: Present) -> NftSets:
        before = self._sets.get(layout.family)
        known = before.known if before else {}
        self._sets[layout.family] = NftSets(self._reader, layout, nft_sets.choose(layout, present), known)
        return self._sets[layout.family]

    def _open(self) -> NftWriter:
        """The socket that writes, and owns the tables."""
        if self._writer is None:
            self._writer = NftWriter()
            self._checked = None
            self._filled.clear()
            for family in _FAMILIES:
                self._claim(family, make=False)
        return self._writer

    def _claim(self, family: Family, *, make: bool) -> None:
        """Own the table, making it where it is missing, as far as this kernel knows how to."""
        writer = self._open()
        table = self._reader.table(family)
        if table is None:
            if make:
                self._make_table(family)
        elif table.flags & OWNER and table.owner != writer.port:
            raise DatapathError(f"{_TABLES[family]} belongs to another running process (netlink port {table.owner})")
        elif table.flags & (OWNER | PERSIST) == PERSIST:
            writer.commit([nft.new_table(family, OWNER | PERSIST)])
        elif table.flags & DORMANT:
            writer.commit([nft.new_table(family, table.flags & ~DORMANT)])

    def _only_ours(self) -> bool:
        """Whether nobody else can have changed our tables since this object opened its socket."""
        if self._writer is None or not self._layouts:
            return False
        tables = [self._reader.table(layout.family) for layout in self._layouts]
        return all(table and table.flags & OWNER and table.owner == self._writer.port for table in tables)

    def _make_table(self, family: Family) -> None:
        writer = self._open()
        try:
            writer.commit([nft.new_table(family, OWNER | PERSIST)])
        except RefusedError as error:
            if error.code not in _NO_SUCH_FLAG:
                raise
            writer.commit([nft.new_table(family, 0)])

    def _bring_about(self, keep: Keep) -> Snapshot:
        """Bring all tables to their layouts; those of families without one go. Returns what was dropped on the way."""
        writer = self._open()
        layouts = {layout.family: layout for layout in self._layouts}
        tables = [family for family in _FAMILIES if self._reader.table(family) is not None]
        present = {family: nft_sets.look(self._reader, family) for family in tables}
        sets = {family: self._take_up(layouts[family], present[family]) for family in tables if family in layouts}

        kept = {(family, name) for family, some in sets.items() for name in some.names.values()}
        counting = {(family, name) for family in tables for name in present[family].counting()}
        referred = {(family, name) for family in tables for name in present[family].referred()}
        before = self._drop(counting - kept - referred, keep)  # older than what is kept: to be booked first

        changes = []
        for family in tables:
            if family not in layouts:
                changes.append(nft.flush_table(family))
                continue
            layout = layouts[family]
            members, known = self._members(family), dict(sets[family].names)
            writer.fill(sets[family].prepare(present[family], members))
            if sets[family].names != known:
                self._require_counters(family)
            writer.fill(nft_chains.made_before(self._reader, layout))
            for content in layout.contents:
                if (family, content.name) not in self._filled:
                    writer.fill(nft_chains.fill(self._reader, family, content, present[family]))
            changes += nft_chains.changes(self._reader, layout, sets[family].names, present[family])
        self._move_over(changes)
        self._filled = {(layout.family, content.name) for layout in self._layouts for content in layout.contents}

        retired = (counting & referred) - {
            (family, name) for family, some in sets.items() for name in some.names.values()
        }
        if retired:
            time.sleep(_GRACE)
        after = self._drop(retired, keep)
        writer.commit([nft.delete_table(family) for family in tables if family not in layouts])
        return Snapshot(after.at, before.readings + after.readings)

    def _require_counters(self, family: Family) -> None:
        """Raise MissingFeatureError where sets that were made do not count: an older kernel says nothing of that."""
        ours, found = self._sets[family].names.values(), self._reader.sets(family)
        if any(name in ours and not info.counts for name, info in found.items()):
            raise MissingFeatureError("nf_tables of this kernel has no sets with counters, which came with Linux 5.7")

    def _move_over(self, changes: list[Message]) -> None:
        """Let the rules be those of the layouts, in one transaction. MissingFeatureError where they ask too much."""
        try:
            self._open().commit(changes)
        except RefusedError as error:
            told_apart = any(spec.key.scope is Scope.HOST_POD for layout in self._layouts for spec in layout.sets)
            if told_apart and error.code in _NO_SUCH_MATCH:
                raise MissingFeatureError(
                    "host_pods: cgroup needs a kernel that matches sockets by cgroup (NFT_SOCKET, SOCK_CGROUP_DATA; "
                    f"Linux 5.13): {error}"
                ) from error
            raise

    def _drop(self, doomed: Iterable[tuple[Family, str]], keep: Keep) -> Snapshot:
        """Read sets and counters that count no more, hand their last values to `keep`, and delete them."""
        at = clock.now()
        readings: list[Reading] = []
        deleted = []
        for family in _FAMILIES:
            if names := sorted(name for of, name in doomed if of == family):
                values = self._reader.counters(family)
                readings += nft_sets.last(self._reader, family, names, values)
                deleted += [
                    nft.delete_counter(family, name) if name in values else nft.delete_set(family, name)
                    for name in names
                ]
        snapshot = Snapshot(at, tuple(readings))
        if readings:
            keep(snapshot)
        self._open().commit(deleted)
        return snapshot

    def _add(self, family: Family, names: list[str], elements: list[bytes]) -> None:
        try:
            # one pod is one transaction; only a thousand are several
            self._open().fill(one for name in names for one in nft.new_elements(family, name, elements))
        except RefusedError as error:
            if error.code != errno.ENFILE:
                raise
            self._squeeze(family, names, elements)

    def _squeeze(self, family: Family, names: Iterable[str], elements: list[bytes]) -> None:
        """Add elements one by one, as long as there is room."""
        for name in names:
            for one in elements:
                try:
                    self._open().commit(list(nft.new_elements(family, name, [one])))
                except RefusedError as error:
                    if error.code != errno.ENFILE:
                        raise

    def _members(self, family: Family) -> Members:
        cgroups = [ip for ip in self._leased if is_cgroup(ip)]
        leased = [ip for ip in self._leased if not is_cgroup(ip) and family_of(ip) == family]
        return Members(sorted(self._prefilled.get(family, ())), leased, cgroups)

    def _differences(self, family: Family) -> list[str]:
        layout = next((one for one in self._layouts if one.family == family), None)
        table = self._reader.table(family)
        if layout is None:
            return [] if table is None else [f"{_TABLES[family]} is left over"]
        if table is None:
            return [f"{_TABLES[family]} is missing"]
        found = []
        if self._writer is not None and table.flags & PERSIST and table.owner != self._writer.port:
            found.append(f"{_TABLES[family]} is not ours any more")
        if table.flags & DORMANT:
            found.append(f"{_TABLES[family]} is dormant, so that nothing counts")
        present = nft_sets.look(self._reader, family)
        found += self._sets[family].differences(present, self._members(family))
        return found + nft_chains.differences(self._reader, layout, self._sets[family].names, present)
