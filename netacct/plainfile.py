"""Reading a file that somebody else put in its place, and which may be something else than a file."""

from __future__ import annotations

import errno
import os
import stat


def opener(path: str, flags: int) -> int:
    """For `open`: what is no regular file raises OSError. Nothing is waited for, as for whoever writes into a pipe."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    try:
        _require(os.fstat(descriptor), path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def require(path: str) -> None:
    """Raise OSError where no regular file is, for who lets a library open it."""
    _require(os.stat(path), path)  # noqa: PTH116 -- a plain string


def read(path: str, limit: int) -> bytes | None:
    """Up to `limit` bytes of a regular file; None where it is a pipe or a device. Raises OSError."""
    try:
        with open(path, "rb", opener=opener) as file:
            return file.read(limit)
    except NoFileError:
        return None


class NoFileError(OSError):
    """A pipe, a socket or a device is where a file should be."""


def _require(status: os.stat_result, path: str) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(status.st_mode):
        raise NoFileError(errno.EINVAL, "it is no regular file", path)
