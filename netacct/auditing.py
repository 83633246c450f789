"""The self-audit at work: readings between two looks at the pods' interfaces, compared and booked (`audit.py`).

A look is two dumps of the interfaces' counters around the reading that is taken anyway, and one dump of links: about
two milliseconds in all with a hundred pods. Where interfaces cannot be listed, readings go on without. Worker thread
only.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

from netacct import clock
from netacct.accounting.tallies import key_of
from netacct.attempts import TROUBLE_SECONDS
from netacct.audit import BRIDGE, BYPASS, Missing, Seen
from netacct.books import Books
from netacct.counting import Counting
from netacct.export.native import Collected
from netacct.kernel.interfaces import PodLink, Traffic
from netacct.log import Repeats, get
from netacct.model import UNCLASSIFIED, ZERO, Address, Direction, Lease, Scope, Snapshot

T = TypeVar("T")

AUDIT_SECONDS = 30.0
"""How often pods' interfaces are compared with what was counted for them."""

SOON_SECONDS = 1.0
"""How soon to look again after leases changed, or after a doubt."""


class Links(Protocol):
    """Where the counters of interfaces come from (`kernel.interfaces`); both raise OSError."""

    def find(self, wanted: Collection[Address]) -> Sequence[PodLink]:
        """The links to these addresses."""
        ...

    def read(self) -> Mapping[int, Traffic]:
        """What each interface counted."""
        ...


class Auditing:
    """Takes readings, and compares when that is due.

    Args:
        books: whose leases are compared, and where to book.
        links: the pods' interfaces; None for no audit.

    Attributes:
        due: when the next look is.
    """

    def __init__(self, books: Books, links: Links | None) -> None:
        self._books, self._links = books, links
        self._log, self._repeats = get(part="audit"), Repeats(TROUBLE_SECONDS)
        self._overflow: int | None = None
        self.due = math.inf if links is None else 0.0

    def soon(self, seconds: float = SOON_SECONDS) -> None:
        """Look again within so many seconds."""
        if self._links is not None:
            self.due = min(self.due, clock.now() + seconds)

    def refresh(self, counting: Counting) -> None:
        """Read and settle, and compare where that is due. Raises DatapathError."""
        links = self._links
        if links is None or clock.now() < self.due:
            counting.refresh()
            return
        self.due = clock.now() + AUDIT_SECONDS
        begin = time.perf_counter()
        before = self._try(links.read)
        seconds = time.perf_counter() - begin
        counting.refresh()
        begin = time.perf_counter()
        done = before is not None and self._try(lambda: self._compare(links, before, counting.snapshot))
        seconds += time.perf_counter() - begin
        counting.collected["interfaces"] = Collected(bool(done), seconds)

    def _try(self, step: Callable[[], T]) -> T | None:
        """What a step gives; None where the kernel refuses, which is logged, sparingly."""
        try:
            result = step()
        except OSError as error:
            if self._repeats.due("trouble"):
                self._log.error("cannot look at the pods' interfaces, trying again", error=str(error))
            return None
        self._repeats.forget("trouble")
        return result

    def _compare(self, links: Links, before: Mapping[int, Traffic], snapshot: Snapshot) -> bool:
        after = links.read()
        leases = {lease.ip: lease for lease in self._books.leases.open_leases()}
        held = {link: _held(link, leases) for link in links.find(leases)}
        held = {link: mine for link, mine in held.items() if mine and link.number in before and link.number in after}
        if snapshot.unreadable:
            return True  # what those sets counted is booked later: until then nothing can be said to be missing
        if self._overflowed(snapshot):
            self._books.audit.forget()
        seen = [
            one
            for link, mine in held.items()
            for one in self._seen(link, mine, before[link.number], after[link.number])
        ]
        owners = {link.number: mine[0] for link, mine in held.items()}
        for missing in self._books.audit.look(seen, snapshot.at):
            self._book(missing, owners[missing.place[0]], snapshot.at)
        if self._books.audit.unsure:
            self.soon()
        return True

    def _overflowed(self, snapshot: Snapshot) -> bool:
        """Whether bytes of local addresses went to the rest counters since the last look: they are booked already."""
        was = self._overflow
        rest = (reading for reading in snapshot.readings if reading.key.scope is Scope.REST)
        self._overflow = sum(packets for reading in rest for _bytes, packets in reading.counts.values())
        return was is not None and was != self._overflow

    def _seen(self, link: PodLink, held: Sequence[Lease], before: Traffic, after: Traffic) -> Iterator[Seen]:
        tallies = self._books.ledger.tallies
        holder = hashlib.blake2b(repr([key_of(lease) for lease in held]).encode(), digest_size=8).hexdigest()
        for direction in Direction:
            counted = ZERO
            for lease in held:
                for (way, traffic), count in tallies.of(lease).counts.items():
                    if way is direction and traffic != UNCLASSIFIED:
                        counted = counted.plus(count)
            reason = BRIDGE if link.unfiltered else BYPASS
            least, most = before.of(direction), after.of(direction)
            yield Seen((link.number, direction), holder, counted, least, most, reason)

    def _book(self, missing: Missing, lease: Lease, at: float) -> None:
        direction = missing.place[1]
        self._books.ledger.add_unclassified(lease, direction, missing.amount, at)
        if self._repeats.due(missing.reason):
            self._log.warning(
                "a pod's traffic passes by netfilter, booked as unclassified",
                reason=missing.reason,
                namespace=lease.pod.namespace,
                pod=lease.pod.name,
                direction=direction.value,
                bytes=missing.amount.bytes,
                coverage=round(missing.coverage, 3),
            )


def _held(link: PodLink, leases: Mapping[Address, Lease]) -> list[Lease]:
    """The leases behind a link, IPv4 first; none where they are several pods': nobody knows whose is what."""
    held = [leases[ip] for ip in sorted(link.addresses, key=lambda ip: (len(ip), ip))]
    return held if len({(lease.pod.uid, lease.pod.namespace, lease.pod.name) for lease in held}) == 1 else []
