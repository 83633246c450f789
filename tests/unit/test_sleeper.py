"""A thread that sleeps: what ends a sleep, and what comes first."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator

import pytest

from netacct.sleeper import Sleeper, Why

PATIENCE = 60.0
"""Seconds for what must come."""


class Sleeping:
    """A sleeper that notes why each of its sleeps ended."""

    def __init__(self) -> None:
        self.readable, self.writable = os.pipe()
        self.seconds = 10 * PATIENCE
        self.ended: queue.SimpleQueue[Why] = queue.SimpleQueue()
        self.sleeper = Sleeper("test-sleeper")

    def run(self) -> None:
        """Sleep until the sleeper is stopped."""
        while (why := self.sleeper.sleep(self.seconds, self.readable)) is not Why.STOP:
            if why is Why.READABLE:
                os.read(self.readable, 1)
            self.ended.put(why)

    def next(self) -> Why:
        """Why the next sleep ended."""
        return self.ended.get(timeout=PATIENCE)


@pytest.fixture
def sleeping() -> Iterator[Sleeping]:
    """One that is not started yet."""
    made = Sleeping()
    yield made
    made.sleeper.stop()
    os.close(made.readable)
    os.close(made.writable)


def test_each_reason_ends_a_sleep_once(sleeping: Sleeping) -> None:
    """A wake and a readable descriptor end a sleep that would last, each of them a single one."""
    sleeping.sleeper.start(sleeping.run)
    sleeping.sleeper.wake()
    assert sleeping.next() is Why.WOKEN
    os.write(sleeping.writable, b"x")
    assert sleeping.next() is Why.READABLE
    sleeping.sleeper.stop()
    assert sleeping.ended.empty()


def test_a_wake_comes_before_what_is_readable(sleeping: Sleeping) -> None:
    """Woken while the descriptor can be read, too, the thread hears of the wake first and of the descriptor next."""
    os.write(sleeping.writable, b"x")

    def run() -> None:
        sleeping.sleeper.wake()
        sleeping.run()

    sleeping.sleeper.start(run)
    assert [sleeping.next(), sleeping.next()] == [Why.WOKEN, Why.READABLE]


def test_the_time_ends_a_sleep(sleeping: Sleeping) -> None:
    """Where nothing happens, a sleep ends when its time is up, also one whose time is past."""
    sleeping.seconds = -1.0
    sleeping.sleeper.start(sleeping.run)
    assert sleeping.next() is Why.DUE


def test_stop_ends_thread_and_descriptor(sleeping: Sleeping) -> None:
    """Stop, also twice, leaves no thread and no descriptor; a wake is harmless then, and it can start anew."""
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208 -- names are wanted
    for _ in range(2):
        sleeping.sleeper.start(sleeping.run)
        sleeping.sleeper.wake()
        assert sleeping.next() is Why.WOKEN
        sleeping.sleeper.stop()
        sleeping.sleeper.stop()
        sleeping.sleeper.wake()
        assert "test-sleeper" not in {thread.name for thread in threading.enumerate()}
        assert set(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208 -- as above


def test_a_stop_ends_every_later_sleep_too(sleeping: Sleeping) -> None:
    """A thread that sleeps once more after it was told to stop, as in an inner loop, is told again at once."""
    ended: queue.SimpleQueue[Why] = queue.SimpleQueue()

    def run() -> None:
        for _ in range(3):
            ended.put(sleeping.sleeper.sleep(3600.0))

    sleeping.sleeper.start(run)
    threading.Thread(target=sleeping.sleeper.stop, daemon=True).start()
    assert [ended.get(timeout=PATIENCE) for _ in range(3)] == [Why.STOP] * 3
