"""The clock of everything that is counted: CLOCK_BOOTTIME, which runs from boot, also in suspend, and never jumps.

Wall time jumps (NTP, an operator), CLOCK_MONOTONIC stands still in suspend; counters, leases and totals live exactly
one boot (clock_gettime(2)). Wall time is for display, and for facts that come with nothing else.
"""

from __future__ import annotations

import time


def now() -> float:
    """Seconds since boot."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def from_wall(timestamp: float) -> float:
    """Seconds since boot at a time given in Unix seconds (negative for one before boot), by the wall clock of now."""
    return now() - (time.time() - timestamp)


def to_wall(at: float) -> float:
    """Unix seconds, for display, of a time in seconds since boot."""
    return time.time() - (now() - at)
