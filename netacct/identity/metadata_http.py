"""A small HTTP client for the metadata servers of clouds: plain HTTP to a link-local address, one connection.

No proxies, no redirects, no names to resolve, a limit for time and size; whatever goes wrong is a value, no exception.
A request can be interrupted from another thread, because Google's long-polls last a minute.

`https.py` has the client for kubelets and API servers. They share no code, because they differ in all that is more than
http.client: this one keeps its connection, tries several addresses, has one deadline from connecting to the last byte,
and takes an answer whole; that one has TLS with pinned certificates, a connection per request, and bodies that are
streams without an end.
"""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import ipaddress
import math
import re
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

TIMEOUT = 5.0
"""Seconds from the beginning of a request to the last byte of its answer."""

SIZE_LIMIT = 1 << 20
"""Bytes of an answer's body; a node with hundreds of addresses has 50 kB."""

_RETRY_LIMIT = 600.0
"""Seconds; no server may ask for more patience."""

_URL = re.compile(r"http://(?:\[([0-9A-Fa-f:.]+)\]|([0-9.]+))(?::(\d{1,5}))?/?")


class Base(NamedTuple):
    """Where a server is: an IPv4 or IPv6 address, and a port."""

    host: str
    port: int


class Answer(NamedTuple):
    """What came back.

    `status` is 0 where no whole answer came, and `fault` says then, in words, why. `retry_after` are the seconds that
    the server asked for (Retry-After, RFC 9110 10.2.3), None where it did not. Names of `headers` are in lower case.
    """

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = {}
    fault: str = ""
    retry_after: float | None = None

    @property
    def why(self) -> str:
        """What is wrong with an answer that is not 200, in words."""
        return self.fault or f"the server answered {self.status} {http.client.responses.get(self.status, '')}".rstrip()


def base(url: str) -> Base:
    """`http://ADDRESS[:PORT]`, an IPv6 address in brackets. Else raises ValueError.

    An address and no name, because a name would let the agent's start depend on DNS.
    """
    match = _URL.fullmatch(url)
    if match is None or not 0 < int(match[3] or 80) < 65536:
        raise ValueError(url)
    return Base(str(ipaddress.ip_address(match[1] or match[2])), int(match[3] or 80))


class MetadataClient:
    """Asks one server, which may have several addresses.

    Args:
        urls: where it is (`base` says in which form); after no answer from one of them the next one is asked.
        timeout: seconds that a request may take.
    """

    def __init__(self, urls: Sequence[str], timeout: float = TIMEOUT) -> None:
        self._bases = [base(url) for url in urls]
        self._timeout = timeout
        self._end = math.inf
        self._connection: _Connection | None = None
        self._interrupted = False

    def expire(self, seconds: float) -> None:
        """Let every request fail that is not answered in so many seconds from now on."""
        self._end = time.monotonic() + seconds

    def request(
        self, path: str, headers: Mapping[str, str], method: str = "GET", timeout: float | None = None
    ) -> Answer:
        """Ask, and wait for the whole answer. `timeout` is for this request only."""
        deadline = min(self._end, time.monotonic() + (self._timeout if timeout is None else timeout))
        while True:
            reused = self._connection is not None
            try:
                return self._exchange(method, path, headers, deadline)
            except (OSError, http.client.HTTPException, ValueError) as error:
                self.close()
                if self._interrupted:
                    return Answer(0, fault="interrupted")
                if reused and isinstance(error, ConnectionError):
                    continue  # the server had closed an idle connection, which shows only when it is used
                self._bases.append(self._bases.pop(0))
                return Answer(0, fault=_words(error))

    def close(self) -> None:
        """Close the connection; the next request opens another one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def interrupt(self) -> None:
        """End the present request, and let every later one fail at once. From any thread."""
        self._interrupted = True
        connection = self._connection
        if connection is not None:
            connection.interrupt()

    def _exchange(self, method: str, path: str, headers: Mapping[str, str], deadline: float) -> Answer:
        if self._connection is None:
            self._connection = _Connection(self._bases[0])
        connection = self._connection
        connection.deadline = deadline
        if self._interrupted:
            raise ConnectionAbortedError
        connection.request(method, path, headers=dict(headers))
        response = connection.getresponse()
        body = response.read(SIZE_LIMIT + 1)
        if len(body) > SIZE_LIMIT:
            raise ValueError(f"the answer is longer than {SIZE_LIMIT} bytes")
        if response.length:
            raise http.client.IncompleteRead(body, response.length)
        found = {name.lower(): value for name, value in response.getheaders()}
        if response.will_close:
            self.close()
        return Answer(response.status, body, found, retry_after=_seconds(found.get("retry-after", "")))


class _Connection(http.client.HTTPConnection):
    """A connection with one deadline for all that happens on it, however slowly the bytes trickle."""

    def __init__(self, base: Base) -> None:
        super().__init__(base.host, base.port)
        self._family = socket.AF_INET6 if ":" in base.host else socket.AF_INET
        self._open: _Socket | None = None
        self.deadline = 0.0

    def connect(self) -> None:
        self._open = made = _Socket(self, self._family)
        self.sock = made
        made.limit()
        made.connect((self.host, self.port))
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def interrupt(self) -> None:
        if self._open is not None:
            with contextlib.suppress(OSError):  # not connected, or closed meanwhile
                self._open.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        super().close()
        if self._open is not None:
            self._open.close()


class _Socket(socket.socket):
    """A socket that waits no longer than to its connection's deadline."""

    def __init__(self, connection: _Connection, family: int) -> None:
        super().__init__(family, socket.SOCK_STREAM)
        self._of = connection

    def limit(self) -> None:
        left = self._of.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self.settimeout(left)

    def recv_into(self, *args: Any, **kwargs: Any) -> int:
        self.limit()
        return super().recv_into(*args, **kwargs)

    def sendall(self, *args: Any) -> None:
        self.limit()
        super().sendall(*args)


def _words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, http.client.IncompleteRead):
        return "the answer ended too soon"
    if isinstance(error, http.client.RemoteDisconnected):
        return "the server closed the connection without an answer"
    if isinstance(error, http.client.HTTPException):
        return "the answer is not HTTP"
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


def _seconds(text: str) -> float | None:
    """Retry-After in seconds: a number, or a date of HTTP."""
    try:
        seconds = float(text) if text.isdecimal() else email.utils.parsedate_to_datetime(text).timestamp() - time.time()
    except ValueError:
        return None
    return min(max(0.0, seconds), _RETRY_LIMIT)
