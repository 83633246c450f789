"""Whether a file still is what was read."""

from __future__ import annotations

import os
from typing import TypeAlias

Stamp: TypeAlias = tuple[int, int, int]
"""What tells one content of a file from another: mtime in ns, size, inode."""


def stamp_of(status: os.stat_result) -> Stamp:
    """The stamp of a file."""
    return (status.st_mtime_ns, status.st_size, status.st_ino)
