"""Moving a node from one datapath to the other: whose counters those are that the other one left.

Both datapaths have the same counters by the same names, and the ledger knows each by one epoch only. So at a start,
before anything is settled, what the other one left is taken out of the way:

* Its counters go on from the books, or the node has no others: it counted until now. It is unhooked, read, booked and
  stored, and only then destroyed; what is installed next begins new epochs at zero. A kill in between leaves what the
  next start treats alike.
* The books go on with the chosen one and do not know the other: somebody else installed it beside ours, or it is left
  of a time when nobody looked for such. What it counted is booked already, or nobody's: it is destroyed unbooked.
* The books know the other one, and the chosen one is there as well: the same the other way round.

Between unhooking one and hooking the other nothing counts: the gap, which is logged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias

from netacct.accounting.ledger import SetState
from netacct.kernel.base import Datapath
from netacct.model import CounterKey, Snapshot


class OpenDatapath(Datapath, Protocol):
    """A datapath with sockets of its own, to be closed."""

    def close(self) -> None:
        """Close them. What is in the kernel stays."""
        ...


FindOther: TypeAlias = Callable[[], OpenDatapath | None]
"""Opens the datapath that is not the chosen one, where it left anything in the kernel."""


def no_other() -> None:
    """The `FindOther` of a node that never had another datapath."""
    return


def goes_on(known: Mapping[CounterKey, SetState], present: Snapshot) -> bool:
    """Whether books go on with these counters: they know one of them by its epoch."""
    return any(
        (state := known.get(reading.key)) is not None and state.epoch == reading.epoch for reading in present.readings
    )
