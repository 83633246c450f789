"""The files that accounts are kept in: appended to, rotated by size, read by anybody.

    accounts.jsonl          one record per line, the newest last; `.1` to `.7` are older ones
    accounts.open.jsonl     the leases that last, with what they got so far; replaced every few minutes
    accounts.lock           locked by the process that writes here; another one would take its leases for its own

A batch of lines is written whole or, where the disk is full, not at all. A process that is killed in the middle can
leave a torn line: the next one ends it, so that it spoils no other, and readers skip it. Nothing is synced: a killed
process loses nothing of what it wrote, a power cut what the kernel had not written yet (about half a minute).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from netacct import plainfile
from netacct.accounting.accounts import Account, decode

NAME = "accounts.jsonl"
OPEN_NAME = "accounts.open.jsonl"
LOCK_NAME = "accounts.lock"
MAX_BYTES = 16 << 20
FILES = 8
"""So many files of so many bytes: 128 MiB, or some 200,000 accounts."""

MODE = 0o640
TAIL_BYTES = 1 << 20


class AccountsFile:
    """The writer. All methods raise OSError, also while another process writes here, and then have written nothing."""

    def __init__(self, directory: Path, *, max_bytes: int = MAX_BYTES, files: int = FILES) -> None:
        self._directory, self._max_bytes, self._files = directory, max_bytes, files
        self._path = directory / NAME
        self._is_new = True
        self._lock: int | None = None

    def close(self) -> None:
        """Let other processes write here."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __del__(self) -> None:
        """A writer that was given up leaves no descriptor behind."""
        self.close()

    def hold(self) -> None:
        """Keep other processes from writing here from now on; does nothing where the directory is not there yet."""
        if self._directory.is_dir():
            self._hold()

    def append(self, lines: Sequence[str]) -> None:
        """Append records. The first ones after a start may be there already, from an earlier life; those are not."""
        self._directory.mkdir(mode=0o750, parents=True, exist_ok=True)
        self._hold()
        if self._is_new:
            known = {record.id for record in records(self._tail())}
            lines = [line for line in lines if decode(line).id not in known]
        if lines:
            self._write("".join(f"{line}\n" for line in lines).encode())
        self._is_new = False

    def write_open(self, lines: Sequence[str]) -> None:
        """Replace the records of leases that last."""
        path = self._directory / OPEN_NAME
        if not lines:
            self.hold()
            path.unlink(missing_ok=True)
            return
        self._directory.mkdir(mode=0o750, parents=True, exist_ok=True)
        self._hold()
        fresh = path.with_name(f"{OPEN_NAME}.new")
        fresh.unlink(missing_ok=True)
        descriptor = _open(fresh)
        try:
            _write_all(descriptor, "".join(f"{line}\n" for line in lines).encode())
        finally:
            os.close(descriptor)
        fresh.replace(path)

    def read_open(self) -> list[Account]:
        """What `write_open` left; lines that are no record are left out."""
        self.hold()
        path = self._directory / OPEN_NAME
        with contextlib.suppress(FileNotFoundError), open(path, "rb", opener=plainfile.opener) as file:
            return list(records(file.read().split(b"\n")))
        return []

    def _hold(self) -> None:
        """A lock of the process (fcntl(2), F_SETLK), so that a reload may open the files anew; asked for each time."""
        path = self._directory / LOCK_NAME
        if self._lock is None:
            self._lock = _open(path)
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            raise OSError(error.errno, "another netacct writes accounts here", str(self._directory)) from error

    def _write(self, data: bytes) -> None:
        if self._path.exists() and self._path.stat().st_size + len(data) > self._max_bytes:
            self._rotate()
        descriptor = _open(self._path)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                data = b"\n" + data
            try:
                _write_all(descriptor, data)
            except OSError:
                os.ftruncate(descriptor, size)
                raise
        finally:
            os.close(descriptor)

    def _rotate(self) -> None:
        """Make room for a new file: each moves on by one up to the first gap; the oldest goes where there is none."""
        names = [self._path, *(_numbered(self._path, number) for number in range(1, self._files))]
        last = next((number for number, path in enumerate(names) if not path.exists()), len(names) - 1)
        for number in range(last, 0, -1):
            names[number - 1].replace(names[number])

    def _tail(self) -> list[bytes]:
        """The lines at the end of what was written last; the first one may be cut."""
        data = b""
        for path in (self._path, _numbered(self._path, 1)):
            if len(data) < TAIL_BYTES:
                with contextlib.suppress(FileNotFoundError), open(path, "rb", opener=plainfile.opener) as file:
                    file.seek(max(0, path.stat().st_size - TAIL_BYTES))
                    data = file.read() + b"\n" + data
        return data.split(b"\n")


def records(lines: Iterable[bytes], bad: list[int] | None = None) -> Iterable[Account]:
    """The records of some lines. The numbers (from 1) of those that are none, nor blank, are added to `bad`."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield decode(line.decode())
        except ValueError:
            if bad is not None:
                bad.append(number)


def _open(path: Path) -> int:
    flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    with contextlib.suppress(FileNotFoundError):
        return plainfile.opener(str(path), flags)  # a pipe that nobody empties would stop the agent
    descriptor = os.open(path, flags | os.O_CREAT, MODE)
    os.fchmod(descriptor, MODE)  # the service's umask leaves the group nothing
    return descriptor


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")
