"""The lock that all writers of legacy xtables share.

iptables-legacy takes an flock on one file around each command (iptables(8), `--wait`); libiptc itself takes none, so a
program that edits tables through it must do the same or undo other programs' changes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

from netacct.errors import DatapathError, LockTimeoutError, PermissionRefusedError

DEFAULT_PATH = "/run/xtables.lock"
PATIENCE = 10.0
"""Seconds that we wait for the lock. Writers hold it for milliseconds; a minute of it is somebody's mistake."""

_PAUSE = 0.02


def lock_path() -> Path:
    """The lock file: XTABLES_LOCKFILE, as iptables has it, or the default."""
    return Path(os.environ.get("XTABLES_LOCKFILE") or DEFAULT_PATH)


@contextlib.contextmanager
def xtables_lock(patience: float = PATIENCE) -> Iterator[None]:
    """Hold the xtables lock for the length of a `with` block.

    The file is opened anew each time: somebody may have replaced it, and an flock belongs to the open file.

    Errors: LockTimeoutError, naming the file and, where /proc/locks tells, the holder; PermissionRefusedError;
        DatapathError where the file cannot be had for another reason.
    """
    path = lock_path()
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except PermissionError as error:
        raise PermissionRefusedError(f"{_unopened(path, error)} (root is needed, or XTABLES_LOCKFILE)") from error
    except OSError as error:  # a full file system, a directory in its place: to try again may help
        raise DatapathError(_unopened(path, error)) from error
    try:
        _wait(descriptor, path, patience)
        yield
    finally:
        os.close(descriptor)


def _unopened(path: Path, error: OSError) -> str:
    return f"{path}: cannot open the xtables lock: {error.strerror}"


def _wait(descriptor: int, path: Path, patience: float) -> None:
    end = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                raise LockTimeoutError(f"{path} is held by {_holder(descriptor)} for over {patience:g} s") from None
            # not cryptography: two waiters shall not keep step
            time.sleep(_PAUSE * random.uniform(0.5, 1.5))  # noqa: S311
        else:
            return


def _holder(descriptor: int) -> str:
    """Who holds the flock, for people. /proc/locks (proc(5)): `1: FLOCK ADVISORY WRITE PID MAJOR:MINOR:INODE 0 EOF`."""
    status = os.fstat(descriptor)
    file = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
            fields = line.split()
            # 0: in a PID namespace that we do not see
            if "->" not in fields and "FLOCK" in fields and file in fields and int(fields[4]) > 0:
                return f"process {fields[4]}"
    return "another process"
