"""The contract between the agent and a datapath."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, TypeAlias

from netacct.kernel.plan import Plan
from netacct.kernel.position import Position
from netacct.model import Address, Snapshot

Keep: TypeAlias = Callable[[Snapshot], None]
"""Called with the last values of counters that count no more, before they are destroyed: settle and store them."""


def keep_nothing(snapshot: Snapshot) -> None:
    """The `Keep` of a caller who has no books."""


class Datapath(Protocol):
    """Installs, verifies, reads and removes the counters of one network namespace.

    All methods are idempotent. One writer at a time: the agent's worker thread is the only caller. Whatever drops a
    counter first makes sure that it counts no more, then reads it, hands the Snapshot to `keep`, and only when that has
    returned destroys it (docs/adr/0005); the same Snapshot is returned, empty where nothing was dropped. Errors are
    `DatapathError`s; after one, the kernel holds the old state or the new one and calling again is safe.
    """

    name: str
    position: Position
    """Whose rules stand before ours, and what was done about it, where the kernel side has such a thing as an order."""

    def install(self, plan: Plan, keep: Keep = keep_nothing) -> Snapshot:
        """Bring the kernel to `plan`, over nothing or over any older plan, keeping every counter that both have.

        Rules that others put before ours are overtaken when it is time for that, by what `position` remembers.

        Sets that an earlier agent left are adopted with their epochs, and leftovers that nothing refers to are dropped
        like a retired class: unhooked, read, kept, destroyed.
        """
        ...

    def adopt(self, plan: Plan) -> None:
        """Take a plan as installed without writing anything, so that `verify` and `read` can tell how it is."""
        ...

    def verify(self) -> list[str]:
        """Each difference that `install` would mend between the kernel and the installed plan, in words.

        Empty when in sync. Writes nothing. What our rules stay behind for now is in `position.shadows()` instead.
        """
        ...

    def read(self) -> Snapshot:
        """All counters of the installed plan. Never writes and never takes the xtables lock."""
        ...

    def add(self, ips: Iterable[Address]) -> None:
        """Make sure that these local addresses have counters; existing ones keep their values."""
        ...

    def discard(self, ips: Iterable[Address], keep: Keep = keep_nothing) -> Snapshot:
        """Drop the counters of these addresses. Prefilled addresses are left alone."""
        ...

    def remove(self, keep: Keep = keep_nothing) -> Snapshot:
        """Unhook, read, keep and destroy everything of ours in this namespace, whoever installed it."""
        ...
