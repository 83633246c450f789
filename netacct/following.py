"""Follows files and directories, also such that are not there yet or lie behind links: looks again when they change.

Each follower has a thread, and a share of the process's one inotify instance (inotify_hub.py).
"""

from __future__ import annotations

import errno
import math
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from netacct.inotify import Event
from netacct.inotify_hub import SHARED, Share
from netacct.sleeper import Sleeper, Why

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

POLL_WITHOUT_INOTIFY = 2.0
"""Seconds between looks at everything while no inotify instance, or no watch, is to be had; each look tries again."""

ALL = ""
"""As a name: every file in the directory."""

Entry: TypeAlias = tuple[str, str]
"""A directory, and a name in it (or `ALL`)."""

_EVERYTHING = ""

_LINKS = 40
"""As many links as the kernel follows (MAXSYMLINKS, linux/namei.h)."""


class Pace(NamedTuple):
    """How long a follower waits, in seconds.

    `poll`: between looks at everything when nothing was signalled, for what inotify cannot see (NFS, a moved ancestor)
    or has lost. `quiet`: without another sign of a change before the look. `limit`: from the first sign to the look,
    although signs go on coming.
    """

    poll: float
    quiet: float = 0.0
    limit: float = 0.0


class Follower:
    """Calls a function when something changed in directories.

    Args:
        wanted: gives the entries that matter now. It is asked before each look at everything.
        look: looks at the files of these paths, which came, went, or were written and closed; or at everything (None):
            first, in the call of `start`, later from a thread, whenever a named entry changed, and whenever a directory
            or the queue of events was lost. What it raises is logged.
        pace: how long to wait.
        name: of the thread.
        logger: for what goes wrong.
    """

    def __init__(
        self,
        wanted: Callable[[], Iterable[Entry]],
        look: Callable[[frozenset[str] | None], None],
        pace: Pace,
        name: str,
        logger: FilteringBoundLogger,
    ) -> None:
        self._wanted, self._look, self._log = wanted, look, logger
        self._poll, self._quiet, self._limit = pace
        self._watches: dict[int, tuple[str, set[str]]] = {}
        self._share: Share | None = None
        self._blind = False
        self._again = math.inf
        self._sleeper = Sleeper(name)

    def start(self) -> None:
        """Look at everything once, in this call, then follow it in a thread."""
        self._share = SHARED.share()
        self._try_look(None)
        self._sleeper.start(self._run)

    def wake(self) -> None:
        """Have everything looked at, in the thread, soon. From any thread; without effect where it does not run."""
        self._sleeper.wake()

    def again(self, seconds: float) -> None:
        """From within a look: have everything looked at after so long, where there is no reason to look before."""
        self._again = time.monotonic() + seconds

    def stop(self) -> None:
        """End the thread and free everything; nothing is looked at any more once this returned. Idempotent."""
        self._sleeper.stop()
        if self._share is not None:
            self._share.close()
            self._share = None
        self._watches = {}

    def _run(self) -> None:
        due = self._due()
        while (why := self._sleep(min(due, self._again))) is not Why.STOP:
            files = self._signalled() if why is Why.READABLE else None
            if files is None or files:
                self._again = math.inf
                self._try_look(files)
            if files is None:
                due = self._due()

    def _due(self) -> float:
        return time.monotonic() + (min(self._poll, POLL_WITHOUT_INOTIFY) if self._blind else self._poll)

    def _sleep(self, until: float) -> Why:
        assert self._share is not None
        return self._sleeper.sleep(until - time.monotonic(), self._share.fd)

    def _signalled(self) -> frozenset[str] | None:
        """The files that the queued events are about, and those that come until it is quiet; None for everything."""
        found = self._signs()
        begin = time.monotonic()
        end = begin + self._quiet
        while found and time.monotonic() < end:
            why = self._sleep(end)
            if why in {Why.STOP, Why.WOKEN}:
                return frozenset() if why is Why.STOP else None
            more = self._signs() if why is Why.READABLE else set()
            if more:
                found |= more
                end = min(time.monotonic() + self._quiet, begin + self._limit)
        return None if _EVERYTHING in found else frozenset(found)

    def _signs(self) -> set[str]:
        """The paths of the files that the queued events are about; _EVERYTHING for any other change."""
        assert self._share is not None
        found: set[str] = set()
        for event in self._share.events():
            directory, names = self._watches.get(event.watch, ("", set()))
            if not directory:
                if event.watch < 0:  # an overflow; any other is a watch that was given up
                    found.add(_EVERYTHING)
            elif not event.name:
                found.add(_EVERYTHING)
            elif (event.name in names or ALL in names) and not _being_written(directory, event):
                found.add(_EVERYTHING if event.name in names else os.path.join(directory, event.name))  # noqa: PTH118 -- plain strings
        return found

    def _try_look(self, files: frozenset[str] | None) -> None:
        try:
            if files is None:
                self._watch()
            self._look(files)
        except Exception:  # noqa: BLE001 -- a follower that died would go unnoticed
            self._log.exception("following failed")

    def _watch(self) -> None:
        """Watch every directory in which a change matters; again until none has appeared meanwhile."""
        assert self._share is not None
        self._blind = not self._share.ready()
        if self._blind:
            return
        for _ in range(5):
            wanted = dict.fromkeys(self._wanted())
            fresh = self._watch_all(wanted, self._share)
            for number in self._watches.keys() - fresh.keys():
                self._share.unwatch(number)
            self._watches = fresh
            if wanted == dict.fromkeys(self._wanted()):
                return

    def _watch_all(self, wanted: Iterable[Entry], share: Share) -> dict[int, tuple[str, set[str]]]:
        found: dict[int, tuple[str, set[str]]] = {}
        for directory, name in wanted:
            try:
                found.setdefault(share.watch(directory), (directory, set()))[1].add(name)
            except OSError as error:  # missing, or gone since, or unreadable: the poll sees to it
                self._blind |= error.errno == errno.ENOSPC
        return found


def entries(path: str) -> Iterator[Entry]:
    """The entries that decide what the absolute `path` is; each directory exists.

    These are the file itself, or, where its directory is missing, the first part of the path that is; and each link on
    the way, also to a directory.
    """
    for _ in range(_LINKS):
        parent, name = os.path.split(path)
        while parent != "/" and not os.path.isdir(parent):  # noqa: PTH112 -- a Path cannot keep `..` behind a link
            parent, name = os.path.split(parent)
        yield parent, name
        while parent != "/":
            above, name = os.path.split(parent)
            if os.path.islink(parent):  # noqa: PTH114 -- as above
                yield above, name
            parent = above
        try:
            path = os.path.join(os.path.dirname(path), os.readlink(path))  # noqa: PTH115, PTH118, PTH120 -- as above
        except OSError:
            return


def contents(directories: Sequence[str]) -> Iterator[Entry]:
    """The entries that decide which files are in `directories` (absolute paths), and what is in those.

    A missing directory is not among them: that it is when asked again tells that it came while others were watched.
    """
    for directory in directories:
        if os.path.isdir(directory):  # noqa: PTH112 -- as above
            yield directory, ALL
    for directory in directories:
        yield from entries(directory)


def _being_written(directory: str, event: Event) -> bool:
    """Whether this is only the birth of a regular file: its writer fills it now, and closing it comes as well."""
    if not event.created:
        return False
    try:
        return stat.S_ISREG(os.lstat(os.path.join(directory, event.name)).st_mode)  # noqa: PTH118 -- plain strings
    except OSError:
        return False
