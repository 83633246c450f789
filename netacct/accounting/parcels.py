"""Bytes that wait for the name of their sender: a parcel per address and interval. Pure.

A pod sends its first packet before any source speaks of it. What nobody holds is put here by the ledger, until a lease
claims it or it has waited too long. What may claim a parcel is said in `may_claim`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from netacct.accounting.series import Flow
from netacct.accounting.tenures import Interval, Tenures, begin, closed_by
from netacct.model import UNBOUNDED, ZERO, Address, Count, Lease


@dataclass(slots=True)
class Parcel:
    """Bytes of one address that wait for a name: counted in (start, end], the address last released at `after`."""

    start: float
    end: float
    after: float
    counts: dict[Flow, Count] = field(default_factory=dict)


Waiting: TypeAlias = dict[Address, list[Parcel]]
"""All parcels of each address that has any, in the order of their intervals."""

ParcelState: TypeAlias = tuple[Address, float, float, float, dict[Flow, Count]]
"""A parcel as a value: (ip, start, end, after, counts)."""


def total(waiting: Waiting) -> dict[Flow, Count]:
    """The sum of all parcels."""
    sums: dict[Flow, Count] = {}
    for parcels in waiting.values():
        for parcel in parcels:
            for flow, count in parcel.counts.items():
                sums[flow] = sums[flow].plus(count) if flow in sums else count
    return sums


def put(waiting: Waiting, ip: Address, flow: Flow, delta: tuple[int, int], interval: Interval, after: float) -> None:
    """Let wait what an address counted in an interval; it was last released at `after`, or never (`UNBOUNDED`)."""
    parcels = waiting.setdefault(ip, [])
    parcel = next((one for one in reversed(parcels) if (one.start, one.end) == interval), None)
    if parcel is None:
        parcel = Parcel(*interval, after)
        parcels.append(parcel)
    parcel.counts[flow] = parcel.counts.get(flow, ZERO).plus(Count(*delta))


def give_up(waiting: Waiting, oldest: float, most: int) -> list[Parcel]:
    """Take out the parcels whose intervals ended before `oldest`, and the oldest of those that are more than `most`."""
    if not waiting:
        return []
    ends = [parcel.end for parcels in waiting.values() for parcel in parcels]
    if len(ends) > most:
        # Some room at once, or every settle from here on would sort again.
        oldest = max(oldest, sorted(ends, reverse=True)[most * 3 // 4])
    if min(ends) >= oldest:
        return []
    given_up = []
    for ip, parcels in list(waiting.items()):
        given_up += [parcel for parcel in parcels if parcel.end < oldest]
        _keep(waiting, ip, [parcel for parcel in parcels if parcel.end >= oldest])
    return given_up


def claim(waiting: Waiting, tenures: Tenures) -> Iterator[tuple[Parcel, Sequence[Lease]]]:
    """Take out the parcels that leases may claim, each with these leases, the newest last."""
    for ip in [ip for ip in waiting if ip in tenures]:
        left = []
        for parcel in waiting[ip]:
            claiming = [lease for lease in tenures[ip] if may_claim(lease, parcel)]
            if claiming:
                yield parcel, claiming
            else:
                left.append(parcel)
        _keep(waiting, ip, left)


def may_claim(lease: Lease, parcel: Parcel) -> bool:
    """Whether this lease's sandbox can have sent what waits in a parcel."""
    if closed_by(lease, parcel.start):
        return False
    if lease.created == UNBOUNDED:
        return True
    # Without a sandbox, all that is known is when the pod started: it may have waited for its sandbox since long.
    return begin(lease) < parcel.end and (not lease.sandbox or parcel.after <= begin(lease))


def state(waiting: Waiting) -> tuple[ParcelState, ...]:
    """All parcels as values."""
    return tuple(
        (ip, parcel.start, parcel.end, parcel.after, dict(parcel.counts))
        for ip, parcels in waiting.items()
        for parcel in parcels
    )


def restore(kept: tuple[ParcelState, ...]) -> Waiting:
    """The parcels of a `state`."""
    waiting: Waiting = {}
    for ip, start, end, after, counts in kept:
        waiting.setdefault(ip, []).append(Parcel(start, end, after, dict(counts)))
    return waiting


def _keep(waiting: Waiting, ip: Address, parcels: list[Parcel]) -> None:
    if parcels:
        waiting[ip] = parcels
    else:
        del waiting[ip]
