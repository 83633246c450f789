"""The source `cni`: which pod got which address, from the files in which libcni remembers what plugins answered.

Whoever runs pods by CNI (containerd, CRI-O) writes such a file before a pod's containers start, and removes it after
the pod's addresses were given back. So this is the earliest source that knows names, and it needs nobody's permission
but root's. What it does not know is a pod's owner and labels.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from netacct import clock, log, plainfile
from netacct.following import Follower, Pace, contents
from netacct.identity import cni_cache
from netacct.identity.claims import uid_of
from netacct.identity.source import Health, Replace, SourceEvent, Update
from netacct.identity.stamp import Stamp, stamp_of
from netacct.model import UNBOUNDED, Address, Observation

POLL = 60.0
"""Seconds between looks at everything when nothing was signalled."""


class _File(NamedTuple):
    """What was found in a file; `stamp` tells whether it is still the same."""

    stamp: Stamp
    netns: str
    observations: tuple[Observation, ...]


_Told = dict[tuple[Address, str, str], Observation]


class CniSource:
    """Follows libcni's result cache; the first reading is a `Replace`, each change an `Update`.

    `created` of an observation is when its file was written. A directory that is missing is an empty one, and healthy:
    it is followed until it appears. A file that cannot be understood tells nothing and takes nothing back; the log
    names it once. A file is no longer believed when its sandbox's network namespace is gone (a DEL that failed), or
    when it was written before this boot.

    Args:
        directories: where runtimes keep the cache.
        rescan: seconds between looks at everything when nothing was signalled.
    """

    name = cni_cache.SOURCE

    def __init__(self, directories: Sequence[str] = cni_cache.DIRECTORIES, rescan: float = POLL) -> None:
        self._directories = tuple(directories)
        self._emit: Callable[[SourceEvent], None]
        self._files: dict[str, _File] = {}
        self._told: _Told | None = None
        self._complained: dict[str, Stamp] = {}
        self._health = Health(up=False, reason="not started")
        self._silent = False
        self._log = log.get(source=self.name)
        self._follower = Follower(
            lambda: contents(self._directories), self._changed, Pace(rescan), f"source-{self.name}", self._log
        )

    def read(self) -> tuple[Observation, ...]:
        """What the files say now, for who does not want to follow them: instead of `start`, and without a log."""
        said: list[SourceEvent] = []
        self._emit, self._silent = said.append, True
        self._changed(None)
        return said[0].observations

    def start(self, emit: Callable[[SourceEvent], None]) -> None:
        """Read all files once, in this call, then follow them in a thread."""
        self._emit = emit
        self._follower.start()
        self._log.info("CNI results read", files=len(self._files), addresses=len(self._told or ()))

    def stop(self) -> None:
        """End the thread and free everything."""
        self._follower.stop()

    def healthy(self) -> Health:
        """Unhealthy, with the error, while a directory that exists cannot be read."""
        return self._health

    def _changed(self, paths: frozenset[str] | None) -> None:
        try:
            if paths is None:
                self._scan()
            for path in sorted(paths or ()):
                self._look(path)
            self._tell()
        except Exception as error:
            self._health = Health(up=False, reason=f"{type(error).__name__}: {error}")
            raise

    def _scan(self) -> None:
        """Look at every file, and forget those that are gone."""
        found: set[str] = set()
        trouble = ""
        seen: set[tuple[int, int]] = set()
        for directory in self._directories:
            try:
                status = os.stat(directory)  # noqa: PTH116 -- plain strings all through: there may be thousands
                if (status.st_dev, status.st_ino) in seen:
                    continue  # the same directory by another name
                seen.add((status.st_dev, status.st_ino))
                names = os.listdir(directory)  # noqa: PTH208 -- as above
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                trouble = f"{directory} cannot be read: {error.strerror}"
                found |= {path for path in self._files if os.path.dirname(path) == directory}  # noqa: PTH120 -- as above
                continue
            found |= {os.path.join(directory, name) for name in names}  # noqa: PTH118 -- as above
        for path in (self._files.keys() | self._complained.keys()) - found:
            self._forget(path)
        for path in sorted(found):
            self._look(path)
        if trouble and trouble != self._health.reason and not self._silent:
            self._log.error("CNI results cannot be read, what is known of them holds", error=trouble)
        self._health = Health(up=not trouble, reason=trouble)

    def _look(self, path: str) -> None:
        """Bring what is known of one file up to date."""
        if cni_cache.is_loopback(path):
            return
        try:
            status = os.stat(path)  # noqa: PTH116 -- as above
        except FileNotFoundError:
            self._forget(path)
            return
        except OSError as error:
            self._complain(path, (0, 0, 0), f"cannot be read: {error.strerror}")
            return
        stamp = stamp_of(status)
        known = self._files.get(path)
        if known is not None and known.stamp == stamp:
            if known.observations and _is_gone(known.netns):
                self._files[path] = known._replace(observations=())
            return
        if not stat.S_ISREG(status.st_mode):
            return
        try:
            self._files[path] = self._read(path, stamp)
        except FileNotFoundError:
            self._forget(path)
        except OSError as error:
            self._complain(path, stamp, f"cannot be read: {error.strerror}")
        except ValueError as error:
            self._complain(path, stamp, str(error))

    def _read(self, path: str, stamp: Stamp) -> _File:
        """Raises OSError, and ValueError where this is no whole cache file."""
        with open(path, "rb", opener=plainfile.opener) as file:
            data = file.read(cni_cache.SIZE_LIMIT + 1)
            stamp = stamp_of(os.fstat(file.fileno()))  # of what was read: it may have grown since we asked
        if len(data) > cni_cache.SIZE_LIMIT:
            raise ValueError(f"has more than {cni_cache.SIZE_LIMIT} bytes")
        found = cni_cache.decode(data)
        self._complained.pop(path, None)
        now = clock.now()
        created = clock.from_wall(stamp[0] / 1e9)
        if found is None:
            return _File(stamp, "", ())
        if _is_gone(found.netns):
            return _File(stamp, found.netns, ())
        if created < 0:  # before this boot, or before somebody set the clock
            created = UNBOUNDED
            if not _is_there(found.netns):
                return _File(stamp, "", ())
        return _File(stamp, found.netns, found.observations(min(created, now), now))

    def _forget(self, path: str) -> None:
        self._files.pop(path, None)
        self._complained.pop(path, None)

    def _complain(self, path: str, stamp: Stamp, why: str) -> None:
        """Log what is wrong with a file, once as long as it stays the same; what was known of it holds."""
        if self._complained.get(path) != stamp and not self._silent:
            self._complained[path] = stamp
            self._log.warning("a CNI result is not understood, ignoring it", file=path, why=why)

    def _tell(self) -> None:
        """Emit what differs from what was told before."""
        now: _Told = {}
        for file in self._files.values():
            for seen in file.observations:
                key = (seen.ip, uid_of(seen.pod), seen.sandbox)
                now[key] = max(now.get(key, seen), seen, key=lambda each: each.created)
        before, self._told = self._told, now
        at = clock.now()
        if before is None:
            self._emit(Replace(self.name, tuple(now.values()), at))
            return
        gone = [replace(seen, present=False, seen_at=at) for key, seen in before.items() if key not in now]
        new = [seen for key, seen in now.items() if before.get(key) != seen]
        if gone or new:
            self._emit(Update(self.name, (*gone, *new)))


def _is_there(netns: str) -> bool:
    """Whether a network namespace of this path exists; never for one below /proc, whose numbers are used again."""
    return bool(netns) and not netns.startswith("/proc/") and os.path.exists(netns)  # noqa: PTH110 -- as above


def _is_gone(netns: str) -> bool:
    """Whether a network namespace of this path certainly does not exist: where it would be can be seen."""
    if not netns or netns.startswith("/proc/"):
        return False
    return os.path.isdir(os.path.dirname(netns)) and not os.path.lexists(netns)  # noqa: PTH112, PTH120 -- as above
