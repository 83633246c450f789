"""The agent: the only place that wires the parts together.

It owns the datapath and the books, and its methods are the steps of its life: start, observe, view, tick, pause, stop.
Nothing here waits or loops; `service.py` does. Methods are for the worker thread only, but where they say otherwise.

The order that makes a kill harmless: what identity says is noted first; then the counters are read and, as of that
reading, leases change; then the state is stored (`counting.py` has the rest of it).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping

from netacct import clock, marking, planner, showing
from netacct.attempts import Attempts
from netacct.auditing import Auditing, Links
from netacct.books import Books
from netacct.config import Config
from netacct.control import PAUSED
from netacct.counting import Counting
from netacct.desired import require_enabled
from netacct.errors import NetacctError
from netacct.export.native import View
from netacct.identity.leases import Open, needs_reading
from netacct.identity.source import Health, SourceEvent
from netacct.kernel.base import Datapath
from netacct.kernel.plan import Plan
from netacct.log import get
from netacct.marking import Marking
from netacct.model import Address, Network
from netacct.moving import FindOther, no_other
from netacct.policy import Policy, Prefix
from netacct.rivals import Rivals, all_differences, outcome
from netacct.silence import Silence

SHARED_SECONDS = 1.0
"""Scrapes within this time share one reading."""

CHECK_SECONDS = 10.0
"""How often rules and sets are compared with the plan, and how long a repair that failed waits for the next try."""

SETTLE_SECONDS = 10.0
"""The longest time between two readings when nobody scrapes."""

QUIET_SECONDS = 60.0
"""An address outside of prefilled ranges loses its counters after two equal readings so far apart without a lease."""


class Agent:
    """One node's accounting.

    Args:
        config: the configuration.
        policy: the traffic classes.
        datapath: the kernel side, in this thread's network namespace.
        books: totals and leases, loaded.
        find_other: opens the datapath that counted here before, if there is one.
        links: the pods' interfaces, for the self-audit; without, there is none.

    Attributes:
        paused: rules are removed, or shall be: `enabled` is false, or somebody asked for it.
    """

    def __init__(
        self,
        config: Config,
        policy: Policy,
        datapath: Datapath,
        books: Books,
        find_other: FindOther = no_other,
        links: Links | None = None,
    ) -> None:
        self._config, self._policy, self._datapath, self._books = config, policy, datapath, books
        self._counting = Counting(datapath, books, find_other)
        self._auditing = Auditing(books, links)
        self._log = get()
        self._attempt = Attempts()
        self._silence = Silence()
        self._planner = planner.Planner()
        self._sources: Callable[[], Mapping[str, Health]] = dict
        self._marking = Marking()
        self._rivals = Rivals()
        self._plan: Plan | None = None
        self._differences: list[str] = []
        self._repairs = 0
        self._check_at = self._mend_at = self._settle_at = 0.0
        self._reloaded, self._started = True, False
        self._last: View | None = None
        self.paused = not config.enabled

    def start(
        self,
        own: frozenset[Address],
        events: Iterable[SourceEvent] = (),
        sources: Callable[[], Mapping[str, Health]] = dict,
    ) -> list[str]:
        """Install or adopt, book what the kernel counted while no agent ran, and store. Returns what differed.

        Args:
            own: the node's own addresses.
            events: what the sources already said.
            sources: gives each source's health.

        Errors: DatapathError and PermissionRefusedError where this node cannot be accounted.
        """
        self._planner.own, self._sources = own, sources
        self._silence.released(self._books.unheld(), clock.now())
        self._marking.decide(self._config, self._policy)
        self._counting.begin(self._build())
        for event in events:
            self._books.note(event)
        found: list[str] = []
        if self.paused:
            self._counting.remove()
            self._log.info("rules removed, accounting is paused", because=showing.pause_reason(self._config))
        else:
            self._plan = self._build()
            self._datapath.adopt(self._plan)
            found = self._datapath.verify()
            self._install()
        self.observe([])
        self._books.save(clock.now())
        self._started = True
        return found

    def observe(self, events: Iterable[SourceEvent]) -> None:
        """Take in what sources say, all that is there at once: read, change the leases as of that, then store.

        Where the counters cannot be read, the leases stay until they can.
        """
        for event in events:
            self._books.note(event)
        changes = self._books.pending()
        if needs_reading(changes) and not self.paused:
            self._auditing.soon(0)
            self._attempt("reading", self._refresh)
        elif changes:
            self._change_leases(clock.now())

    def found_ranges(self, found: tuple[Network, ...]) -> None:
        """What providers say the local ranges are, besides those of the configuration. Also before `start`."""
        self._planner.found = found
        if self._started:
            self._replan()

    def found_cluster(self, facts: tuple[Prefix, ...]) -> None:
        """What was found of the whole cluster's ranges. Also before `start`."""
        self._planner.cluster = facts
        if self._started:
            self._replan()

    def own_addresses(self, own: frozenset[Address]) -> None:
        """The node's own addresses changed."""
        self._planner.own = own
        self._replan()

    def tick(self) -> None:
        """Do what is due without anybody asking."""
        now = clock.now()
        if self.paused:
            if self._plan is not None and now >= self._mend_at:
                self._attempt("removal", self.pause)
        else:
            if now >= self._marking.due:
                self._marking.decide_again(self._config, self._policy, self._attempt)
                self._replan()
            if now >= self._check_at:
                self._check()
            if self._differences and now >= self._mend_at:
                self._mend()
            if now >= min(self._settle_at, self._auditing.due):
                self._attempt("reading", self._refresh)
                self.observe([])
                self._forget_silent()
        if now >= self._books.save_at:
            self._books.save(now)

    def due(self) -> float:
        """When `tick` has something to do next."""
        times = [self._books.save_at]
        if not self.paused:
            times += [self._check_at, self._settle_at, self._marking.due, self._auditing.due]
        if self._differences or (self.paused and self._plan is not None):
            times.append(self._mend_at)
        return min(times)

    def apply(self) -> list[str]:
        """Install or repair now; returns what was done. Raises DatapathError."""
        require_enabled(self._config)
        if self.paused:
            self.resume()
            return ["installed"]
        found = all_differences(self._datapath)
        if found:
            self._datapath.position.forget()
            self._install()
            self._repairs += 1
        return outcome(self._datapath, found)

    def differences(self) -> list[str]:
        """How the kernel differs from what it should be; changes nothing. Raises DatapathError."""
        if not self.paused:
            return all_differences(self._datapath)
        return [PAUSED] if self._config.enabled else []

    def view(self) -> View:
        """What a scrape shows now, from a reading that is at most a second old where one can be had.

        Never waits for the xtables lock: what a check finds here is mended in the next `tick`.
        """
        if not self.paused:
            if clock.now() >= self._check_at:
                self._check()
            if clock.now() - self._counting.snapshot.at >= SHARED_SECONDS:
                self._attempt("reading", self._refresh)
        now, config = clock.now(), self._config
        self._last = dataclasses.replace(
            showing.view(config, self._policy, self._datapath, self._books, self._marking, self._sources(), now),
            rules_in_sync=not self._differences and not self.paused if config.enabled else None,
            rule_repairs=self._repairs,
            reading_age_seconds=None if self.paused else max(0.0, now - self._counting.snapshot.at),
            config_last_reload_successful=self._reloaded,
            collectors=dict(self._counting.collected),
        )
        return self._last

    def stale_view(self) -> View | None:
        """The last view with its present age, for when the worker is busy. May be called from any thread."""
        return showing.aged(self._last, clock.now() - self._counting.snapshot.at)

    def reconfigure(self, config: Config, policy: Policy) -> None:
        """Go on with another configuration and policy; counters and totals stay. The caller has checked both.

        What the kernel does not take at once, `tick` tries again. Errors: DatapathError where marks are asked for that
        cannot be set; then nothing has changed.
        """
        decision = marking.of_agent(config, policy)
        if not self.paused:
            self._attempt("reading", self._refresh)
        was, self._config, self._policy = self._config, config, policy
        self._books.reconfigure(config)
        self._reloaded = True
        self._marking.take(decision)
        if config.enabled and not was.enabled and self.paused:
            self._attempt("installation", self.resume)
        elif not config.enabled and not self.paused:
            self._attempt("removal", self.pause)
        else:
            self._replan()

    def reload_failed(self) -> None:
        """A new configuration had an error and was not taken."""
        self._reloaded = False

    def pause(self) -> None:
        """Book and take away everything in the kernel; count no more until `resume`. Raises DatapathError."""
        self.paused = True
        self._differences = []
        self._mend_at = clock.now() + CHECK_SECONDS
        self._counting.remove()
        self._plan = None
        self._books.save(clock.now())
        self._log.info("rules removed, accounting is paused", because=showing.pause_reason(self._config))

    def resume(self) -> None:
        """Install again after `pause`. Raises DatapathError."""
        self._marking.decide(self._config, self._policy)
        self._plan = self._build()
        self.paused = False
        self._install()
        self._log.info("rules installed, accounting goes on")

    def move(self, datapath: Datapath) -> None:
        """Count with another datapath from now on; what cannot be installed at once, `tick` tries again.

        Errors: DatapathError where the present one cannot be taken away; then it stays.
        """
        self._counting.move(datapath)
        self._datapath = datapath
        if not self.paused:
            self._plan = self._build()
            self._attempt("installation", self._install)

    def stop(self) -> None:
        """Book and store the last reading; rules stay and go on counting."""
        if not self.paused:
            self._attempt("reading", self._refresh)
        self._books.finish(clock.now())

    def not_ready(self) -> list[str]:
        """Why this agent cannot be relied on now; empty when it can. May be called from any thread."""
        if not self._started:
            return ["the agent is starting"]
        if self.paused:
            return []
        return showing.troubles(self._differences, clock.now() - self._counting.snapshot.at > 3 * SETTLE_SECONDS)

    @property
    def waiting(self) -> bool:
        """Whether bytes wait for the name of their sender."""
        return self._books.ledger.waiting

    def pods(self) -> list[dict[str, object]]:
        """Each pod with an open lease, for `netacct pods`."""
        if not self.paused:
            self._attempt("reading", self._refresh)
        return [line.facts() for line in self._books.pods()]

    def status(self) -> str:
        """One line for the service manager."""
        return showing.status(self._policy, self._datapath, self._books, self._differences, paused=self.paused)

    def _build(self, leaving: Collection[Address] = ()) -> Plan:
        """The plan of now, without the addresses that shall lose their counters."""
        leases = (*self._books.leases.open_leases(), *(change.lease for change in self._books.pending()))
        more = self._silence.addresses - set(leaving)
        return self._planner.plan(self._config, self._policy, self._marking, leases, more)

    def _replan(self, leaving: Collection[Address] = ()) -> None:
        if self.paused:
            return
        plan = self._build(leaving)
        if plan != self._plan:
            self._plan = plan
            self._attempt("installation", self._install)

    def _install(self) -> None:
        """Bring the kernel to the plan. Raises DatapathError."""
        assert self._plan is not None
        self._check_at = self._mend_at = clock.now() + CHECK_SECONDS
        try:
            self._counting.install(self._plan)
        except NetacctError as error:
            self._differences = [str(error)]
            raise
        self._differences = []
        self._change_leases(self._counting.snapshot.at)

    def _refresh(self) -> None:
        """Read and book, with the lease changes that are noted. Raises DatapathError."""
        self._settle_at = clock.now() + SETTLE_SECONDS
        self._auditing.refresh(self._counting)
        if self._counting.snapshot.unreadable and not self._differences:
            self._check_at = 0.0  # a set lost its epoch: see to it at the next occasion
        self._change_leases(self._counting.snapshot.at)

    def _change_leases(self, at: float) -> None:
        """Do what lease changes ask for, made as of a reading at `at`."""
        if not self._books.pending():
            return
        changes = self._books.commit(at)
        opened = {change.lease.ip for change in changes if isinstance(change, Open)}
        self._silence.forget(opened)
        self._silence.released(self._books.released(changes), at)
        if opened and not self.paused:
            self._replan()
            self._attempt("adding addresses", lambda: self._counting.add(opened))
        self._auditing.soon()
        self._books.save(clock.now())
        self._log.debug("leases changed", changes=len(changes), open=len(self._books.leases.open_leases()))

    def _check(self) -> None:
        """Compare the kernel with the plan; `tick` mends."""
        self._check_at = clock.now() + CHECK_SECONDS
        was, self._differences = self._differences, []
        self._attempt("check", self._compare)
        if self._differences and not was:
            self._mend_at = 0.0

    def _compare(self) -> None:
        self._differences = self._rivals.verify(self._datapath)

    def _mend(self) -> None:
        if self._attempt.is_news("mend"):
            first = self._differences[0]
            self._log.warning("rules are not in sync, repairing", count=len(self._differences), first=first)
        if self._attempt("repair", self._install):
            self._repairs += 1
            self._attempt("check", self._compare)  # what is broken again already waits for the next check

    def _forget_silent(self) -> None:
        """Take away the counters of addresses that have had neither lease nor packet for long."""
        assert self._plan is not None
        held = {lease.ip for lease in self._books.leases.open_leases()}
        self._silence.look(self._counting.snapshot, planner.prefilled(self._plan), held)
        limit = max(QUIET_SECONDS, self._config.identity.late_binding)
        gone = self._silence.silent_since(self._counting.snapshot.at - limit)
        if gone and not self._differences:
            self._replan(leaving=gone)
            if not self._differences:
                self._attempt("discarding addresses", lambda: self._discard(gone))

    def _discard(self, gone: Collection[Address]) -> None:
        if self._counting.discard(gone):
            self._silence.forget(gone)
        else:
            self._replan()
        self._change_leases(self._counting.snapshot.at)
