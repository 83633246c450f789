"""Work that nobody can interrupt, done in a thread of its own, so that whoever waits for it can be."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

_STEP = 0.05
"""Seconds between looks whether the wait has ended."""


class Apart(Generic[T]):
    """Begins the work when it is made. What hangs in it for ever is left behind: the thread is a daemon.

    Args:
        work: what to do.
        name: of the thread.
    """

    def __init__(self, work: Callable[[], T], name: str) -> None:
        self._work = work
        self._done = threading.Event()
        self._result: T
        self._error: Exception | None = None
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def wait(self, seconds: float, ended: Callable[[], bool]) -> T:
        """What the work returns; raises what it raises.

        Raises:
            TimeoutError: it takes longer; it may be waited for again.
            InterruptedError: `ended` says that nobody needs it any more.
        """
        deadline = time.monotonic() + seconds
        while not self._done.wait(_STEP):
            if ended():
                raise InterruptedError
            if time.monotonic() > deadline:
                raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._result

    def _run(self) -> None:
        try:
            self._result = self._work()
        except Exception as error:  # noqa: BLE001 -- whoever waits must hear of it
            self._error = error
        self._done.set()
