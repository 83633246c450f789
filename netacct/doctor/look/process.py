"""This process, locks and their holders, directories. Formats: proc(5), proc_locks(5), capabilities(7)."""

from __future__ import annotations

import os
import re
import stat
import time
from pathlib import Path
from typing import NamedTuple

from netacct import clock
from netacct.doctor.facts import Directory, Holder, Process, XtablesLock
from netacct.kernel.lock import lock_path

WATCH = 0.5
"""Seconds to look at a lock that somebody holds. Writers of rules hold it for milliseconds."""

_PAUSE = 0.05
_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_NET_RAW": 13}  # linux/capability.h
_OF_THE_FIRST_NAMESPACE = Path("/proc/sys/net/core/netdev_max_backlog")
"""A setting of the whole machine, which only the first network namespace shows (net/core/sysctl_net_core.c)."""


class Lock(NamedTuple):
    """One flock as /proc/locks has it: the pid that took it, and how many wait."""

    pid: int
    waiting: int


def process() -> Process:
    """Capabilities and namespace of this process. The kubelet tells every container where its API server is."""
    status = Path("/proc/thread-self/status").read_text(encoding="utf-8")
    return Process(
        missing_capabilities(status), "KUBERNETES_SERVICE_HOST" in os.environ, _OF_THE_FIRST_NAMESPACE.exists()
    )


def missing_capabilities(status: str) -> tuple[str, ...]:
    """Those of the needed capabilities that are not effective, from /proc/PID/status."""
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    effective = int(found[1], 16) if found else 0
    return tuple(name for name, bit in _CAPABILITIES.items() if not effective >> bit & 1)


def xtables_lock() -> XtablesLock:
    """Whether the lock can be used, and who holds it for longer than `WATCH`. Never takes it: others would fail."""
    path = lock_path()
    return XtablesLock(str(path), _unusable(path), watch(path))


def watch(path: Path, seconds: float = WATCH) -> Holder | None:
    """The process that holds the flock on a file all the time for so many seconds; at once None where nobody does."""
    begin = time.monotonic()
    first = flock_on(path)
    now = first
    while first is not None and now is not None and now.pid == first.pid:
        watched = time.monotonic() - begin
        if watched >= seconds:
            command, age = describe(now.pid)
            return Holder(now.pid, command, watched, age, now.waiting)
        time.sleep(_PAUSE)
        now = flock_on(path)
    return None


def flock_on(path: Path) -> Lock | None:
    """Who holds the flock on a file now; pid 0 where that process is in another PID namespace."""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    file = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    return find_flock(Path("/proc/locks").read_text(encoding="ascii"), file)


def find_flock(text: str, file: str) -> Lock | None:
    """The flock on a file (`MAJOR:MINOR:INODE`) in /proc/locks; lines with `->` wait for the one above them."""
    holders, waiting = [], 0
    for line in text.splitlines():
        fields = line.split()
        if file in fields and "FLOCK" in fields:
            if "->" in fields:
                waiting += 1
            else:
                holders.append(int(fields[4]))
    return Lock(max(holders[0], 0), waiting) if holders else None


def describe(pid: int) -> tuple[str, float | None]:
    """The command of a process and the seconds since it began; "" and None where it is gone.

    A lock outlives the process that took it where a child keeps the file open.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", None
    command, ticks = parse_stat(text)
    return command, max(0.0, clock.now() - ticks / os.sysconf("SC_CLK_TCK"))


def parse_stat(text: str) -> tuple[str, int]:
    """Command and start time (clock ticks since boot) in /proc/PID/stat; a command may hold blanks and brackets."""
    before, _, after = text.rpartition(")")
    return before.partition("(")[2], int(after.split()[19])


def _unusable(path: Path) -> str:
    """Why nobody could open the lock for writing, which also makes it where it is missing."""
    if not path.parent.is_dir():
        return "its directory is missing"
    if path.exists() and not path.is_file():
        return "it is not a file"
    if os.statvfs(path if path.exists() else path.parent).f_flag & os.ST_RDONLY:
        return "its file system is read-only"
    return ""


def directory(key: str, path: Path) -> Directory:
    """What is known about a directory of ours, or about the nearest one above it that exists."""
    nearest = next(one for one in (path, *path.parents) if one.exists())
    if not nearest.is_dir():
        return Directory(key, str(path), f"{nearest} is not a directory")
    space = os.statvfs(nearest)
    if space.f_flag & os.ST_RDONLY:
        return Directory(key, str(path), "its file system is read-only")
    free = space.f_bavail * space.f_frsize
    if nearest != path:
        return Directory(key, str(path), free=free)
    status = path.stat()
    return Directory(key, str(path), "", stat.S_IMODE(status.st_mode), status.st_uid, free)
