"""Dumps over a socket whose other end plays the kernel: what is asked again, and when that ends."""

from __future__ import annotations

import errno
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from netacct import rtnetlink
from netacct.rtnetlink import Message

# linux/netlink.h
HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
DUMP_INTR, DONE = 0x10, 3


class Kernel:
    """Answers each dump with one message of two bytes, the number of the dump; the first ones are interrupted."""

    def __init__(self) -> None:
        self.channel, self._end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.interrupted = 0
        self.error = 0
        self.asked = 0
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()

    def close(self) -> None:
        """End the thread and close both ends."""
        self.channel.close()
        self._thread.join()
        self._end.close()

    def _answer(self) -> None:
        while request := self._end.recv(4096):
            _length, kind, _flags, sequence, _port = HEADER.unpack_from(request)
            self.asked += 1
            flags = DUMP_INTR if self.asked <= self.interrupted else 0
            body = struct.pack("=Hxx", self.asked)
            self._end.send(
                HEADER.pack(HEADER.size + len(body), kind, flags, sequence, 0)
                + body
                + HEADER.pack(HEADER.size + 4, DONE, flags, sequence, 0)
                + struct.pack("=i", -self.error)
            )


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    """One that interrupts nothing yet."""
    made = Kernel()
    yield made
    made.close()


def test_an_interrupted_dump_is_told(kernel: Kernel) -> None:
    """A dump that may have missed something gives None, and one that has not gives what came."""
    kernel.interrupted = 1
    assert rtnetlink.dump(kernel.channel, 22, b"") is None
    assert rtnetlink.dump(kernel.channel, 22, b"") == (Message(22, struct.pack("=Hxx", 2)),)


def test_a_dump_is_asked_anew_until_it_is_whole(kernel: Kernel) -> None:
    """Only the answer of the first dump that nothing interrupted counts."""
    kernel.interrupted = 4
    assert rtnetlink.dump_whole(kernel.channel, 22, b"") == (Message(22, struct.pack("=Hxx", 5)),)
    assert kernel.asked == 5


def test_dumps_that_are_always_interrupted_are_an_error(kernel: Kernel) -> None:
    """Asking anew ends after five dumps, with an error that says why."""
    kernel.interrupted = 1000
    with pytest.raises(OSError, match="changed during each of 5 dumps"):
        rtnetlink.dump_whole(kernel.channel, 22, b"")
    assert kernel.asked == 5


def test_a_dump_that_broke_off_is_an_error(kernel: Kernel) -> None:
    """What the kernel could not list to its end (an entry that fits in no message) is taken for no whole list."""
    kernel.error = errno.EMSGSIZE
    with pytest.raises(OSError, match="Message too long"):
        rtnetlink.dump_whole(kernel.channel, 22, b"")
    kernel.error = 0
    assert rtnetlink.dump_whole(kernel.channel, 22, b"") == (Message(22, struct.pack("=Hxx", 2)),)
