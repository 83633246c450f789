"""Where this package logs to, without knowing the logging library."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol


class Log(Protocol):
    """Takes an event and its fields. A method of a structlog logger (`log.warning`) is one."""

    def __call__(self, event: str, /, **fields: object) -> object:
        """Log one event."""
        ...


def no_log(_event: str, /, **_fields: object) -> None:
    """Log nothing."""


class Sparingly:
    """Passes the first event of a kind to a log, then one per `interval` seconds: a scrape may fail every second.

    The next event that passes says in `suppressed` how many did not. Safe to call from several threads.
    """

    def __init__(self, log: Log, clock: Callable[[], float], interval: float = 60.0) -> None:
        self._log = log
        self._clock = clock
        self._interval = interval
        self._lock = threading.Lock()
        self._last: dict[str, tuple[float, int]] = {}

    def __call__(self, event: str, /, **fields: object) -> None:
        """Log the event, or only count it. Events are a few fixed texts, so what is remembered stays small."""
        now = self._clock()
        with self._lock:
            at, suppressed = self._last.get(event, (-self._interval, 0))
            if now - at < self._interval:
                self._last[event] = (at, suppressed + 1)
                return
            self._last[event] = (now, 0)
        if suppressed:
            fields["suppressed"] = suppressed
        self._log(event, **fields)
