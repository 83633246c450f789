"""From the kernel's counters into the books, with nothing lost or doubled on the way, also by a kill.

Four rules make a kill at any point harmless:

* a counter that shall go is made to count no more, read, settled and stored, and only then destroyed;
* at a start, what an earlier life was about to destroy is booked and destroyed before anything else is settled: it may
  have been replaced already, and the books know one set per counter only;
* what another datapath left is taken out of the way first (`moving.py`);
* books that are not provably of these counters begin anew, with what the counters hold as their zero; that is stored
  before new rules count anything.

Worker thread only. All methods raise DatapathError.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterable

from netacct import clock
from netacct.books import Books
from netacct.errors import NetacctError
from netacct.export.native import Collected
from netacct.kernel.base import Datapath, Keep, keep_nothing
from netacct.kernel.plan import Plan
from netacct.log import get
from netacct.model import Address, CounterKey, Snapshot
from netacct.moving import FindOther, OpenDatapath, goes_on, no_other

_STRANGE = "removed rules that did not count for these totals"


class _SpokeError(NetacctError):
    """An address that was silent sent or got something while its counters were about to go."""


class Counting:
    """Moves what a datapath counts into books.

    Attributes:
        snapshot: the last reading.
        collected: how that went, for the scrape.
    """

    def __init__(self, datapath: Datapath, books: Books, find_other: FindOther = no_other) -> None:
        self._datapath, self._books, self._find_other = datapath, books, find_other
        self._keep: Keep = self._keep_and_forget
        self._log = get()
        self._other: OpenDatapath | None = None  # which counts until `install`
        self._left: tuple[str, float] | None = None  # which counted until then
        self.snapshot = Snapshot(0.0, ())
        self.collected: dict[str, Collected] = {}

    def begin(self, plan: Plan) -> None:
        """Hold the stored books against the counters that are there; begin new books where they do not fit.

        Counters of no use to `plan` that are dropped next belong, to new books, to nobody.
        """
        self._find(plan)
        present = self._look(self._datapath, plan)
        if not self._books.resumed:
            self._books.ledger.baseline(present, present.at)
            self._books.save(clock.now())
            self._keep = keep_nothing

    def _look(self, datapath: Datapath, plan: Plan) -> Snapshot:
        """What a datapath has of the plan's counters. New books begin where the stored ones are ahead of it."""
        datapath.adopt(plan)
        present = datapath.read()
        if self._books.resumed and self._books.ledger.contradicts(present):
            self._books.reject("the kernel's counters are behind it")
        return present

    def _find(self, plan: Plan) -> None:
        """Look for what another datapath left: destroy what these books never counted, and note what they did."""
        other = self._find_other()
        if other is None:
            return
        with contextlib.ExitStack() as stack:
            stack.callback(other.close)
            theirs, mine = self._look(other, plan), self._look(self._datapath, plan)
            if not self._books.resumed or not (goes_on(self._books.ledger.state().sets, theirs) or not mine.readings):
                self._destroy(other)
                return
            if mine.readings:
                self._destroy(self._datapath)  # first: what the books know must outlive what they do not
            self._other = other
            stack.pop_all()

    def _destroy(self, stranger: Datapath) -> None:
        stranger.remove(keep_nothing)
        self._log.warning(_STRANGE, datapath=stranger.name)

    def _leave_other(self) -> None:
        """Book and take away what counted until now. Only just before something else counts: nothing does meanwhile."""
        if self._other is None:
            return
        other, begin = self._other, clock.now()
        with contextlib.closing(other):
            other.remove(self._keep)
        self._forget_but(())
        self._other, self._left = None, (other.name, begin)

    def refresh(self) -> None:
        """Read and book, and make the lease changes that the books have noted; they tell them next."""
        begin = time.perf_counter()
        self.collected["kernel"] = Collected(ok=False, seconds=0.0)
        snapshot = self._datapath.read()
        read = time.perf_counter()
        self._books.take(snapshot)
        self.collected["kernel"] = Collected(not snapshot.unreadable, read - begin)
        self.collected["ledger"] = Collected(ok=True, seconds=time.perf_counter() - read)
        self.snapshot = snapshot

    def install(self, plan: Plan) -> None:
        """Bring the kernel to the plan; what it drops is booked and stored before it is gone."""
        self._leave_other()
        self._datapath.install(plan, self._keep)
        self._datapath.add(lease.ip for lease in self._books.leases.open_leases())
        self._keep = self._keep_and_forget
        if self._left is not None:
            (name, since), self._left = self._left, None
            gap = round(clock.now() - since, 3)  # an upper bound: rules were hooked until somewhat later, and are since
            self._log.warning("moved to another datapath", was=name, now=self._datapath.name, gap_seconds=gap)
        self.refresh()
        self._forget_but({*(reading.key for reading in self.snapshot.readings), *self.snapshot.unreadable})

    def remove(self) -> None:
        """Take everything away, booked and stored."""
        self._books.audit.forget()  # nobody asked for the bytes that pass from here on
        self._leave_other()
        self._datapath.remove(self._keep)
        self._keep = self._keep_and_forget
        self._forget_but(())
        self.snapshot = Snapshot(clock.now(), ())
        self._left = None

    def move(self, datapath: Datapath) -> None:
        """Book and take away everything, and count with another datapath from the next `install` on.

        What somebody else left there counted beside ours until now, and is destroyed first: it would be booked again.
        """
        if datapath.remove(keep_nothing).readings:
            self._log.warning(_STRANGE, datapath=datapath.name)
        name, begin = self._datapath.name, clock.now()
        self.remove()
        self._datapath, self._left = datapath, (name, begin)

    def add(self, ips: Iterable[Address]) -> None:
        """Give addresses counters of their own."""
        self._datapath.add(ips)

    def discard(self, ips: Collection[Address]) -> bool:
        """Take the counters of silent addresses away; False where one is not silent, or its value cannot be stored."""
        self.refresh()
        if not self._books.save(clock.now()):
            return False
        try:
            dropped = self._datapath.discard(ips, self._keep_unchanged)
        except _SpokeError:
            return False
        self._books.settle(dropped, dropped.at, final=True)
        return True

    def _keep_and_forget(self, last: Snapshot) -> None:
        """Book whole sets and store that, then forget them. Stored is what a life needs that still finds them there."""
        self._books.settle(last, last.at)
        self._books.save(clock.now())
        self._books.settle(last, last.at, final=True)

    def _keep_unchanged(self, last: Snapshot) -> None:
        """The values are stored already, unless they moved."""
        stored = {reading.key: reading.counts for reading in self.snapshot.readings}
        for reading in last.readings:
            if any(stored.get(reading.key, {}).get(ip) != count for ip, count in reading.counts.items()):
                raise _SpokeError

    def _forget_but(self, present: Collection[CounterKey]) -> None:
        """Forget all other sets: those that the datapath did not hand over, because they never counted or were lost."""
        at = max(clock.now(), self._books.ledger.at)
        self._books.settle(Snapshot(at, ()), at)
        self._books.ledger.forget_but(present)
