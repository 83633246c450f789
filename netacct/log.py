"""Logging: structlog to stderr, a line per event.

Events are short lower-case sentences without data; data goes into keys, with units (`duration_seconds`). Info is for
changes, debug for each scrape, warning for what is tried again, error for what needs the operator.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TextIO

from netacct.lean import hidden

with hidden("rich"):  # only for tracebacks on consoles, and 3.6 MB
    import structlog
    from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

_PRIORITIES = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}
"""syslog(3) priorities, as sd-daemon(3) reads them from `<N>` at the head of a line."""

_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}
"""All control characters; a line break is one that logfmt has escaped already."""


def configure(level: str, style: str, stream: TextIO | None = None, environ: Mapping[str, str] | None = None) -> None:
    """Set up logging for the process; may be called again, as after a reload.

    Args:
        level: debug, info, warning or error.
        style: auto, logfmt, json or console; `auto` is `console` on a terminal and `logfmt` elsewhere.
        stream: where to; stderr by default.
        environ: where JOURNAL_STREAM is looked up; the process's own by default.
    """
    stream = sys.stderr if stream is None else stream
    journal = is_journal(stream, os.environ if environ is None else environ)
    structlog.configure(
        processors=_processors(style, stream, journal=journal),
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.WriteLoggerFactory(_Lossy(stream)),  # type: ignore[arg-type] # needs write and flush
        cache_logger_on_first_use=False,  # else a reload could not change the level of loggers in use
    )
    _route_libraries()


def get(**values: Any) -> FilteringBoundLogger:
    """A logger; `values` are added to each of its lines.

    It follows a later `configure`, for 6 us where its level is off (27 us for a line). Where that is too much, `bind()`
    gives one that is settled, for 0.1 us.
    """
    logger: FilteringBoundLogger = structlog.get_logger(**values)
    return logger


def is_journal(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether systemd connected this stream to the journal: JOURNAL_STREAM holds its device:inode (systemd.exec(5))."""
    try:
        stat = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return environ.get("JOURNAL_STREAM") == f"{stat.st_dev}:{stat.st_ino}"


class Repeats:
    """Lets a message through once per key and interval, so that a lasting trouble does not fill the log.

    Args:
        seconds: the interval.
        clock: seconds of any steady clock.
        keys: so many keys are remembered; with more, the oldest is let through again.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic, keys: int = 1024) -> None:
        self._seconds, self._clock, self._keys = seconds, clock, keys
        self._last: dict[Hashable, float] = {}
        self._lock = threading.Lock()

    def due(self, key: Hashable) -> bool:
        """Whether to log what `key` names now."""
        now = self._clock()
        with self._lock:
            last = self._last.get(key)
            if last is not None and now - last < self._seconds:
                return False
            self._last.pop(key, None)
            self._last[key] = now
            if len(self._last) > self._keys:
                del self._last[next(iter(self._last))]
            return True

    def forget(self, key: Hashable) -> None:
        """The trouble is over: its next message is news again."""
        with self._lock:
            self._last.pop(key, None)


def _processors(style: str, stream: TextIO, *, journal: bool) -> list[Processor]:
    if style == "auto":
        style = "console" if stream.isatty() else "logfmt"
    steps: list[Processor] = [structlog.contextvars.merge_contextvars, structlog.processors.add_log_level]
    if not journal:  # the journal has a time of its own
        steps.append(structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"))
    if style == "console":
        colors = stream.isatty() and "NO_COLOR" not in os.environ
        steps.append(structlog.dev.ConsoleRenderer(colors=colors, timestamp_key="ts", pad_event_to=0))
        return steps
    steps += [structlog.processors.format_exc_info, structlog.processors.EventRenamer("msg")]
    if style == "json":
        steps.append(structlog.processors.JSONRenderer(sort_keys=False))
    else:
        order = ["level", "msg"] if journal else ["ts", "level", "msg"]
        steps.append(_visible(structlog.processors.LogfmtRenderer(key_order=order, bool_as_flag=False)))
    if journal:
        steps[-1] = _prefixed(steps[-1])
    return steps


def _visible(render: Processor) -> Processor:
    """The same without control characters: a name from elsewhere shall not move the cursor of who reads the log."""

    def escape(logger: WrappedLogger, method: str, event: EventDict) -> str:
        return str(render(logger, method, event)).translate(_ESCAPES)

    return escape


def _prefixed(render: Processor) -> Processor:
    def prefix(logger: WrappedLogger, method: str, event: EventDict) -> str:
        priority = _PRIORITIES.get(str(event.get("level")), 6)
        return f"<{priority}>{render(logger, method, event)!s}"

    return prefix


class _Lossy:
    """A stream that loses lines when nobody reads it any more, instead of stopping the program that logs."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        try:
            self._stream.write(text)
        except (OSError, ValueError):
            return

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError):
            return


class _Libraries(logging.Handler):
    """Hands what libraries log through the standard library to structlog."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            log = get(library=record.name)
            log.log(record.levelno, record.getMessage(), exc_info=record.exc_info)
        except Exception:  # noqa: BLE001 -- as every handler of the standard library does: see handleError
            self.handleError(record)


def _route_libraries() -> None:
    root = logging.getLogger()
    for handler in [h for h in root.handlers if isinstance(h, _Libraries)]:
        root.removeHandler(handler)
    root.addHandler(_Libraries(logging.WARNING))
    root.setLevel(logging.WARNING)
