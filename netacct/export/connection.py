"""One client's connection: a request head read, a response written, each in a time that the client cannot stretch."""

from __future__ import annotations

import contextlib
import enum
import socket
import time
from dataclasses import dataclass
from http import HTTPStatus

from netacct.export.wire import HEAD_END, MAX_HEAD, BadRequestError

_CHUNK = 8192
_LINGER_SECONDS = 0.5
_LINGER_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """What clients may take. Seconds are for the whole of a thing, however the client portions it.

    Args:
        connections: open at once, by all clients together.
        head_seconds: for a request head, from the connection or from its first byte on.
        idle_seconds: between two requests.
        write_seconds: for taking a response.
    """

    connections: int = 100
    head_seconds: float = 5.0
    idle_seconds: float = 120.0  # above the usual scrape intervals, so that Prometheus keeps its connection
    write_seconds: float = 10.0


DEFAULT_LIMITS = Limits()


class State(enum.Enum):
    """What a connection's thread does."""

    READING = enum.auto()  # waits for the client
    ANSWERING = enum.auto()  # works for it
    WRITING = enum.auto()  # waits for the client to take the response


class Connection:
    """Reads and writes one socket. One thread owns it; others only `interrupt` it and look at its state."""

    def __init__(self, sock: socket.socket, limits: Limits) -> None:
        self._sock = sock
        self._limits = limits
        self._buffer = bytearray()
        self._first = True
        self.interrupted = False
        self.enter(State.READING)
        # A response is one send; without this its last segment can wait 40 ms for a delayed ACK.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def enter(self, state: State) -> None:
        """Note what the thread does from now on."""
        self.state = state
        self.since = time.monotonic()

    def read_head(self) -> bytes | None:
        """The next request head, without its empty line; None where the client left, or never began.

        Raises BadRequestError for a head that is too long or takes too long, and OSError where the connection broke.
        """
        patience = self._limits.head_seconds if self._first else self._limits.idle_seconds
        self._first = False
        begun = bool(self._buffer)
        deadline = time.monotonic() + (self._limits.head_seconds if begun else patience)
        while (end := self._head_end()) < 0:
            if len(self._buffer) > MAX_HEAD:
                raise BadRequestError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
            if begun and time.monotonic() > deadline:  # also for a client that never lets a recv time out
                raise BadRequestError(HTTPStatus.REQUEST_TIMEOUT)
            if not self._receive(deadline, begun=begun):
                return None
            if not begun:
                begun = True
                deadline = min(deadline, time.monotonic() + self._limits.head_seconds)
        head = bytes(self._buffer[:end])
        del self._buffer[: end + len(HEAD_END)]
        return head

    def _head_end(self) -> int:
        """Where the head in the buffer ends, or -1. Empty lines ahead of it are dropped (RFC 9112, section 2.2)."""
        if self._buffer.startswith(b"\r\n"):
            self._buffer = self._buffer.lstrip(b"\r\n")
        return self._buffer.find(HEAD_END)

    def _receive(self, deadline: float, *, begun: bool) -> bool:
        """Whether more has come."""
        try:
            # A timeout of 0 would mean "do not wait", and raise BlockingIOError.
            self._sock.settimeout(max(deadline - time.monotonic(), 0.001))
            data = self._sock.recv(_CHUNK)
        except TimeoutError:
            if begun:
                raise BadRequestError(HTTPStatus.REQUEST_TIMEOUT) from None
            return False
        self._buffer += data
        return bool(data)

    def write(self, data: bytes) -> None:
        """Send it all. Raises OSError where the client left or did not take it in time."""
        self.enter(State.WRITING)
        self._sock.settimeout(self._limits.write_seconds)
        self._sock.sendall(data)  # the timeout is for the whole of it (Python, socket.sendall)

    def linger(self) -> None:
        """Let the client read the last response: closing on bytes not yet read would reset the connection under it."""
        self.enter(State.READING)
        deadline = time.monotonic() + _LINGER_SECONDS
        drained = 0
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
            while drained < _LINGER_BYTES and (left := deadline - time.monotonic()) > 0:
                self._sock.settimeout(left)
                data = self._sock.recv(_CHUNK)
                if not data:
                    return
                drained += len(data)

    def interrupt(self) -> None:
        """End it from another thread: whatever the owner waits for returns or raises at once."""
        self.interrupted = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()
