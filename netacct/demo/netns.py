"""Network namespaces that live exactly as long as this process: held by descriptors, never named under /run/netns.

A namespace is entered by one thread for the length of a `with` block. Sockets made inside stay in it, and so do child
processes. When the process ends, however it ends, the kernel takes namespaces, links, rules and routes away.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from netacct.errors import NetacctError, PermissionRefusedError

_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNET = 0x40000000  # <linux/sched.h>
_CURRENT = "/proc/thread-self/ns/net"


class DemoError(NetacctError):
    """The demo itself could not do its work; says which command or which step failed."""


def _call(name: str, *args: int) -> None:
    """A system call of libc that returns 0 or sets errno. os.setns and os.unshare came with Python 3.12 only."""
    if getattr(_LIBC, name)(*args) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


class Namespace:
    """One network namespace; `name` is for people only."""

    def __init__(self, name: str) -> None:
        self.name = name
        back = os.open(_CURRENT, os.O_RDONLY)
        try:
            _call("unshare", _CLONE_NEWNET)
            self._fd = os.open(_CURRENT, os.O_RDONLY)
            _call("setns", back, _CLONE_NEWNET)
        except PermissionError as error:
            raise PermissionRefusedError(f"cannot make a network namespace: {error.strerror}") from error
        finally:
            os.close(back)

    @property
    def path(self) -> str:
        """Where other processes find it, for `ip link … netns PATH` and `nsenter --net=PATH`."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The calling thread is inside for the length of the block."""
        back = os.open(_CURRENT, os.O_RDONLY)
        try:
            _call("setns", self._fd, _CLONE_NEWNET)
            yield
        finally:
            _call("setns", back, _CLONE_NEWNET)
            os.close(back)

    def run(self, args: Sequence[str], text: str = "") -> str:
        """Run a command inside, with `text` as its input, and return its output. Raises DemoError when it fails."""
        with self.entered():
            done = subprocess.run(args, input=text, capture_output=True, text=True, check=False, timeout=30)
        if done.returncode != 0:
            raise DemoError(f"in {self.name}: {' '.join(args)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def sysctl(self, key: str, value: int) -> None:
        """Set a key below net., written with slashes (interface names have dots in them)."""
        with self.entered():
            try:
                Path("/proc/sys/net", key).write_text(str(value), encoding="ascii")
            except OSError as error:
                raise DemoError(f"in {self.name}: sysctl net/{key} = {value}: {error.strerror}") from error

    def socket(self, family: int, kind: int, protocol: int = 0) -> socket.socket:
        """A socket that belongs to this namespace for good."""
        with self.entered():
            return socket.socket(family, kind, protocol)

    def close(self) -> None:
        """Let go of it: the kernel removes it as soon as no socket and no process is left inside."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
