"""Follows single files, and tells when one of them has changed: configuration, policy, lists.

What happened to a file is not told, and a change that ends where it began is none: the listener reads the files anyway.
"""

from __future__ import annotations

import contextlib
import os
import select
import stat
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple, TypeAlias

from netacct import log
from netacct.identity.file import entries
from netacct.identity.inotify import Event, Inotify

QUIET = 0.2
"""Seconds without another sign of a change before it is told: editors and downloads write in several steps."""

QUIET_LIMIT = 2.0
"""Seconds after which it is told although signs go on coming."""

POLL = 30.0
"""Seconds between looks when nothing was signalled: for what inotify cannot see (NFS, a moved ancestor)."""

POLL_WITHOUT_INOTIFY = 2.0

_COARSE = 0.05
"""Seconds by which the time stamps of files may lag behind the clock: they are taken at timer ticks."""

_Signature: TypeAlias = tuple[int, int, int, int, int] | None


class Mark(NamedTuple):
    """A moment before files are read: Unix time, and what the followed ones looked like."""

    at: float
    seen: Mapping[str, _Signature]


class FileWatch:
    """Calls a function when followed files have changed, come or gone, from a thread of its own.

    Args:
        changed: gets the paths; what it raises is logged.
        poll: seconds between looks when nothing was signalled.
    """

    def __init__(self, changed: Callable[[frozenset[str]], None], poll: float = POLL) -> None:
        self._changed, self._poll = changed, poll
        self._lock = threading.Lock()
        self._seen: dict[str, _Signature] = {}
        self._watches: dict[int, tuple[str, set[str]]] = {}
        self._inotify: Inotify | None = None
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._wake = -1
        self._log = log.get()

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
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def start(self) -> None:
        """Begin to follow, in a thread."""
        try:
            self._inotify = Inotify()
        except OSError as error:
            self._poll = min(self._poll, POLL_WITHOUT_INOTIFY)
            self._log.warning("no inotify, polling", error=str(error), interval_seconds=self._poll)
        self._stopping = False
        with self._lock:
            self._wake = os.eventfd(1, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="watch-files", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread and free everything; nothing is told any more once this returned. Idempotent."""
        if self._thread is None:
            return
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._thread = None
        with self._lock:
            os.close(self._wake)
            self._wake = -1
        if self._inotify is not None:
            self._inotify.close()
            self._inotify = None
        self._watches = {}

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        if self._inotify is not None:
            poller.register(self._inotify.fd, select.POLLIN)
        due = time.monotonic() + self._poll
        while True:
            ready = [fd for fd, _ in poller.poll(max(0.0, due - time.monotonic()) * 1000)]
            if self._wake in ready:
                os.eventfd_read(self._wake)
            if self._stopping:
                return
            if ready and self._wake not in ready and not self._signalled(poller):
                continue
            try:
                self._look()
            except Exception:  # noqa: BLE001 -- a watch that died would go unnoticed
                self._log.exception("following files failed")
            due = time.monotonic() + self._poll

    def _signalled(self, poller: select.poll) -> bool:
        """Whether the queued events can mean a change of a followed file; then waits until it is quiet."""
        assert self._inotify is not None
        if not any(self._matters(event) for event in self._inotify.events()):
            return False
        limit = time.monotonic() + QUIET_LIMIT
        while time.monotonic() < limit and not self._stopping:
            ready = [fd for fd, _ in poller.poll(QUIET * 1000)]
            if not ready or self._wake in ready:
                break
            if not any(self._matters(event) for event in self._inotify.events()):
                break
        return True

    def _matters(self, event: Event) -> bool:
        """Whether this is about a name on the way to a followed file, and finished.

        A regular file that was just made is not: its writer fills it now, and closing it will be an event too.
        """
        directory, names = self._watches.get(event.watch, ("", set()))
        if not event.name or not directory:
            return True
        if event.name not in names:
            return False
        if not event.created:
            return True
        try:
            return not stat.S_ISREG(os.lstat(os.path.join(directory, event.name)).st_mode)  # noqa: PTH118 -- plain strings
        except OSError:
            return True

    def _look(self) -> None:
        self._watch()
        with self._lock:
            now = {path: _signature(path) for path in self._seen}
            changed = frozenset(path for path, signature in now.items() if signature != self._seen[path])
            self._seen = now
        if changed:
            self._changed(changed)

    def _watch(self) -> None:
        """Watch every directory in which a change can change a file; again until none has appeared meanwhile."""
        if self._inotify is None:
            return
        for _ in range(5):
            wanted = self._wanted()
            fresh: dict[int, tuple[str, set[str]]] = {}
            for directory, name in wanted:
                with contextlib.suppress(OSError):  # gone since, or unreadable: the poll sees to it
                    fresh.setdefault(self._inotify.watch(directory), (directory, set()))[1].add(name)
            for number in self._watches.keys() - fresh.keys():
                self._inotify.unwatch(number)
            self._watches = fresh
            if wanted == self._wanted():
                return

    def _wanted(self) -> set[tuple[str, str]]:
        with self._lock:
            paths = tuple(self._seen)
        return {entry for path in paths for entry in entries(path)}


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
