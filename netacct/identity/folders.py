"""Follows directories, also such that are not there yet, and tells which of their files have changed."""

from __future__ import annotations

import contextlib
import os
import select
import stat
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from netacct import log
from netacct.identity.file import entries
from netacct.identity.inotify import Event, Inotify

POLL = 60.0
"""Seconds between looks at everything when nothing was signalled: for what inotify cannot see or has lost."""

POLL_WITHOUT_INOTIFY = 2.0


@dataclass(slots=True)
class _Watch:
    """What matters in one watched directory: `all` of its files, or the `names` that lead to a followed one."""

    directory: str
    all: bool = False
    names: set[str] = field(default_factory=set)


class Folders:
    """Calls a function when files in directories change, from one thread.

    Args:
        directories: absolute paths; each may be missing, come, go, be renamed or be reached through links.
        changed: gets the paths of files that came, went, or were written and closed; None for "look at everything",
            which it is told first, in the call of `start`, and whenever a directory or the queue of events was lost.
            What it raises is logged.
        name: of the thread, and of the log's lines.
        poll: seconds between looks at everything when nothing was signalled.
    """

    def __init__(
        self,
        directories: Sequence[str],
        changed: Callable[[frozenset[str] | None], None],
        name: str,
        poll: float = POLL,
    ) -> None:
        self._directories, self._changed, self._poll = tuple(directories), changed, poll
        self._watches: dict[int, _Watch] = {}
        self._inotify: Inotify | None = None
        self._thread: threading.Thread | None = None
        self._wake = -1
        self._name = name
        self._log = log.get(source=name)

    def start(self) -> None:
        """Look at everything once, in this call, then follow it in a thread."""
        try:
            self._inotify = Inotify()
        except OSError as error:
            self._poll = min(self._poll, POLL_WITHOUT_INOTIFY)
            self._log.warning("no inotify, polling", error=str(error), interval_seconds=self._poll)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._look(None)
        self._thread = threading.Thread(target=self._follow, name=f"source-{self._name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread and free everything; `changed` is not called any more once this returned. Idempotent."""
        if self._thread is None:
            return
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._thread = None
        os.close(self._wake)
        if self._inotify is not None:
            self._inotify.close()
            self._inotify = None
        self._watches = {}

    def _follow(self) -> None:
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        if self._inotify is not None:
            poller.register(self._inotify.fd, select.POLLIN)
        due = time.monotonic() + self._poll
        while True:
            ready = [fd for fd, _ in poller.poll(max(0.0, due - time.monotonic()) * 1000)]
            if self._wake in ready:
                return
            files = self._signalled() if ready else None
            if files is None:
                due = time.monotonic() + self._poll
            if files is None or files:
                self._look(files)

    def _signalled(self) -> frozenset[str] | None:
        """The files that the queued events are about; None for everything."""
        assert self._inotify is not None
        files: set[str] = set()
        everything = False
        for event in self._inotify.events():
            watch = self._watches.get(event.watch)
            if watch is None:
                everything = everything or event.watch < 0  # an overflow; any other is a watch that was given up
            elif not event.name or event.name in watch.names:
                everything = True
            elif watch.all and not self._being_written(watch, event):
                files.add(os.path.join(watch.directory, event.name))  # noqa: PTH118 -- plain strings all through
        return None if everything else frozenset(files)

    def _being_written(self, watch: _Watch, event: Event) -> bool:
        """Whether this is only the birth of a regular file: its writer fills it now, and closing it comes as well."""
        if not event.created:
            return False
        try:
            return stat.S_ISREG(os.lstat(os.path.join(watch.directory, event.name)).st_mode)  # noqa: PTH118 -- as above
        except OSError:
            return False

    def _look(self, files: frozenset[str] | None) -> None:
        if files is None:
            self._watch()
        try:
            self._changed(files)
        except Exception:  # noqa: BLE001 -- a follower that died would go unnoticed
            self._log.exception("following the directories failed")

    def _watch(self) -> None:
        """Watch every directory that matters; again until none has appeared meanwhile."""
        if self._inotify is None:
            return
        for _ in range(5):
            wanted = self._wanted()
            fresh: dict[int, _Watch] = {}
            for watch in wanted:
                with contextlib.suppress(OSError):  # missing, or gone since, or unreadable: the poll sees to it
                    number = self._inotify.watch(watch.directory)
                    known = fresh.setdefault(number, watch)
                    known.all = known.all or watch.all
                    known.names |= watch.names
            for number in self._watches.keys() - fresh.keys():
                self._inotify.unwatch(number)
            self._watches = fresh
            if wanted == self._wanted():
                return

    def _wanted(self) -> list[_Watch]:
        found = [_Watch(directory, all=True) for directory in self._directories]
        for path in self._directories:
            found += [_Watch(directory, names={name}) for directory, name in entries(path)]
        return found
