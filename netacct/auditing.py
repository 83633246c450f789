"""The self-audit at work: readings between two looks at the pods' interfaces, compared and booked (`audit.py`).

A look is two dumps of the interfaces' counters around the reading that is taken anyway, and one dump of links: about
two milliseconds in all with a hundred pods. Where interfaces cannot be listed, readings go on without. Worker thread
only.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol, TypeVar

from netacct import clock
from netacct.accounting.tallies import key_of
from netacct.attempts import TROUBLE_SECONDS
from netacct.audit import BRIDGE, BYPASS, NO_INTERFACE, RDMA, Missing, Seen
from netacct.books import Books
from netacct.counting import Counting
from netacct.export.native import Collected
from netacct.kernel import rdma
from netacct.kernel.interfaces import PodLink, Traffic
from netacct.log import Repeats, get
from netacct.model import UNCLASSIFIED, ZERO, Address, Count, Direction, Lease, Scope, Snapshot, is_cgroup

T = TypeVar("T")

AUDIT_SECONDS = 30.0
"""How often pods' interfaces are compared with what was counted for them."""

SOON_SECONDS = 1.0
"""How soon to look again after leases changed, or after a doubt."""

BEGINNING_SECONDS = 60.0
"""For so long a pod may be without an interface: one that begins or ends is, for a moment."""


class Links(Protocol):
    """Where the counters of interfaces come from (`kernel.interfaces`); both raise OSError."""

    def find(self, wanted: Collection[Address]) -> Iterable[PodLink]:
        """The links to these addresses."""
        ...

    def read(self) -> Mapping[int, Traffic]:
        """What each interface counted."""
        ...


class _Pod(NamedTuple):
    """One pod's leases, IPv4 first, and its links, both sorted and not empty."""

    leases: list[Lease]
    links: list[PodLink]


class _Found(NamedTuple):
    """The pods to compare, and a lease of each pod that has a sandbox and no link, by uid."""

    pods: list[_Pod]
    unlinked: dict[str, Lease]


class Auditing:
    """Takes readings, and compares when that is due.

    Args:
        books: whose leases are compared, and where to book.
        links: the pods' interfaces; None for no audit.
        ports: what RDMA adapters counted.

    Attributes:
        due: when the next look is.
    """

    def __init__(
        self, books: Books, links: Links | None, ports: Callable[[], Iterable[rdma.PortBytes]] = rdma.read
    ) -> None:
        self._books, self._links, self._ports = books, links, ports
        self._moved: int | None = None
        self._unlinked: dict[str, float] = {}
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
        leases = self._books.leases.open_leases()  # also those that this reading ends: it is the last look at them
        seconds = time.perf_counter() - begin
        counting.refresh()
        begin = time.perf_counter()
        done = before is not None and self._try(lambda: self._compare(links, leases, before, counting.snapshot))
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

    def _compare(
        self, links: Links, leases: Iterable[Lease], before: Mapping[int, Traffic], snapshot: Snapshot
    ) -> bool:
        after = links.read()
        pods, unlinked = _find(leases, links.find)
        self._look_elsewhere(unlinked, snapshot.at)
        if snapshot.unreadable:
            return True  # what those sets counted is booked later: until then nothing can be said to be missing
        audit = self._books.audit
        if self._overflowed(snapshot):
            audit.forget()
        owners: dict[int, Lease] = {}
        seen: list[Seen] = []
        for pod in pods:
            if all(link.number in before and link.number in after for link in pod.links):
                owners[pod.links[0].number] = pod.leases[0]
                seen += self._seen(pod, before, after)
        for missing in audit.look(seen, snapshot.at):
            self._book(missing, owners[missing.place[0]], snapshot.at)
        if audit.unsure:
            self.soon()
        if audit.began:
            self._books.save_at = min(self._books.save_at, clock.now() + SOON_SECONDS)
        return True

    def _look_elsewhere(self, unlinked: Mapping[str, Lease], at: float) -> None:
        """Show what there is that crosses no interface of the node."""
        self._unlinked = {uid: self._unlinked.get(uid, at) for uid in unlinked}
        lasting = [uid for uid, since in self._unlinked.items() if at - since >= BEGINNING_SECONDS]
        if lasting:
            self._books.audit.spot(NO_INTERFACE, at)
            if self._repeats.due(NO_INTERFACE):
                pod = unlinked[lasting[0]].pod
                self._log.warning(
                    "pods without an interface of their own on this node: what passes by netfilter is not noticed",
                    pods=len(lasting),
                    namespace=pod.namespace,
                    pod=pod.name,
                )
        moved = sum(port.bytes for port in self._ports())
        if self._moved is not None and moved > self._moved:
            self._books.audit.spot(RDMA, at)
        self._moved = moved

    def _overflowed(self, snapshot: Snapshot) -> bool:
        """Whether bytes of local addresses went to the rest counters since the last look: they are booked already."""
        was = self._overflow
        rest = (reading for reading in snapshot.readings if reading.key.scope is Scope.REST)
        self._overflow = sum(packets for reading in rest for _bytes, packets in reading.counts.values())
        return was is not None and was != self._overflow

    def _seen(self, pod: _Pod, before: Mapping[int, Traffic], after: Mapping[int, Traffic]) -> Iterator[Seen]:
        tallies = [self._books.ledger.tallies.of(lease).counts for lease in pod.leases]
        identity = repr(([key_of(lease) for lease in pod.leases], [link.number for link in pod.links]))
        holder = hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()
        reason = BRIDGE if any(link.unfiltered for link in pod.links) else BYPASS
        for direction in Direction:
            counted = _sum(
                count
                for counts in tallies
                for (way, traffic), count in counts.items()
                if way is direction and traffic != UNCLASSIFIED
            )
            least, most = (
                _sum(traffic[link.number].of(direction) for link in pod.links) for traffic in (before, after)
            )
            yield Seen((pod.links[0].number, direction), holder, counted, least, most, reason)

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


def _find(leases: Iterable[Lease], find: Callable[[Collection[Address]], Iterable[PodLink]]) -> _Found:
    """Which pods have links. Those that share one are not compared: nobody knows whose is what."""
    by_ip = {lease.ip: lease for lease in leases if not is_cgroup(lease.ip)}
    held: dict[str, list[Lease]] = {}
    for lease in by_ip.values():
        held.setdefault(key_of(lease).uid, []).append(lease)
    links: dict[str, list[PodLink]] = {}
    shared: set[str] = set()
    for link in find(by_ip):
        owners = {key_of(by_ip[ip]).uid for ip in link.addresses}
        for owner in owners:
            links.setdefault(owner, []).append(link)
        shared |= owners if len(owners) > 1 else set()
    pods = [
        _Pod(sorted(held[owner], key=lambda lease: (len(lease.ip), lease.ip)), sorted(mine))
        for owner, mine in links.items()
        if owner not in shared
    ]
    # who has no sandbox is no pod of this node, but a virtual machine or a tenant that a file names
    return _Found(pods, {uid: mine[0] for uid, mine in held.items() if uid not in links and mine[0].sandbox})


def _sum(counts: Iterable[Count]) -> Count:
    total = ZERO
    for count in counts:
        total = total.plus(count)
    return total
