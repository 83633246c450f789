"""Reading a file that somebody else put in its place, and which may be something else than a file."""

from __future__ import annotations

import errno
import os
import stat


def read(path: str, limit: int) -> bytes | None:
    """Up to `limit` bytes of a regular file; None where it is a pipe or a device. Raises OSError.

    Never waits: without O_NONBLOCK, opening a pipe would wait for whoever writes into it.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not stat.S_ISREG(mode):
            return None
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(limit)
    finally:
        os.close(descriptor)
