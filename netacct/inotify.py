"""inotify(7) by ctypes, which the standard library lacks: tells when something in a directory changes.

Only what a follower of one file needs: directories are watched, not the file, because editors, `mv`, and Kubernetes'
ConfigMaps (a symlink `..data` that is swapped) replace a file without ever writing to it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from typing import NamedTuple

# linux/inotify.h
_IN_ATTRIB = 0x00000004
_IN_CLOSE_WRITE = 0x00000008
_IN_MOVED_FROM = 0x00000040
_IN_MOVED_TO = 0x00000080
_IN_CREATE = 0x00000100
_IN_DELETE = 0x00000200
_IN_DELETE_SELF = 0x00000400
_IN_MOVE_SELF = 0x00000800
_IN_IGNORED = 0x00008000
_IN_ONLYDIR = 0x01000000
_IN_ISDIR = 0x40000000
_CHANGES = (
    _IN_ATTRIB
    | _IN_CLOSE_WRITE
    | _IN_MOVED_FROM
    | _IN_MOVED_TO
    | _IN_CREATE
    | _IN_DELETE
    | _IN_DELETE_SELF
    | _IN_MOVE_SELF
    | _IN_ONLYDIR
)
_BUFFER = 65536
_LARGEST = 16 + 256
"""Bytes of the largest event: struct inotify_event, and a name of NAME_MAX with its NUL."""

_LIMITS = {errno.EMFILE: " (fs.inotify.max_user_instances)", errno.ENOSPC: " (fs.inotify.max_user_watches)"}
"""Which sysctl an error is about; EMFILE may also be the process's own limit."""


class Event(NamedTuple):
    """Something happened in (`name`) or to (`name` is "") a watched directory. Overflow has the watch -1.

    `created` tells that a new entry other than a directory appeared: a file that its writer has yet to fill and close,
    or a link, which is complete. `gone` tells that the watch is no more, and this its last event: it was given up, or
    its directory was deleted or unmounted. Its number does not come again.
    """

    watch: int
    name: str
    created: bool
    gone: bool = False


class Inotify:
    """One inotify instance. Raises OSError where the kernel has none left to give.

    Any thread may watch and unwatch, but `events` is for one thread, and `close` for when no other call goes on.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd = self._call(self._libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK), "inotify_init1")

    def watch(self, directory: str) -> int:
        """Watch a directory for entries that come, go, or are written or renamed; returns the watch's number.

        Watching it again gives the same number, as long as it is the same inode. FileNotFoundError or
        NotADirectoryError where there is none.
        """
        path = os.fsencode(directory)
        return self._call(self._libc.inotify_add_watch(self.fd, path, ctypes.c_uint32(_CHANGES)), directory)

    def unwatch(self, number: int) -> None:
        """Forget a watch; one that the kernel already dropped (its directory was deleted) is no error."""
        self._libc.inotify_rm_watch(self.fd, ctypes.c_int(number))

    def events(self) -> list[Event]:
        """All events that are queued now, oldest first; never blocks."""
        found: list[Event] = []
        data = bytes(_BUFFER)
        while len(data) > _BUFFER - _LARGEST:  # else there was room for one more, had there been one
            try:
                data = os.read(self.fd, _BUFFER)
            except BlockingIOError:
                break
            offset = 0
            while offset < len(data):  # struct inotify_event: wd, mask, cookie, len, then a NUL-padded name of len
                watch, mask, _cookie, size = struct.unpack_from("iIII", data, offset)
                offset += 16 + size
                name = os.fsdecode(data[offset - size : offset].rstrip(b"\0"))
                created = bool(mask & _IN_CREATE) and not mask & _IN_ISDIR
                found.append(Event(watch, name, created, gone=bool(mask & _IN_IGNORED)))
        return found

    def close(self) -> None:
        """Free the instance and its watches."""
        os.close(self.fd)

    @staticmethod
    def _call(result: int, what: str) -> int:
        if result < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code) + _LIMITS.get(code, ""), what)
        return result
