"""What each lease got, by direction and traffic class: the raw material of accounts. Pure.

The ledger adds to a tally whatever it books to a lease; who closes leases takes the tally away once nothing more can
come. So there is one per lease that is open, or closed a moment ago, and no more. Unlike series they have no caps: each
lease has its own. Worker thread only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from netacct.accounting.series import Flow
from netacct.model import ZERO, Address, Count, Lease

TalliesState: TypeAlias = "Mapping[LeaseKey, tuple[float, Mapping[Flow, Count]]]"
"""`Tallies` as a value: since when, and what."""


class LeaseKey(NamedTuple):
    """Tells leases apart. `uid` is `NAMESPACE/NAME` where a source knows none."""

    ip: Address
    uid: str
    sandbox: str
    opened: float


@dataclass(slots=True)
class Tally:
    """What a lease got since it was opened, or since its pod was given another name (seconds since boot)."""

    since: float
    counts: dict[Flow, Count] = field(default_factory=dict)


def key_of(lease: Lease) -> LeaseKey:
    """The key of a lease."""
    pod = lease.pod
    uid = pod.uid or f"{pod.namespace}/{pod.name}"
    # Past the generated __new__, here and in `add`: it is called for every counter that moved.
    return tuple.__new__(LeaseKey, (lease.ip, uid, lease.sandbox, lease.opened))


class Tallies:
    """All tallies."""

    def __init__(self, state: TalliesState | None = None) -> None:
        self._tallies = {key: Tally(since, dict(counts)) for key, (since, counts) in (state or {}).items()}

    def __len__(self) -> int:
        return len(self._tallies)

    def add(self, lease: Lease, flow: Flow, count: tuple[int, int]) -> None:
        """Add what was booked to a lease."""
        key = key_of(lease)
        tally = self._tallies.get(key)
        if tally is None:
            tally = self._tallies[key] = Tally(lease.opened)
        old = tally.counts.get(flow, ZERO)
        tally.counts[flow] = tuple.__new__(Count, (old[0] + count[0], old[1] + count[1]))

    def of(self, lease: Lease) -> Tally:
        """What a lease has so far; not to be changed."""
        return self._tallies.get(key_of(lease)) or Tally(lease.opened)

    def take(self, lease: Lease) -> Tally:
        """What a lease got, which is forgotten."""
        return self._tallies.pop(key_of(lease), None) or Tally(lease.opened)

    def follow(self, old: Lease, new: Lease) -> None:
        """A lease goes on under another sandbox id, which no source knew before: so does its tally."""
        tally = self._tallies.pop(key_of(old), None)
        if tally is not None:
            self._tallies[key_of(new)] = tally

    def begin_again(self, lease: Lease, at: float) -> None:
        """What a lease gets from now on belongs to another account than what it got before."""
        self._tallies[key_of(lease)] = Tally(at)

    def state(self) -> TalliesState:
        """Everything, as a value."""
        return {key: (tally.since, dict(tally.counts)) for key, tally in self._tallies.items()}
