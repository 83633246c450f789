"""Addresses that have counters but no lease, and since when those counters stand still. Pure.

Only such an address may lose its counters: somebody may still send to it, and a name for what it sent may still come.
Prefilled addresses of the configured ranges never lose theirs and are not looked at. Worker thread only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from collections.abc import Set as AbstractSet

from netacct.model import Address, Scope, Snapshot

_Counts = tuple[tuple[int, int] | None, ...]


class Silence:
    """What is known of each address without a lease: its counters, and the time of the first reading with those."""

    def __init__(self) -> None:
        self._known: dict[Address, tuple[float, _Counts | None]] = {}

    @property
    def addresses(self) -> AbstractSet[Address]:
        """All that are looked at."""
        return self._known.keys()

    def released(self, ips: Iterable[Address], at: float) -> None:
        """These addresses lost their leases; an address that is known already stays as it is."""
        for ip in ips:
            self._known.setdefault(ip, (at, None))

    def forget(self, ips: Iterable[Address]) -> None:
        """These have a lease again, or their counters are gone."""
        for ip in ips:
            self._known.pop(ip, None)

    def look(self, snapshot: Snapshot, prefilled: Collection[Address], held: Collection[Address]) -> None:
        """Compare with an earlier reading.

        Args:
            snapshot: a reading of all counters.
            prefilled: addresses that keep their counters in any case, but for those that `released` named.
            held: addresses with a lease.
        """
        pods = [reading.counts for reading in snapshot.readings if reading.key.scope in (Scope.POD, Scope.HOST_POD)]
        self.forget(held)
        found = set[Address]().union(*pods) if pods else set()
        found -= set(held)
        found -= set(prefilled) - self._known.keys()
        for ip in found | self._known.keys():
            counts = tuple(one.get(ip) for one in pods)
            known = self._known.get(ip)
            if known is None or known[1] != counts:
                self._known[ip] = (snapshot.at, counts)

    def silent_since(self, time: float) -> list[Address]:
        """The addresses whose counters have been the same at `time` and ever since."""
        return [ip for ip, (since, counts) in self._known.items() if counts is not None and since <= time]
