"""`netacct` that records what its books are told, for `replay.py`: python recorder.py RECORD KUBELET ARGUMENT...

It is the whole agent, as configured. Only, every call of its books (what a source says, a reading of the kernel's
counters, a change of leases) goes into the file RECORD as well, in its order. So does what the sources `kubelet` and
`cri` say, which the agent does not ask while a better one is up: they run beside it and are heard by the record only.
KUBELET is JSON, the keyword arguments of `netacct.identity.kubelet.Access`.

The file is a row of pickled tuples, each a `Call`, and for the test that started this program.
"""

from __future__ import annotations

import functools
import json
import pickle
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from netacct import cli, clock
from netacct.books import Books
from netacct.identity.cri import CriSource
from netacct.identity.kubelet import Access, KubeletSource
from netacct.identity.source import Source, SourceEvent

POLL = 4.0
"""Seconds between two questions of a polled source; it takes half to one and a half of that."""

_CALLS = ("note", "take", "settle", "commit")


class Call(NamedTuple):
    """A call of `netacct.books.Books`, and when (CLOCK_BOOTTIME seconds)."""

    at: float
    method: str
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


class _Record:
    """The file. Any thread may write."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._file = path.open("wb")
        self._inside = False

    def write(self, method: str, *arguments: object, **keywords: object) -> None:
        """Append a call."""
        with self._lock:
            pickle.dump(tuple(Call(clock.now(), method, arguments, keywords)), self._file)
            self._file.flush()

    def hear(self, event: SourceEvent) -> None:
        """Append what a source says."""
        self.write("note", event)

    def follow(self, method: str) -> None:
        """Record the calls of a method of the books that do not come from the books themselves: one thread's."""
        real: Callable[..., Any] = getattr(Books, method)

        @functools.wraps(real)
        def recorded(books: Books, *arguments: Any, **keywords: Any) -> Any:
            if self._inside:
                return real(books, *arguments, **keywords)
            self._inside = True
            try:
                self.write(method, *arguments, **keywords)
                return real(books, *arguments, **keywords)
            finally:
                self._inside = False

        setattr(Books, method, recorded)


def _main(path: str, kubelet: str, *arguments: str) -> int:
    record = _Record(Path(path))
    for method in _CALLS:
        record.follow(method)
    beside: list[Source] = [KubeletSource(Access(**json.loads(kubelet)), interval=POLL), CriSource(interval=POLL)]
    for source in beside:
        source.start(record.hear)
    try:
        return cli.main(arguments)
    finally:
        for source in beside:
            source.stop()


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
