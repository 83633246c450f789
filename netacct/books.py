"""The books of one node: who held which address, what was counted, what was shown, and the store under all of it.

Joins the lease book, the ledger and the exposure, which do not know each other, and keeps the one order that makes a
crash harmless: read, change the leases as of that reading, settle, store, write the accounts of those that closed.
Worker thread only.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from netacct import clock
from netacct.accounting import exposure
from netacct.accounting.accounts import Origin
from netacct.accounting.accounts_file import AccountsFile
from netacct.accounting.closing import Closing
from netacct.accounting.encoding import Checkpoint
from netacct.accounting.exposure import Exposure
from netacct.accounting.ledger import Ledger
from netacct.accounting.series import Limits
from netacct.accounting.store import Store
from netacct.accounting.tallies import key_of
from netacct.audit import Audit
from netacct.config import Config
from netacct.errors import StoreError
from netacct.identity.leases import Change, Close, LeaseBook, Update, needs_reading
from netacct.identity.names import TELLERS
from netacct.identity.source import Replace, SourceEvent
from netacct.log import Repeats, get
from netacct.model import ZERO, Address, Count, Direction, Lease, Level, Snapshot, unpack

SAVE_SECONDS = 60.0
"""The longest time between two checkpoints."""

RETRY_SECONDS = 10.0
"""How long to wait after a checkpoint that failed."""

STORE_TROUBLE_SECONDS = 300.0

OPEN_SECONDS = 300.0
"""How often the accounts of leases that last are written down, for readers and for the next boot."""


@dataclass(frozen=True, slots=True)
class PodLine:
    """What `netacct pods` shows of one pod: its addresses and, where it has series of its own, its totals."""

    lease: Lease
    addresses: tuple[Address, ...]
    received: Count
    transmitted: Count

    def facts(self) -> dict[str, object]:
        """As plain values, for JSON."""
        return {
            "namespace": self.lease.pod.namespace,
            "pod": self.lease.pod.name,
            "uid": self.lease.pod.uid,
            "workload_kind": self.lease.pod.workload_kind,
            "workload": self.lease.pod.workload,
            "addresses": [unpack(ip) for ip in self.addresses],
            "sources": sorted(self.lease.sources),
            "since": clock.to_wall(self.lease.opened),
            "receive_bytes": self.received.bytes,
            "transmit_bytes": self.transmitted.bytes,
        }


class Books:
    """Everything that is remembered.

    Args:
        store: where to; `load` is called at once.
        config: for limits, retention, zero-first, late binding, and where accounts go.
        priority: the identity sources, most trusted first.

    Attributes:
        resumed: whether an earlier agent's state goes on.
        began: when the totals began at 0 (Unix seconds; for display).
        save_at: when the next save is due (seconds since boot).
    """

    def __init__(self, store: Store, config: Config, priority: Sequence[str]) -> None:
        self._store, self._config, self._priority = store, config, priority
        self._log = get(part="books")
        self._repeats = Repeats(STORE_TROUBLE_SECONDS)
        self.save_at = 0.0
        self.began: float
        self.ledger: Ledger
        self.leases: LeaseBook
        self.exposure: Exposure
        self.audit: Audit
        self._closing: Closing
        self._made: list[Change] = []  # by `take`, and not yet told by `commit`
        self._open_at = 0.0
        found = self._load()
        self.resumed = found is not None
        self._open(found)

    def reject(self, reason: str) -> None:
        """Put the loaded state aside, because it does not fit the kernel, and begin anew; call before any `note`."""
        try:
            self._store.discard(reason)
        except StoreError as error:
            self._log.error("cannot put the unfitting state aside", error=str(error))
        self._log.warning("the stored state is not used", reason=reason)
        self.resumed = False
        self._closing.end()
        self._open(None)

    def note(self, event: SourceEvent) -> None:
        """Note what a source says; changes no lease before `commit`."""
        if isinstance(event, Replace):
            self.leases.replace(event.source, event.observations, event.seen_at)
        else:
            self.leases.observe(event.observations)

    def pending(self) -> tuple[Change, ...]:
        """The lease changes that `commit` would tell."""
        return (*self._made, *self.leases.pending())

    def take(self, snapshot: Snapshot) -> None:
        """Book a reading of everything, with what is known by now of who held addresses; `commit` comes next.

        So whoever left before this reading's interval began has no part in it, and who came meanwhile has.
        """
        since, at = self.ledger.since, snapshot.at
        changes = self.leases.commit(at)
        self._made += changes
        closed = [change.lease for change in changes if isinstance(change, Close)]
        leases = self.leases.leases_since(since)
        if closed:
            leases = tuple(dict.fromkeys((*leases, *closed)))
        # What was counted until now goes to the names of until now.
        before = {key_of(change.lease): change.old for change in changes if isinstance(change, Update)}
        if before:
            leases = tuple(replace(before.get(key_of(lease), lease), closed=lease.closed) for lease in leases)
        self.ledger.settle(snapshot, leases, at)
        self._closing.finish(self.ledger, leases)
        self._enter(changes, at)

    def settle(self, snapshot: Snapshot, at: float, *, final: bool = False) -> None:
        """Book a part of the counters, with the leases as they are."""
        leases = self.leases.leases_since(self.ledger.since)
        self.ledger.settle(snapshot, leases, at, final=final)
        self._closing.finish(self.ledger, leases)

    def commit(self, at: float) -> tuple[Change, ...]:
        """Make the noted lease changes, as of the reading that was taken at `at`, and tell them; the caller saves."""
        new = self.leases.commit(at)
        self._enter(new, at)
        changes = (*self._made, *new)
        self._made.clear()
        if needs_reading(changes):
            # Gives new pods their series at once, and binds what waited for their names.
            self.settle(Snapshot(at, ()), at)
        return changes

    def released(self, changes: Iterable[Change]) -> set[Address]:
        """The addresses that lost their holder in these changes and got no other."""
        closed = {change.lease.ip for change in changes if isinstance(change, Close)}
        return {ip for ip in closed if self.leases.lease_of(ip) is None}

    def unheld(self) -> set[Address]:
        """The addresses of all leases that are remembered and closed, and that nobody holds now."""
        return {lease.ip for lease in self.leases.state() if self.leases.lease_of(lease.ip) is None}

    def save(self, at: float) -> bool:
        """Store everything. A store that fails is logged, sparingly: the agent goes on and tries again."""
        self.save_at = at + RETRY_SECONDS
        try:
            self._store.save(self._checkpoint())
        except StoreError as error:
            if self._repeats.due("save"):
                self._log.error("cannot store the totals, trying again", error=str(error))
            return False
        self._repeats.forget("save")
        self.ledger.saved()
        self.save_at = at + SAVE_SECONDS
        self._write_accounts(at)
        return True

    def finish(self, at: float) -> None:
        """Store everything, also what the leases that last have so far: an agent ends, and perhaps the machine."""
        self._open_at = at
        self.save(at)

    def show(self, now: float) -> exposure.View:
        """What a scrape shows at `now`, stored first where it must be."""
        view = self.exposure.view(self.ledger.totals, self.ledger.alive(now), now)
        if view.must_save or self.ledger.must_save:
            self.save(now)
        return view

    def pods(self) -> list[PodLine]:
        """Every pod with an open lease, by namespace and name."""
        held: dict[tuple[str, str], list[Lease]] = {}
        for lease in self.leases.open_leases():
            held.setdefault((lease.pod.namespace, lease.pod.name), []).append(lease)
        sums: dict[tuple[tuple[str, ...], Direction], Count] = {}
        for key, count in self.ledger.totals.items():
            if key.level is Level.POD:
                sums[key.labels, key.direction] = count.plus(sums.get((key.labels, key.direction), ZERO))
        return [
            PodLine(
                max(leases, key=lambda lease: lease.opened),
                tuple(sorted(lease.ip for lease in leases)),
                sums.get((name, Direction.RECEIVE), ZERO),
                sums.get((name, Direction.TRANSMIT), ZERO),
            )
            for name, leases in sorted(held.items())
        ]

    def reconfigure(self, config: Config) -> None:
        """Go on with other limits: as a restart would, without the file."""
        state, claims, audit = self._checkpoint(), self.leases, self.audit
        if config.identity.sources != self._config.identity.sources:
            self._priority = config.identity.sources
            claims.prefer(self._priority)
        self._config = config
        self._closing.end()
        self._open(state)
        self.leases, self.audit = claims, audit  # who vouched for what, and what is shown, is not part of the state
        self.ledger.must_save = True

    def _enter(self, changes: Iterable[Change], at: float) -> None:
        """Take lease changes into the books, at once: a checkpoint may be next."""
        for change in changes:
            if isinstance(change, Close):
                self._closing.close(change.lease)
            elif isinstance(change, Update):
                self.ledger.name(change.old, change.lease, at)
                self._closing.rename(change.old, change.lease, at, self.ledger.tallies)

    def _checkpoint(self) -> Checkpoint:
        state = self.ledger.state()
        closing, audit = self._closing.state(), self.audit.state()
        return Checkpoint(state, self.leases.state(), self.exposure.state(), self.began, closing, audit)

    def _write_accounts(self, at: float) -> None:
        """Write the accounts of what closed, and now and then of what lasts. Only after a checkpoint: see `Closing`."""
        try:
            self._closing.write()
            if at >= self._open_at:
                self._closing.keep_open(self.leases.open_leases(), self.ledger.tallies, at)
                self._open_at = at + OPEN_SECONDS
        except OSError as error:
            if self._repeats.due("accounts"):
                lost = self._closing.lost
                self._log.error("cannot write accounts, they wait", error=str(error), waiting_too_long=lost)
        else:
            self._repeats.forget("accounts")

    def _load(self) -> Checkpoint | None:
        try:
            found = self._store.load()
        except StoreError as error:
            self._log.error("cannot read the stored totals, beginning at 0", error=str(error))
            return None
        if found.checkpoint is None and found.reason != "new":
            self._log.warning("the stored state is not used", reason=found.reason)
        return found.checkpoint

    def _open(self, found: Checkpoint | None) -> None:
        metrics = self._config.metrics
        limits = Limits(
            pods=metrics.max_pod_series,
            workloads=metrics.max_workload_series,
            namespaces=metrics.max_namespace_series,
            labels=metrics.max_label_series,
            by_label=metrics.by_label,
            pod_retention=metrics.retention,
        )
        self.began = found.began if found else time.time()
        self.ledger = Ledger(
            found.ledger if found else None, limits=limits, late_binding=self._config.identity.late_binding
        )
        self.leases = LeaseBook(self._priority, found.leases if found else ())
        self.audit = Audit(found.audit if found else None)
        self._open_accounts(found)
        self.exposure = Exposure(
            found.exposure.only(self.ledger.totals) if found else None,
            zero_first=metrics.zero_first,
            patience=metrics.retention,
            levels=self._levels(),
        )

    def _open_accounts(self, found: Checkpoint | None) -> None:
        origin = Origin(os.uname().nodename, self._store.place.boot)
        file = AccountsFile(Path(self._config.accounts_dir))
        tells = not TELLERS.isdisjoint(self._priority)
        patience = self._config.identity.late_binding if tells else 0.0
        self._closing = Closing(file, origin, clock.to_wall, found.closing if found else None, patience)
        try:
            file.hold()
            if found is None:
                self._closing.interrupt()
        except OSError as error:
            self._log.error("cannot use the directory of accounts yet", error=str(error))

    def _levels(self) -> list[Level]:
        hidden = set() if self._config.metrics.pods else {Level.POD}
        hidden |= set() if self._config.metrics.workloads else {Level.WORKLOAD}
        return [level for level in Level if level not in hidden]
