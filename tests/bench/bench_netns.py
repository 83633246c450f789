"""Network namespaces that exist only as long as this process: nothing to clean up, however it ends.

A namespace is held by a file descriptor and has no name, so the kernel frees it, with every interface, rule and set in
it, when the bench exits, is interrupted or is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

CLONE_NEWNET = 0x40000000  # include/uapi/linux/sched.h

T = TypeVar("T")
_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


class ToolError(Exception):
    """A program that the bench ran failed; carries its command line and what it said."""


def run(*argv: str, text: str | None = None) -> str:
    """Run a program, hand `text` to its stdin, return its stdout. Raises ToolError."""
    done = subprocess.run(argv, input=text, text=True, capture_output=True, check=False)
    if done.returncode:
        raise ToolError(f"{' '.join(argv)}: exit {done.returncode}: {done.stderr.strip()[:2000]}")
    return done.stdout


class Namespace:
    """A private network namespace. Use from the main thread only: `entered` moves the calling thread."""

    def __init__(self) -> None:
        with _returning():
            _check(_libc.unshare(CLONE_NEWNET), "unshare")
            self._fd = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        self.run("ip", "link", "set", "lo", "up")

    @property
    def path(self) -> str:
        """A path by which other programs can open the namespace."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def command(self, *argv: str) -> list[str]:
        """The command line that runs `argv` inside."""
        return ["nsenter", f"--net={self.path}", *argv]

    def run(self, *argv: str, text: str | None = None) -> str:
        """Run a program inside; see `run`."""
        return run(*self.command(*argv), text=text)

    def ip(self, *lines: str) -> None:
        """Run `ip` subcommands inside, as one batch."""
        self.run("ip", "-batch", "-", text="\n".join(lines) + "\n")

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Be inside for a moment, to make a socket that stays there."""
        with _returning():
            _check(_libc.setns(self._fd, CLONE_NEWNET), "setns")
            yield

    def call(self, function: Callable[[], T]) -> T:
        """Run `function` in a forked child inside the namespace and return its (picklable) result.

        A child, because a library that opens netlink sockets keeps them in the namespace where it opened them, and
        because what it measures there starts from the same memory each time. Raises RuntimeError with the child's
        traceback.
        """
        read_end, write_end = os.pipe()
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            os.close(read_end)
            _answer(write_end, lambda: self._inside(function))
        os.close(write_end)
        with os.fdopen(read_end, "rb") as pipe:
            answer = pipe.read()
        os.waitpid(pid, 0)
        if not answer:
            raise RuntimeError("the child in the namespace ended without an answer")
        ok, value = pickle.loads(answer)  # noqa: S301  # our own child wrote it
        if not ok:
            raise RuntimeError(f"in the namespace: {value}")
        return value  # type: ignore[no-any-return]  # what `function` returned

    def _inside(self, function: Callable[[], T]) -> T:
        _check(_libc.setns(self._fd, CLONE_NEWNET), "setns")
        return function()

    def close(self) -> None:
        """Let the kernel take it down."""
        os.close(self._fd)


@contextlib.contextmanager
def _returning() -> Iterator[None]:
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield
    finally:
        _check(_libc.setns(home, CLONE_NEWNET), "setns")
        os.close(home)


def _answer(write_end: int, function: Callable[[], Any]) -> None:
    """The whole life of a child of `call`: never returns into the caller's code."""
    status = 0
    try:
        answer: tuple[bool, Any] = (True, function())
    except BaseException:  # noqa: BLE001  # the parent raises it, whatever it is
        answer, status = (False, traceback.format_exc()), 1
    with os.fdopen(write_end, "wb") as pipe:
        pickle.dump(answer, pipe)
    os._exit(status)
