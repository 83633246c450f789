"""Reading accounts back: each once, chosen, summed. Needs no agent, and may run while one writes."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from netacct.accounting.accounts import Account, State
from netacct.accounting.accounts_file import NAME, OPEN_NAME, records
from netacct.accounting.series import Flow
from netacct.model import ZERO, Count

ATTEMPTS = 10
"""So often the files may rotate away while they are being opened."""

Warn = Callable[[str], None]

GROUPS: Mapping[str, tuple[str, ...]] = {
    "namespace": ("namespace",),
    "workload": ("namespace", "workload_kind", "workload"),
    "pod": ("namespace", "pod", "uid"),
}
"""What accounts can be summed by: the fields whose values they share."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which accounts: "" and () stand for any. Times are Unix seconds; a lease that lasted into them is chosen whole.

    `traffic`: of the chosen ones, only the counts of these classes.
    """

    namespace: str = ""
    workload_kind: str = ""
    workload: str = ""
    pod: str = ""
    labels: tuple[tuple[str, str], ...] = ()
    since: float = float("-inf")
    until: float = float("inf")
    traffic: tuple[str, ...] = ()

    def takes(self, record: Account) -> bool:
        """Whether this account is chosen."""
        return (
            self.namespace in ("", record.namespace)
            and self.workload_kind.lower() in ("", record.workload_kind.lower())
            and self.workload in ("", record.workload)
            and self.pod in ("", record.pod)
            and all(record.labels.get(name) == value for name, value in self.labels)
            and record.end >= self.since
            and record.start < self.until
        )

    def counts(self, record: Account) -> Mapping[Flow, Count]:
        """The counts that are chosen of an account."""
        return {flow: count for flow, count in record.counts.items() if not self.traffic or flow[1] in self.traffic}


@dataclass(slots=True)
class Sum:
    """Accounts that share something, together: from the first start to the last end (Unix seconds).

    `incomplete` of the `leases` are not closed: interrupted, or open still.
    """

    start: float
    end: float
    leases: int = 0
    incomplete: int = 0
    counts: dict[Flow, Count] = field(default_factory=dict)

    def add(self, record: Account, counts: Mapping[Flow, Count]) -> None:
        """Add one account, with these counts of it."""
        self.start, self.end = min(self.start, record.start), max(self.end, record.end)
        self.leases += 1
        self.incomplete += record.state is not State.CLOSED
        for flow, count in counts.items():
            self.counts[flow] = self.counts.get(flow, ZERO).plus(count)


def sums(accounts: Iterable[Account], by: str, selection: Selection) -> dict[tuple[str, ...], Sum]:
    """The sums of the accounts that `selection` takes, by the values of the fields `GROUPS[by]`, sorted."""
    found: dict[tuple[str, ...], Sum] = {}
    for record in accounts:
        if selection.takes(record):
            name = tuple(str(getattr(record, name)) for name in GROUPS[by])
            found.setdefault(name, Sum(record.start, record.end)).add(record, selection.counts(record))
    return dict(sorted(found.items()))


def read_directory(directory: Path, warn: Warn, *, with_open: bool = False) -> Iterator[Account]:
    """Every account of a directory, once, in the order in which they closed; then, if asked for, those of open leases.

    Raises OSError where it cannot be read. `warn` is told in words about lines that are no records.
    """
    with contextlib.ExitStack() as stack:
        # The open ones first: what closes in between is then in both, and counts once, instead of in neither.
        still: list[IO[bytes]] = []
        if with_open:
            with contextlib.suppress(FileNotFoundError):
                still.append(stack.enter_context((directory / OPEN_NAME).open("rb")))
        yield from _once([*_open_all(directory, stack), *still], warn)


def read_files(paths: Iterable[Path], warn: Warn) -> Iterator[Account]:
    """Every account of these files, once: of several records with one id, the first counts. Raises OSError."""
    with contextlib.ExitStack() as stack:
        yield from _once([stack.enter_context(path.open("rb")) for path in paths], warn)


def _open_all(directory: Path, stack: contextlib.ExitStack) -> list[IO[bytes]]:
    """The files of closed leases, oldest first, opened while none of them moved."""
    for _ in range(ATTEMPTS):
        with contextlib.ExitStack() as attempt, contextlib.suppress(FileNotFoundError):
            paths = _files_of(directory)
            files: list[IO[bytes]] = [attempt.enter_context(path.open("rb")) for path in paths]
            if [path.stat().st_ino for path in _files_of(directory)] == [_inode(file) for file in files]:
                stack.enter_context(attempt.pop_all())
                return files
    raise OSError(f"{directory}: the files rotate faster than they can be opened")


def _files_of(directory: Path) -> list[Path]:
    pattern = re.compile(re.escape(NAME) + r"(?:\.(\d{1,4}))?")
    found = [(int(match[1] or 0), path) for path in directory.iterdir() if (match := pattern.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def _inode(file: IO[bytes]) -> int:
    return os.fstat(file.fileno()).st_ino


def _once(files: Iterable[IO[bytes]], warn: Warn) -> Iterator[Account]:
    seen: set[str] = set()
    for file in files:
        bad: list[int] = []
        for record in records(file, bad):
            if record.id not in seen:
                seen.add(record.id)
                yield record
        if bad:
            lines = "1 line that is no account" if len(bad) == 1 else f"{len(bad)} lines that are no accounts"
            warn(f"{file.name}: skipped {lines}, the first is line {bad[0]}")
