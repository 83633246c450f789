"""The source `file`: pods from a file that somebody writes, followed as it changes.

Also the way to account virtual machines or tenants without Kubernetes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable

from netacct import clock, log, plainfile, yamlfile
from netacct.errors import ConfigError
from netacct.following import Follower, Pace, entries
from netacct.identity import pods_file
from netacct.identity.source import Health, Replace, SourceEvent
from netacct.model import WHOLE, Observation

DEBOUNCE = 0.02
"""Seconds between the first sign of a change and the reading: a rename-over is two or three events."""

POLL = 30.0
"""Seconds between looks when nothing was signalled: for what inotify cannot see (NFS, a moved ancestor)."""


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
        self._path = os.path.abspath(path)  # noqa: PTH100 -- resolve() would follow links
        self._health = Health(up=False, reason="not started")
        self._digest: bytes | None = None
        self._emit: Callable[[SourceEvent], None]
        self._log = log.get(source=self.name, file=path)
        pace = Pace(poll, DEBOUNCE, DEBOUNCE)
        self._follower = Follower(lambda: entries(self._path), self._changed, pace, "source-file", self._log)

    def start(self, emit: Callable[[SourceEvent], None]) -> None:
        """Read the file once, in this call, then follow it in a thread."""
        self._emit = emit
        self._follower.start()

    def stop(self) -> None:
        """End the thread and close what it used."""
        self._follower.stop()

    def healthy(self) -> Health:
        """Unhealthy, with the error, while the file is not as it should be."""
        return self._health

    def _changed(self, _paths: frozenset[str] | None) -> None:
        try:
            self._look()
        except Exception as error:
            self._digest = None
            self._health = Health(up=False, reason=f"{type(error).__name__}: {error}")
            raise

    def _look(self) -> None:
        at = clock.now()
        try:
            data = read(self._path)
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
        self._emit(Replace(self.name, observations, at))

    def _refuse(self, error: ConfigError) -> None:
        if self._health.reason != str(error):
            self._log.error("pods file refused, the last good list holds", error=str(error))
        self._health = Health(up=False, reason=str(error))


def read(path: str) -> bytes | None:
    """The content of a pods file, up to a byte over the limit of `pods_file.parse`; None where there is no file.

    Nothing is waited for. Raises ConfigError where it cannot be read, or something else stands in its place.
    """
    try:
        with open(path, "rb", opener=plainfile.opener) as file:
            return file.read(yamlfile.SIZE_LIMIT + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigError(path, "", f"cannot be read: {error.strerror}") from error


def _owned(observations: tuple[Observation, ...]) -> int:
    return sum(observation.present and observation.ip != WHOLE for observation in observations)
