"""The source `file`: pods from a file that somebody writes, followed as it changes.

Also the way to account virtual machines or tenants without Kubernetes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import stat
import threading
import time
from collections.abc import Callable, Iterator

from netacct import clock, log, yamlfile
from netacct.errors import ConfigError
from netacct.identity import pods_file
from netacct.identity.inotify import Event, Inotify
from netacct.identity.source import Health, Replace, SourceEvent
from netacct.model import Observation

DEBOUNCE = 0.02
"""Seconds between the first sign of a change and the reading: a rename-over is two or three events."""

POLL = 30.0
"""Seconds between looks when nothing was signalled: for what inotify cannot see (NFS, a moved ancestor)."""

POLL_WITHOUT_INOTIFY = 2.0

_LINKS = 40
"""As many links as the kernel follows (MAXSYMLINKS, linux/namei.h)."""


class FileSource:
    """Reads pods.yaml or .json, and again whenever it changes; each good reading is a `Replace`.

    A missing file is an empty list, and healthy: it is followed until it appears. A file that cannot be read or has
    an error in it changes nothing: the last good list holds, and the source is unhealthy until the file is mended.
    A reading with the same content as the one before is no event.

    Args:
        path: the file.
        poll: seconds between looks when nothing was signalled.
    """

    name = pods_file.SOURCE

    def __init__(self, path: str, poll: float = POLL) -> None:
        self._path, self._poll = os.path.abspath(path), poll  # noqa: PTH100 -- resolve() would follow links
        self._health = Health(up=False, reason="not started")
        self._digest: bytes | None = None
        self._watches: dict[int, tuple[str, set[str]]] = {}
        self._inotify: Inotify | None = None
        self._thread: threading.Thread | None = None
        self._wake = -1
        self._log = log.get(source=self.name, file=path)

    def start(self, emit: Callable[[SourceEvent], None]) -> None:
        """Read the file once, in this call, then follow it in a thread."""
        try:
            self._inotify = Inotify()
        except OSError as error:
            self._poll = min(self._poll, POLL_WITHOUT_INOTIFY)
            self._log.warning("no inotify, polling", error=str(error), interval_seconds=self._poll)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._look(emit)
        self._thread = threading.Thread(target=self._follow, args=(emit,), name="source-file", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread and close what it used."""
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

    def healthy(self) -> Health:
        """Unhealthy, with the error, while the file is not as it should be."""
        return self._health

    def _follow(self, emit: Callable[[SourceEvent], None]) -> None:
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        if self._inotify is not None:
            poller.register(self._inotify.fd, select.POLLIN)
        due = time.monotonic() + self._poll
        while True:
            ready = [fd for fd, _ in poller.poll(max(0.0, due - time.monotonic()) * 1000)]
            if self._wake in ready:
                return
            if ready and not self._signalled():
                continue
            try:
                self._look(emit)
            except Exception as error:  # noqa: BLE001 -- a source that died would go on claiming to be healthy
                self._digest = None
                self._health = Health(up=False, reason=f"{type(error).__name__}: {error}")
                self._log.error("following the pods file failed", exc_info=True)
            due = time.monotonic() + self._poll

    def _signalled(self) -> bool:
        """Whether the queued events can mean a change; waits DEBOUNCE for the rest of it."""
        assert self._inotify is not None
        if not any(self._matters(event) for event in self._inotify.events()):
            return False
        time.sleep(DEBOUNCE)
        self._inotify.events()
        return True

    def _matters(self, event: Event) -> bool:
        """Whether this can be a change of the file: of a name on the way to it, and finished.

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
            return not stat.S_ISREG(os.lstat(os.path.join(directory, event.name)).st_mode)  # noqa: PTH118 -- as below
        except OSError:
            return True

    def _look(self, emit: Callable[[SourceEvent], None]) -> None:
        self._watch()
        at = clock.now()
        try:
            data = self._read()
        except ConfigError as error:
            self._digest = None
            self._refuse(error)
            return
        digest = b"" if data is None else hashlib.sha256(data).digest()
        if digest == self._digest:
            return
        first, self._digest = not self._health.up, digest
        try:
            observations = () if data is None else pods_file.parse(data, self._path, at)
        except ConfigError as error:
            self._refuse(error)
            return
        self._health = Health(up=True)
        # The first reading is news, the hundredth is not: a file that somebody generates changes with every pod.
        tell = self._log.info if first else self._log.debug
        tell("pods read", present=data is not None, addresses=_owned(observations))
        emit(Replace(self.name, observations, at))

    def _refuse(self, error: ConfigError) -> None:
        if self._health.reason != str(error):
            self._log.error("pods file refused, the last good list holds", error=str(error))
        self._health = Health(up=False, reason=str(error))

    def _read(self) -> bytes | None:
        """The content; None where there is no file."""
        try:
            if not stat.S_ISREG(os.stat(self._path).st_mode):  # noqa: PTH116 -- a plain string
                raise ConfigError(self._path, "", "is not a regular file")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise ConfigError(self._path, "", f"cannot be read: {error.strerror}") from error
        try:
            return yamlfile.read(self._path)
        except ConfigError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise

    def _watch(self) -> None:
        """Watch every directory in which a change can change the file; again until none has appeared meanwhile."""
        if self._inotify is None:
            return
        for _ in range(5):
            wanted = set(entries(self._path))
            fresh: dict[int, tuple[str, set[str]]] = {}
            for directory, name in wanted:
                with contextlib.suppress(OSError):  # gone since, or unreadable: the poll sees to it
                    fresh.setdefault(self._inotify.watch(directory), (directory, set()))[1].add(name)
            for number in self._watches.keys() - fresh.keys():
                self._inotify.unwatch(number)
            self._watches = fresh
            if wanted == set(entries(self._path)):
                return


def entries(path: str) -> Iterator[tuple[str, str]]:
    """The entries (directory, name) that decide what the absolute `path` is; each directory exists.

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


def _owned(observations: tuple[Observation, ...]) -> int:
    return sum(observation.present for observation in observations)
