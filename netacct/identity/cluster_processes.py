"""The command lines of Kubernetes' programs on this node, and the configuration files that they name.

A scan opens a small file for each process, so it is made rarely: at first, when a program that was found has ended,
and then after pauses that grow from a minute to ten, for an agent may start long before the kubelet. `comm` is read
before `cmdline`, which waits for a process whose memory is being changed.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from netacct.identity.cluster_kubernetes import FLAGS, flags

SCAN_FIRST, SCAN_LIMIT = 60.0, 600.0
"""Seconds between two scans of all processes: after the first, or one that found others; and at the most."""

SIZE_LIMIT = 1 << 17
"""Bytes of a command line that are read; as much as one argument can have (MAX_ARG_STRLEN)."""

_COMM = {program[:15]: program for program in FLAGS}  # TASK_COMM_LEN, linux/sched.h
_POD = re.compile(r"pod([0-9a-f]{8}[-_][0-9a-f_-]{23,27}|[0-9a-f]{32})")
"""A pod's uid in the name of a cgroup; systemd's driver writes _ for -."""


class Program(NamedTuple):
    """A running program of Kubernetes: its name, process, arguments, and the uid of its pod ("" where it is none)."""

    name: str
    pid: int
    arguments: tuple[str, ...]
    pod: str


class Programs:
    """Finds the programs that run in this network namespace.

    Args:
        proc: where proc(5) is mounted.
        now: seconds of a clock that never goes back.
    """

    def __init__(self, proc: str = "/proc", now: Callable[[], float] = time.monotonic) -> None:
        self._proc, self._now = proc, now
        self._found: tuple[Program, ...] = ()
        self._pause = SCAN_FIRST
        self._due = 0.0

    def look(self) -> tuple[Program, ...]:
        """Those that run now, or ran at the last scan."""
        now = self._now()
        if now >= self._due or any(self._comm(one.pid) != one.name for one in self._found):
            before, self._found = self._found, tuple(self._scan())
            if self._found != before:
                self._pause = SCAN_FIRST
            self._due = now + self._pause
            self._pause = min(self._pause * 2, SCAN_LIMIT)
        return self._found

    def _scan(self) -> Iterator[Program]:
        here = self._namespace("thread-self")
        with contextlib.suppress(OSError):
            for name in sorted(filter(str.isdecimal, os.listdir(self._proc)), key=int):  # noqa: PTH208 -- strings
                program = self._comm(int(name))
                # A cluster inside of a container (kind) has its own namespace, and tells of other pods; and anybody
                # can call a process what he likes, but only root's are believed.
                if program and self._namespace(name) == here and self._is_roots(name):
                    arguments = self._read(name, "cmdline").decode("utf-8", "replace").rstrip("\0").split("\0")
                    pod = _POD.search(self._read(name, "cgroup").decode("utf-8", "replace"))
                    uid = pod[1].replace("_", "-") if pod else ""
                    yield Program(program, int(name), tuple(arguments[1:]), uid)

    def _comm(self, pid: int) -> str:
        """The program's name, "" for any other process or none."""
        return _COMM.get(self._read(str(pid), "comm").decode("utf-8", "replace").strip(), "")

    def _namespace(self, pid: str) -> int | None:
        """What tells network namespaces apart: the number of a file in /proc/PID/net.

        /proc/PID/ns/net would say it plainly, but wants CAP_SYS_PTRACE for programs with more capabilities than ours.
        """
        try:
            return os.stat(f"{self._proc}/{pid}/net/dev").st_ino  # noqa: PTH116 -- strings
        except OSError:
            return None

    def _is_roots(self, pid: str) -> bool:
        try:
            return os.stat(f"{self._proc}/{pid}").st_uid == 0  # noqa: PTH116 -- as above
        except OSError:
            return False

    def _read(self, pid: str, name: str) -> bytes:
        try:
            with open(f"{self._proc}/{pid}/{name}", "rb") as file:  # noqa: PTH123 -- as above
                return file.read(SIZE_LIMIT)
        except OSError:
            return b""


def configuration(program: Program, proc: str = "/proc", root: str = "") -> list[str]:
    """Where the file that `--config` names may be, the likeliest first.

    A program in a container names the file as it is there. Without CAP_SYS_PTRACE nobody looks into that; but the
    kubelet keeps what it mounts below its own directory, and a program of the host's names the host's file.
    """
    path = flags(program.arguments).get("config", "")
    if not path.startswith("/"):
        return []
    places = [f"{proc}/{program.pid}/root{path}"]
    if program.pod:
        volumes = Path(f"{root}/var/lib/kubelet/pods/{program.pod}/volumes/kubernetes.io~configmap")
        with contextlib.suppress(OSError):
            places += sorted(map(str, volumes.glob(f"*/{glob.escape(os.path.basename(path))}")))  # noqa: PTH119 -- as above
        return places
    return [*places, root + path]
