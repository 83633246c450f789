"""When the leases of an address meet an interval between two readings, and how much of it they had. Pure.

All times are seconds since boot; an interval is (start, end].
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from netacct.model import UNBOUNDED, Address, Lease

Interval: TypeAlias = tuple[float, float]

Tenures: TypeAlias = Mapping[Address, Sequence[Lease]]
"""The leases of each address, the newest last."""


def age(lease: Lease) -> tuple[float, float, float, str]:
    """Sorts the newest last; a total order, so that nothing hangs on the order in which leases are handed in."""
    return (lease.created, lease.opened, math.inf if lease.closed is None else lease.closed, lease.sandbox)


def begin(lease: Lease) -> float:
    """When the pod may have sent its first byte. Clocks of files and runtimes are not ours, so never after `opened`."""
    return lease.opened if lease.created == UNBOUNDED else min(lease.created, lease.opened)


def share(lease: Lease, interval: Interval) -> float:
    """How many seconds of an interval a lease had."""
    start, end = interval
    closed = end if lease.closed is None else min(lease.closed, end)
    return closed - max(begin(lease), start)


def closed_by(lease: Lease, time: float) -> bool:
    """Whether a lease had closed at a time."""
    return lease.closed is not None and lease.closed <= time


def meets(lease: Lease, interval: Interval) -> bool:
    """Whether a lease had any part of an interval."""
    return begin(lease) < interval[1] and not closed_by(lease, interval[0])
