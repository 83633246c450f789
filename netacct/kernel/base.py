"""The contract between the agent and a datapath."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from netacct.kernel.plan import Plan
from netacct.model import Address, Snapshot


class Datapath(Protocol):
    """Installs, verifies, reads and removes the counters of one network namespace.

    All methods are idempotent. One writer at a time: the agent's worker thread is the only caller. Whatever drops a
    counter returns its last value in a Snapshot, which the caller settles before it forgets anything. Errors are
    `DatapathError`s; after one, the kernel holds the old state or the new one and calling again is safe.
    """

    name: str

    def install(self, plan: Plan) -> Snapshot:
        """Bring the kernel to `plan`, over nothing or over any older plan, keeping every counter that both have.

        A retired class is unhooked, then read, then its sets destroyed; the Snapshot holds those last values (and is
        empty where nothing was dropped). Sets that an earlier agent left are adopted with their epochs.
        """
        ...

    def verify(self) -> list[str]:
        """Each difference between the kernel and the installed plan, in words; empty when in sync. Writes nothing."""
        ...

    def read(self) -> Snapshot:
        """All counters of the installed plan. Never writes and never takes the xtables lock."""
        ...

    def add(self, ips: Iterable[Address]) -> None:
        """Make sure that these local addresses have counters; existing ones keep their values."""
        ...

    def discard(self, ips: Iterable[Address]) -> Snapshot:
        """Drop the counters of these addresses and return their last values. Prefilled addresses are left alone."""
        ...

    def remove(self) -> Snapshot:
        """Unhook, read, and destroy everything of ours in this namespace; the Snapshot has the last values."""
        ...
