"""A thread that sleeps until there is something to do, and ends when it is told to."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from enum import Enum, auto


class Why(Enum):
    """Why a sleep ended; where there are several reasons, the first of these."""

    STOP = auto()
    WOKEN = auto()
    READABLE = auto()
    DUE = auto()


class Sleeper:
    """A daemon thread, with what it takes to wake and to stop it.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._wake = -1

    def start(self, run: Callable[[], None]) -> None:
        """Start the thread. `run` is what it does: it calls `sleep`, and returns when that says `STOP`.

        Raises OSError without descriptors, and RuntimeError without threads.
        """
        self._stopping = False
        thread = threading.Thread(target=run, name=self._name, daemon=True)
        with self._lock:
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            try:
                thread.start()
            except RuntimeError:
                os.close(self._wake)
                raise
            self._thread = thread

    def wake(self) -> None:
        """End the thread's sleep, or its next one. From any thread; without effect where it does not run."""
        with self._lock:
            if self._thread is not None:
                os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """Stop the thread and wait until it has ended. Idempotent."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is None:
            return
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        thread.join()
        os.close(self._wake)

    def sleep(self, seconds: float, fd: int = -1) -> Why:
        """For the thread itself: sleep for so long at the most, or until the descriptor (unless -1) can be read."""
        poller = select.poll()
        for each in (self._wake, fd):
            if each >= 0:
                poller.register(each, select.POLLIN)
        ready = [each for each, _ in poller.poll(max(0.0, seconds) * 1000)]
        if self._stopping:  # the wake stays for the next sleep, should there be one
            return Why.STOP
        if self._wake in ready:
            os.eventfd_read(self._wake)
            return Why.WOKEN
        return Why.READABLE if ready else Why.DUE
