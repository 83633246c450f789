"""From a lease that closed to a line in a file: exactly once, whatever dies on the way.

A closed lease waits until nothing more can be booked to it (mostly not at all: until the counters, read before it
closed, are settled), and until somebody has told its owner, though not for ever. Then its tally becomes a record, which
waits to be stored with the next checkpoint and is written to the file only after that. So a process killed before the
checkpoint makes the record again, from the same tally; one killed after it finds the record in the checkpoint and
writes it unless the file has it.

Leases that last when the machine reboots, or the state is lost, leave what `keep_open` wrote of them last: the next
life, which begins at 0, makes interrupted accounts of that. Worker thread only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from netacct.accounting.accounts import Account, Origin, State, account, encode
from netacct.accounting.accounts_file import AccountsFile
from netacct.accounting.ledger import Ledger
from netacct.accounting.tallies import Tallies, Tally
from netacct.model import Lease

MOST_UNWRITTEN = 2000
"""So many records wait for a file that cannot be written; then the oldest are lost."""


@dataclass(frozen=True, slots=True)
class ClosingState:
    """What must outlive the process: leases that closed but may still get bytes, and records not yet in the file."""

    leases: tuple[Lease, ...] = ()
    lines: tuple[str, ...] = ()


class Closing:
    """The way out of the books.

    Args:
        file: where records go.
        origin: what they say of node and boot.
        to_wall: Unix seconds of a time in seconds since boot.
        state: of an earlier life in this boot; None where there is none, so that what was open then is interrupted.
        patience: for so many seconds after its end, a lease without an owner waits for one.

    Attributes:
        lost: how many records were lost, because their file could not be written for too long.
    """

    def __init__(
        self,
        file: AccountsFile,
        origin: Origin,
        to_wall: Callable[[float], float],
        state: ClosingState | None,
        patience: float = 0.0,
    ) -> None:
        self._patience = patience
        self._file, self._origin, self._to_wall = file, origin, to_wall
        self._leases: list[Lease] = list(state.leases if state else ())
        self._lines: list[str] = list(state.lines if state else ())
        self.lost = 0

    def interrupt(self) -> None:
        """Make accounts of the leases that lasted when an earlier life lost its state. Raises OSError."""
        found = self._file.read_open()
        self._add(dataclasses.replace(record, state=State.INTERRUPTED) for record in found)

    def end(self) -> None:
        """Let others write to the files; what waits is in `state()`."""
        self._file.close()

    def close(self, lease: Lease) -> None:
        """Take a lease that has closed; settle once more with it, then `finish`."""
        self._leases.append(lease)

    def rename(self, old: Lease, new: Lease, at: float, tallies: Tallies) -> None:
        """A lease changed at `at`. One of another pod's name is two accounts: each name's sums must hold.

        One that has closed got its owner late.
        """
        self._leases = [new if lease == old else lease for lease in self._leases]
        if (old.pod.namespace, old.pod.name) != (new.pod.namespace, new.pod.name):
            self._record(old, tallies.take(old), at)
            tallies.begin_again(new, at)
        else:
            tallies.follow(old, new)

    def finish(self, ledger: Ledger, settled: Collection[Lease]) -> None:
        """Make records of the closed leases that can get no more, after a settlement with the leases `settled`.

        That is when every counter is settled up to their end, or when the books have forgotten the lease; and not
        before its owner is known, or nobody tells.
        """
        waiting = []
        remembered = set(settled) if self._leases else set()
        for lease in self._leases:
            assert lease.closed is not None
            is_nameless = not lease.pod.workload and ledger.at < lease.closed + self._patience
            if is_nameless or (lease.closed > ledger.since and lease in remembered):
                waiting.append(lease)
            else:
                self._record(lease, ledger.tallies.take(lease), lease.closed)
        self._leases = waiting

    def state(self) -> ClosingState:
        """Everything, as a value."""
        return ClosingState(tuple(self._leases), tuple(self._lines))

    def write(self) -> None:
        """Write what waits, once a checkpoint with this `state()` is stored. Raises OSError; then it waits on."""
        if self._lines:
            self._file.append(self._lines)
            self._lines.clear()

    def keep_open(self, leases: Iterable[Lease], tallies: Tallies, at: float) -> None:
        """Write what the leases that last have at `at`, for readers and for the next boot. Raises OSError."""
        ends = [(lease, at if lease.closed is None else lease.closed) for lease in (*leases, *self._leases)]
        self._file.write_open([encode(self._account(lease, tallies.of(lease), end, State.OPEN)) for lease, end in ends])

    def _record(self, lease: Lease, tally: Tally, end: float) -> None:
        self._add([self._account(lease, tally, end, State.CLOSED)])

    def _account(self, lease: Lease, tally: Tally, end: float, state: State) -> Account:
        return account(lease, tally, end, state, self._origin, self._to_wall)

    def _add(self, records: Iterable[Account]) -> None:
        self._lines += map(encode, records)
        excess = len(self._lines) - MOST_UNWRITTEN
        if excess > 0:
            del self._lines[:excess]
            self.lost += excess
