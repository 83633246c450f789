"""Signals as messages.

A handler would not do: Python calls it in the main thread, and only when that next wakes up, if the signal comes just
as it goes to sleep; and it would interrupt a commit.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Signalled:
    """SIGTERM, SIGINT or SIGHUP came."""

    number: int


@contextlib.contextmanager
def signals(put: Callable[[Signalled], None]) -> Iterator[None]:
    """SIGTERM, SIGINT and SIGHUP become messages, by a thread that waits for them; all others have them blocked.

    To be entered by the main thread, before any other is started.
    """
    ending = threading.Event()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    thread = threading.Thread(target=_wait, args=(put, ending), name="signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        assert thread.ident is not None
        signal.pthread_kill(thread.ident, signal.SIGHUP)
        thread.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait(put: Callable[[Signalled], None], ending: threading.Event) -> None:
    while True:
        number = signal.sigwait(SIGNALS)
        if ending.is_set():
            return
        put(Signalled(number))
