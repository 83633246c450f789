"""Follows single files, and tells when one of them has changed: configuration, policy, lists.

What happened to a file is not told, and a change that ends where it began is none: the listener reads the files anyway.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple, TypeAlias

from netacct import log
from netacct.following import Entry, Follower, Pace, entries

QUIET = 0.2
"""Seconds without another sign of a change before it is told: editors and downloads write in several steps."""

QUIET_LIMIT = 2.0
"""Seconds after which it is told although signs go on coming."""

POLL = 30.0
"""Seconds between looks when nothing was signalled: for what inotify cannot see (NFS, a moved ancestor)."""

_COARSE = 0.05
"""Seconds by which the time stamps of files may lag behind the clock: they are taken at timer ticks."""

_Signature: TypeAlias = tuple[int, int, int, int, int] | None


class Mark(NamedTuple):
    """A moment before files are read: Unix time, and what the followed ones looked like."""

    at: float
    seen: Mapping[str, _Signature]


class FileWatch:
    """Calls a function when followed files have changed, come or gone, from `start` and a thread of its own.

    Args:
        changed: gets the paths; what it raises is logged.
        poll: seconds between looks when nothing was signalled.
    """

    def __init__(self, changed: Callable[[frozenset[str]], None], poll: float = POLL) -> None:
        self._changed = changed
        self._lock = threading.Lock()
        self._seen: dict[str, _Signature] = {}
        pace = Pace(poll, QUIET, QUIET_LIMIT)
        self._follower = Follower(self._wanted, self._look, pace, "watch-files", log.get())

    def mark(self) -> Mark:
        """To be taken before files are read that shall be followed. From any thread."""
        at = time.time()
        with self._lock:
            return Mark(at, {path: _signature(path) for path in self._seen})

    def follow(self, paths: Collection[str], mark: Mark) -> None:
        """Follow these files from now on, and no others. From any thread, also before `start`.

        Args:
            paths: of files, which may be missing.
            mark: from before they were read: what has changed since is told.
        """
        with self._lock:
            self._seen = {path: _before(path, mark) for path in map(os.path.abspath, paths)}
        self._follower.wake()

    def start(self) -> None:
        """Tell what has changed since the mark, in this call, then begin to follow, in a thread."""
        self._follower.start()
        self._follower.wake()  # for what was named during that call

    def stop(self) -> None:
        """End the thread and free everything; nothing is told any more once this returned. Idempotent."""
        self._follower.stop()

    def _look(self, _paths: frozenset[str] | None) -> None:
        with self._lock:
            now = {path: _signature(path) for path in self._seen}
            changed = frozenset(path for path, signature in now.items() if signature != self._seen[path])
            self._seen = now
        if changed:
            self._changed(changed)

    def _wanted(self) -> Iterator[Entry]:
        with self._lock:
            paths = tuple(self._seen)
        for path in paths:
            yield from entries(path)


def _before(path: str, mark: Mark) -> _Signature:
    """What the file looked like at the mark; something that no file looks like where it has changed since."""
    if path in mark.seen:
        return mark.seen[path]
    signature = _signature(path)
    young = signature is not None and signature[-1] > (mark.at - _COARSE) * 1e9
    return (-1, -1, -1, -1, -1) if young else signature


def _signature(path: str) -> _Signature:
    """What changes when a file does; None where there is none."""
    try:
        found = os.stat(path)  # noqa: PTH116 -- a plain string
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
