"""The agent: the only place that wires the parts together.

It owns datapath and books, and its methods are the steps of its life: start, observe, repair, view, pause, stop.
Nothing here waits or loops; `service.py` does. Methods are for the worker thread only, but where they say otherwise.

The order that makes a kill at any point harmless:

* what identity says is noted first; then the counters are read and settled with the leases as they *were*; only then do
  leases change; then the state is stored;
* a counter that shall go is made to count no more, read, settled and stored, and only then destroyed;
* whatever cannot be told again from the kernel is stored before anybody is shown it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar, cast

import netacct
from netacct import clock, policy_file, yamlfile
from netacct.books import Books
from netacct.config import Config
from netacct.errors import NetacctError
from netacct.export.native import Collected, Detail, View
from netacct.identity import pods_file, ranges
from netacct.identity.leases import Open, needs_reading
from netacct.identity.source import Health, SourceEvent
from netacct.kernel import marks
from netacct.kernel import plan as planning
from netacct.kernel.base import Datapath, keep_nothing
from netacct.kernel.marks import MarkDecision
from netacct.log import Repeats, get
from netacct.model import Address, Lease, Network, Snapshot, unpack
from netacct.policy import Policy

SHARED_SECONDS = 1.0
"""Scrapes within this time share one reading."""

VERIFY_SECONDS = 10.0
"""How often rules and sets are compared with the plan."""

SETTLE_SECONDS = 10.0
"""The longest time between two readings when nobody scrapes."""

SAVE_SECONDS = 60.0
"""The longest time between two checkpoints."""

QUIET_SECONDS = 60.0
"""An address outside of prefilled ranges loses its counters after two equal readings so far apart without a lease."""

TROUBLE_SECONDS = 300.0

T = TypeVar("T")


class Agent:
    """One node's accounting.

    Args:
        config: the configuration.
        policy: the traffic classes.
        datapath: the kernel side, in this thread's network namespace.
        books: totals and leases, loaded.
    """

    def __init__(self, config: Config, policy: Policy, datapath: Datapath, books: Books) -> None:
        self._config, self._policy, self._datapath, self._books = config, policy, datapath, books
        self._log = get()
        self._repeats = Repeats(TROUBLE_SECONDS)
        self._own: frozenset[Address] = frozenset()
        self._marks = MarkDecision(enabled=False, reason="not decided yet")
        self._plan: planning.Plan | None = None
        self._read_at = 0.0
        self._verified_at = 0.0
        self._differences: list[str] = []
        self._repairs = 0
        self._collected: dict[str, Collected] = {}
        self._quiet: dict[Address, tuple[float, tuple[tuple[int, int], ...]]] = {}
        self._sources: Callable[[], Mapping[str, Health]] = dict
        self._reloaded = True
        self._started = time.time()
        self._last: View | None = None
        self.paused = not config.enabled

    def start(
        self, own: frozenset[Address], events: Iterable[SourceEvent], sources: Callable[[], Mapping[str, Health]]
    ) -> None:
        """Install or adopt, and book what the kernel counted while no agent ran.

        Args:
            own: the node's own addresses.
            events: what the sources already said.
            sources: gives each source's health.

        Errors: DatapathError and PermissionRefusedError where this node cannot be accounted.
        """
        self._own, self._sources = own, sources
        for event in events:
            self._books.note(event)
        if self.paused:
            self._datapath.remove(self._keep_and_store if self._books.resumed else keep_nothing)
            self._finish_lease_changes(clock.now())
            return
        self._plan = self._build()
        self._datapath.adopt(self._plan)
        before = self._datapath.read()
        if self._books.resumed and self._books.ledger.contradicts(before):
            self._books.reject("the kernel's counters are behind it")
        if self._books.resumed:
            self._books.settle(before, before.at)
        else:
            self._books.ledger.baseline(before, before.at)
        self._install(keep_leftovers=self._books.resumed)
        self.observe([])
        self._books.save(clock.now())

    def observe(self, events: Iterable[SourceEvent]) -> None:
        """Take in what sources say: read, settle with the old leases, then change them, then store."""
        for event in events:
            self._books.note(event)
        changes = self._books.pending()
        if not changes:
            return
        at = clock.now()
        if needs_reading(changes) and not self.paused:
            at = self._refresh()
        self._finish_lease_changes(at)

    def own_addresses(self, own: frozenset[Address]) -> None:
        """The node's own addresses changed."""
        self._own = own
        self._replan()

    def tick(self, now: float) -> None:
        """What is due without anybody asking."""
        if not self.paused:
            if now - self._verified_at >= VERIFY_SECONDS:
                self.repair()
            if now - self._read_at >= SETTLE_SECONDS:
                self._attempt("reading", self._refresh)
                self._attempt("discard", self._discard_quiet)
        if now - self._books.saved_at >= SAVE_SECONDS:
            self._books.save(now)

    def due(self) -> float:
        """When `tick` has something to do next."""
        save = self._books.saved_at + SAVE_SECONDS
        if self.paused:
            return save
        return min(self._verified_at + VERIFY_SECONDS, self._read_at + SETTLE_SECONDS, save)

    def repair(self) -> list[str]:
        """Compare the kernel with the plan and mend what differs; returns what differed."""
        self._verified_at = clock.now()
        found = self._attempt("verify", self._datapath.verify) if self._plan else []
        if found is None:
            return []
        self._differences = found
        if found:
            self._log.warning("rules are not in sync, repairing", differences=len(found), first=found[0])
            if self._attempt("repair", lambda: self._install(keep_leftovers=True)) is not None:
                self._repairs += 1
                self._differences = self._attempt("verify", self._datapath.verify) or []
        return found

    def differences(self) -> list[str]:
        """How the kernel differs from the plan now; changes nothing. Raises DatapathError."""
        return [] if self.paused else self._datapath.verify()

    def view(self) -> View:
        """What a scrape shows now, from a reading that is at most a second old where one can be had."""
        now = clock.now()
        if not self.paused:
            if now - self._verified_at >= VERIFY_SECONDS:
                self.repair()
            if clock.now() - self._read_at >= SHARED_SECONDS:
                self._attempt("reading", self._refresh)
        self._last = self._view(clock.now())
        return self._last

    def stale_view(self) -> View | None:
        """The last view with its present age, for when the worker is busy. May be called from any thread."""
        last = self._last
        if last is None:
            return None
        return dataclasses.replace(last, reading_age_seconds=max(0.0, clock.now() - self._read_at))

    def reconfigure(self, config: Config, policy: Policy) -> None:
        """Go on with another configuration and policy; counters and totals stay. The caller has checked both."""
        if not self.paused:
            self._refresh()
        self._config, self._policy = config, policy
        self._books.reconfigure(config)
        if config.enabled and self.paused:
            self.resume()
        elif not config.enabled and not self.paused:
            self.pause()
        else:
            self._replan()
        self._reloaded = True

    def reload_failed(self) -> None:
        """A new configuration had an error and was not taken."""
        self._reloaded = False

    def pause(self) -> None:
        """Book and take away everything in the kernel; count no more until `resume`."""
        self._datapath.remove(self._keep_and_store)
        self._plan, self.paused = None, True
        self._books.save(clock.now())
        self._log.info("rules removed, accounting is paused")

    def resume(self) -> None:
        """Install again after `pause`."""
        self.paused = False
        self._plan = self._build()
        self._install(keep_leftovers=True)
        self._refresh()
        self._log.info("rules installed, accounting goes on")

    def stop(self) -> None:
        """Book and store the last reading; rules stay and go on counting."""
        if not self.paused:
            self._attempt("reading", self._refresh)
        self._books.save(clock.now())

    def not_ready(self) -> list[str]:
        """Why this agent cannot be relied on now; empty when it can. May be called from any thread."""
        if self.paused:
            return []
        reasons = [f"rules are not in sync: {words}" for words in self._differences[:3]]
        if clock.now() - self._read_at > 2 * SETTLE_SECONDS:
            reasons.append("the counters have not been read for too long")
        return reasons

    def pods(self) -> list[dict[str, object]]:
        """Each pod with an open lease, for `netacct pods`."""
        if not self.paused:
            self._attempt("reading", self._refresh)
        return [
            {
                "namespace": line.lease.pod.namespace,
                "pod": line.lease.pod.name,
                "uid": line.lease.pod.uid,
                "workload_kind": line.lease.pod.workload_kind,
                "workload": line.lease.pod.workload,
                "addresses": [unpack(ip) for ip in line.addresses],
                "sources": sorted(line.lease.sources),
                "since": clock.to_wall(line.lease.opened),
                "receive_bytes": line.received.bytes,
                "transmit_bytes": line.transmitted.bytes,
            }
            for line in self._books.pods()
        ]

    def status(self) -> str:
        """One line for the service manager."""
        if self.paused:
            return "paused: rules are removed"
        state = "in sync" if not self._differences else f"{len(self._differences)} differences"
        leases = len(self._books.leases.open_leases())
        return f"accounting {leases} addresses, policy {self._policy.name}, rules {state}"

    def _build(self) -> planning.Plan:
        decision = _decide_marks(self._config, self._policy)
        if (decision.enabled, decision.reason) != (self._marks.enabled, self._marks.reason):
            self._log.info("marks", enabled=decision.enabled, reason=decision.reason or "nobody else has the bits")
        self._marks = decision
        allowed = self._policy.marks if decision.enabled else None
        return planning.build(self._policy, self._local(), self._own, allowed)

    def _local(self) -> tuple[Network, ...]:
        """The local ranges, joined by each address that a source knows or that still has something to book."""
        addresses = {lease.ip for lease in self._books.leases.open_leases()}
        addresses |= {change.lease.ip for change in self._books.pending()}
        return ranges.join(self._config.local_ranges, addresses | self._quiet.keys())

    def _replan(self) -> None:
        if self.paused:
            return
        plan = self._attempt("plan", self._build)
        if plan is not None and plan != self._plan:
            self._plan = plan
            self._attempt("install", lambda: self._install(keep_leftovers=True))

    def _install(self, *, keep_leftovers: bool) -> bool:
        """Bring the kernel to the plan; what it drops is booked and stored before it is gone."""
        assert self._plan is not None
        dropped = self._datapath.install(self._plan, self._keep_and_store if keep_leftovers else keep_nothing)
        if keep_leftovers and dropped.readings:
            self._books.settle(dropped, max(dropped.at, self._books.ledger.at), final=True)
        self._datapath.add(lease.ip for lease in self._books.leases.open_leases())
        self._verified_at = clock.now()
        self._differences = []
        self._refresh()
        return True

    def _keep_and_store(self, last_values: Snapshot) -> None:
        """Book whole sets that are about to be destroyed, but do not forget them: we may be killed before they are."""
        self._books.settle(last_values, last_values.at)
        self._books.save(clock.now())

    def _refresh(self) -> float:
        """Read and settle; returns the time of the reading."""
        begin = time.perf_counter()
        snapshot = self._datapath.read()
        read = time.perf_counter()
        self._books.settle(snapshot, snapshot.at)
        self._collected["kernel"] = Collected(not snapshot.unreadable, read - begin)
        self._collected["ledger"] = Collected(ok=True, seconds=time.perf_counter() - read)
        self._read_at = snapshot.at
        self._notice_quiet(snapshot)
        if snapshot.unreadable:
            self._verified_at = 0.0  # a set lost its epoch: mend it at the next occasion
        return snapshot.at

    def _finish_lease_changes(self, at: float) -> None:
        changes = self._books.commit(at)
        opened = [change.lease for change in changes if isinstance(change, Open)]
        if opened and not self.paused:
            self._open_counters(opened)
        if changes:
            self._books.save(clock.now())
            self._log.debug("leases changed", changes=len(changes), open=len(self._books.leases.open_leases()))

    def _open_counters(self, leases: list[Lease]) -> None:
        """Give new addresses counters: by the plan where they lie outside of the local ranges, else in their sets."""
        for lease in leases:
            self._quiet.pop(lease.ip, None)
        self._replan()
        self._attempt("add", lambda: self._datapath.add(lease.ip for lease in leases))

    def _notice_quiet(self, snapshot: Snapshot) -> None:
        """Remember since when the counters of addresses without a lease have not moved."""
        held = {lease.ip for lease in self._books.leases.open_leases()}
        for lease in self._books.leases.closed_since(snapshot.at - 2 * SETTLE_SECONDS):
            if lease.ip not in held:
                self._quiet.setdefault(lease.ip, (snapshot.at, ()))
        for ip, (since, was) in list(self._quiet.items()):
            if ip in held:
                del self._quiet[ip]
                continue
            now = tuple(reading.counts[ip] for reading in snapshot.readings if ip in reading.counts)
            self._quiet[ip] = (since, was) if now == was else (snapshot.at, now)

    def _discard_quiet(self) -> bool:
        """Drop the counters of addresses that have been silent and without a lease for long enough."""
        limit = max(QUIET_SECONDS, self._config.identity.late_binding)
        gone = [ip for ip, (since, _) in self._quiet.items() if self._read_at - since >= limit]
        if not gone:
            return False
        for ip in gone:
            del self._quiet[ip]
        self._replan()
        dropped = self._datapath.discard(gone)
        self._books.settle(dropped, max(dropped.at, self._books.ledger.at), final=True)
        self._books.save(clock.now())
        return True

    def _view(self, now: float) -> View:
        shown = self._books.show(now)
        metrics = self._config.metrics
        return View(
            version=netacct.__version__,
            datapath=self._datapath.name,
            policy_name=self._policy.name,
            policy_hash=self._policy.hash,
            series=tuple(shown.totals.items()),
            pods=shown.pods,
            pod_labels=metrics.labels,
            detail=Detail(metrics.pods, metrics.workloads, metrics.packets),
            rules_in_sync=not self._differences and not self.paused,
            rule_repairs=self._repairs,
            counter_resets=self._books.ledger.resets,
            ambiguous_bytes=self._books.ledger.ambiguous_bytes,
            marks_enabled=self._marks.enabled,
            marks_reason=self._marks.reason,
            sources_up={name: health.up for name, health in self._sources().items()},
            leases=len(self._books.leases.open_leases()),
            series_capped=self._books.ledger.capped,
            accounting_start=self._started,
            reading_age_seconds=max(0.0, now - self._read_at),
            config_last_reload_successful=self._reloaded,
            collectors=dict(self._collected),
        )

    def _attempt(self, what: str, step: Callable[[], T]) -> T | None:
        """The step's result, or None after an error, which is logged sparingly: a running agent survives."""
        try:
            result = step()
        except (NetacctError, OSError) as error:
            if self._repeats.due(what):
                self._log.error(f"{what} failed, trying again", error=str(error))
            if what == "reading":
                self._collected["kernel"] = Collected(ok=False, seconds=0.0)
            if what in ("repair", "install") and not self._differences:
                self._differences = [str(error)]
            return None
        self._repeats.forget(what)
        return result


def local_ranges(config: Config) -> tuple[Network, ...]:
    """The local ranges by configuration and pods file alone: for commands that look without an agent."""
    path = Path(config.identity.file.path)
    addresses: set[Address] = set()
    if pods_file.SOURCE in config.identity.sources and path.exists():
        observations = pods_file.parse(yamlfile.read(str(path)), str(path), clock.now())
        addresses = {seen.ip for seen in observations if seen.present}
    return ranges.join(config.local_ranges, addresses)


def plan_from_files(config: Config) -> planning.Plan:
    """The plan for this node as it is now, without an agent's memory. Raises ConfigError."""
    policy = policy_file.load(config.policy)
    allowed = policy.marks if _decide_marks(config, policy).enabled else None
    return planning.build(policy, local_ranges(config), ranges.own_addresses(), allowed)


def _decide_marks(config: Config, policy: Policy) -> MarkDecision:
    mode = cast("marks.Mode", config.marks.mode)  # the configuration accepts nothing else
    return marks.resolve(mode, policy.marks.mask if policy.marks else None)
