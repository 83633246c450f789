"""One request by HTTPS that another thread can end, for the sources that ask a kubelet or an API server.

The standard library's http.client, with what it lacks here: the address that is asked may differ from the name that the
certificate must have, a certificate can be pinned, an answer has a deadline as a whole, and whoever waits can be woken:
a thread that blocks in a read would hold up the end of the agent. (Metadata servers of clouds have a client of their
own, `metadata_http.py`, which says why.)
"""

from __future__ import annotations

import contextlib
import http.client
import io
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from netacct import plainfile
from netacct.errors import NetacctError
from netacct.identity.apart import Apart

CONNECT_SECONDS = 4.0
"""For each connection, and for the TLS handshake."""

RESOLVE_SECONDS = 15.0
"""For a name: resolver(3) waits five for a first server that is away, before it asks the next."""

CHUNK = 65536

_KEEPALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))
"""A peer that vanished without a word is noticed after a minute (tcp(7))."""

_CERTIFICATE_SIZE = 1 << 20

_NO_CHECK_TIME = 0x200000  # X509_V_FLAG_NO_CHECK_TIME, openssl/x509_vfy.h: the ssl module has no name for it


Resolved: TypeAlias = tuple[socket.AddressFamily, socket.SocketKind, int, str, Any]
"""What socket.getaddrinfo says of one address."""


class UnreachableError(NetacctError):
    """Nobody answered, or not who was meant, or not to the end; says what happened, in words."""


class EndedError(NetacctError):
    """The exchange was ended from another thread."""


@dataclass(frozen=True, slots=True)
class Server:
    """Whom to ask, and how to know that it is the right one.

    `name` is what its certificate must be for (a DNS name or an address); "" where `pinned` is enough. `pinned` is the
    one certificate (DER) that it must show, b"" for any that `tls` verifies. Without `tls` it is plain HTTP.
    """

    address: str
    port: int
    name: str = ""
    tls: ssl.SSLContext | None = None
    pinned: bytes = b""

    def __str__(self) -> str:
        """As a URL, for messages."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}"


def trust(ca_file: str = "", certificate: str = "", key: str = "") -> ssl.SSLContext:
    """A context that verifies the server, always, and shows the client's certificate where there is one.

    Args:
        ca_file: who is trusted (PEM); a certificate in it is trusted also where its issuer is not in it. Without it,
            the system's authorities are.
        certificate: file of the client's certificate, which may hold the key as well.
        key: file of its key, "" where `certificate` holds it.

    Raises:
        UnreachableError: a file cannot be used; names it.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        if ca_file:
            plainfile.require(ca_file)
            context.load_verify_locations(ca_file)
        else:
            context.load_default_certs()
    except OSError as error:
        raise UnreachableError(f"{ca_file} cannot be used to verify the server: {_words(error)}") from error
    try:
        for path in filter(None, (certificate, key)):
            plainfile.require(path)
        if certificate:
            context.load_cert_chain(certificate, key or None, password="")  # else OpenSSL asks a terminal for one
    except OSError as error:
        files = f"{certificate} and {key}" if key else certificate
        raise UnreachableError(f"{files} cannot be used as the client's certificate: {_words(error)}") from error
    return context


def pinned(server: Server, certificate: bytes) -> Server:
    """The same server, which must show exactly this certificate (DER), whatever name and dates are in it.

    Its context must trust the certificate. A kubelet never renews a certificate that it made itself.
    """
    assert server.tls is not None
    server.tls.check_hostname = False
    server.tls.verify_flags |= _NO_CHECK_TIME
    return replace(server, pinned=certificate)


def first_certificate(path: str) -> bytes:
    """The first certificate (DER) of a PEM file, which is the owner's own. Raises UnreachableError."""
    try:
        with open(path, encoding="ascii", errors="replace", opener=plainfile.opener) as file:
            text = file.read(_CERTIFICATE_SIZE)
        begin = text.index(ssl.PEM_HEADER)
        end = text.index(ssl.PEM_FOOTER, begin) + len(ssl.PEM_FOOTER)
        return ssl.PEM_cert_to_DER_cert(text[begin:end])
    except OSError as error:
        raise UnreachableError(f"{path} cannot be read: {_words(error)}") from error
    except ValueError as error:
        raise UnreachableError(f"{path} holds no certificate") from error


class Answer:
    """A server's answer, whose body has yet to be read: from one thread, once."""

    def __init__(self, response: http.client.HTTPResponse, exchange: Exchange, server: Server) -> None:
        self.status: int = response.status
        self.headers = response.headers
        self._response, self._exchange, self._server = response, exchange, server

    def chunks(self, deadline: float, limit: float) -> Iterator[bytes]:
        """The body as it comes, in pieces of up to 64 KiB.

        Args:
            deadline: seconds of time.monotonic() by which it must be whole.
            limit: bytes that it may have; math.inf for any number.

        Raises:
            UnreachableError: it broke off in the middle of a chunk, is too long, or not whole in time.
            EndedError: see `Exchange.end`.
        """
        size = 0
        while True:
            with self._exchange.told(self._server):
                self._exchange.wait_until(deadline)
                chunk = self._response.read1(CHUNK)
            if not chunk:
                return
            size += len(chunk)
            if size > limit:
                raise UnreachableError(f"{self._server} answers with more than {limit} bytes")
            yield chunk

    def text(self, limit: int = 1000) -> str:
        """The beginning of the body in one line, for a message."""
        with contextlib.suppress(NetacctError), self._exchange.told(self._server):
            self._exchange.wait_until(time.monotonic() + CONNECT_SECONDS)
            return " ".join(self._response.read1(limit).decode(errors="replace").split())
        return ""


class Exchange:
    """Requests, one after the other, each on a connection of its own; `end` may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._deadline = 0.0
        self._ended = False

    def get(self, server: Server, path: str, headers: Mapping[str, str], seconds: float) -> Answer:
        """Ask, and return when the answer's head is there. What was open before is closed.

        Args:
            server: whom.
            path: with the query.
            headers: besides Host.
            seconds: how long to wait for the head.

        Raises:
            UnreachableError: no head came.
            EndedError: see `end`.
        """
        self.close()
        if not all(value.isascii() and value.isprintable() for value in headers.values()):
            # http.client would say so, with the token in its words.
            raise UnreachableError(f"{server} is not asked: the token is not one line of ASCII")
        with self.told(server):
            self._connect(server)
            self.wait_until(time.monotonic() + seconds)
            connection = http.client.HTTPConnection(server.name or server.address, server.port)
            connection.sock = _Connected(self)
            connection.request("GET", path, headers=dict(headers))
            return Answer(connection.getresponse(), self, server)

    def end(self) -> None:
        """Wake whoever waits for an answer, now and ever after, with EndedError."""
        with self._lock:
            self._ended = True
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # TLS says no goodbye: it could block

    def has_ended(self) -> bool:
        """Whether `end` was called."""
        return self._ended

    def close(self) -> None:
        """Close the connection, for the thread that asks."""
        with self._lock:
            if self._socket is not None:
                self._socket.close()
                self._socket = None

    def wait_until(self, deadline: float) -> None:
        """All reads together last no longer than that (seconds of time.monotonic()). Raises TimeoutError."""
        self._deadline = deadline
        self._open()

    def send(self, data: bytes) -> None:
        """Send all, for http.client."""
        self._open().sendall(data)

    def receive(self, buffer: memoryview) -> int:
        """Receive what is there, 0 bytes at the end, for http.client."""
        return self._open().recv_into(buffer)

    @contextlib.contextmanager
    def told(self, server: Server) -> Iterator[None]:
        """Turns whatever goes wrong inside into UnreachableError, or EndedError after `end`."""
        try:
            yield
        except (OSError, ValueError, http.client.HTTPException) as error:
            if self._ended:
                raise EndedError("ended") from error
            raise UnreachableError(f"{server} {_trouble(error)}") from error

    def _open(self) -> socket.socket:
        """The connection, which waits no longer than to the deadline, however slowly the bytes trickle."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        used = self._socket
        if used is None:
            raise ConnectionError("closed")
        used.settimeout(left)
        return used

    def _connect(self, server: Server) -> None:
        error: OSError = ConnectionError("has no address")
        for family, kind, protocol, _, address in self._resolve(server):
            plain = socket.socket(family, kind, protocol)
            try:
                self._use(plain)
                plain.settimeout(CONNECT_SECONDS)
                plain.connect(address)
                plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option, value in _KEEPALIVE:
                    plain.setsockopt(socket.IPPROTO_TCP, option, value)
            except OSError as failure:
                self.close()
                error = failure
                continue
            self._secure(server, plain)
            return
        raise error

    def _resolve(self, server: Server) -> Sequence[Resolved]:
        """The addresses of a server: resolver(3) may take half a minute for a name. Raises OSError and ValueError."""
        ask = partial(socket.getaddrinfo, server.address, server.port, type=socket.SOCK_STREAM)
        try:
            return ask(flags=socket.AI_NUMERICHOST)
        except socket.gaierror:
            return Apart(ask, "resolver").wait(RESOLVE_SECONDS, self.has_ended)

    def _secure(self, server: Server, plain: socket.socket) -> None:
        if server.tls is None:
            return
        secure = server.tls.wrap_socket(plain, server_hostname=server.name or None, do_handshake_on_connect=False)
        self._use(secure)
        secure.do_handshake()
        if server.pinned and secure.getpeercert(binary_form=True) != server.pinned:
            raise ssl.SSLCertVerificationError("it shows another certificate than the pinned one")

    def _use(self, used: socket.socket) -> None:
        with self._lock:
            self._socket = used
            if self._ended:
                raise ConnectionError("ended")


class _Connected:
    """As much of a socket as http.client needs of one that is connected already, and that others close."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(_Received(self._exchange))

    def sendall(self, data: bytes) -> None:
        self._exchange.send(data)

    def close(self) -> None:
        pass


class _Received(io.RawIOBase):
    """What comes, as a file."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._exchange.receive(buffer)


def _trouble(error: Exception) -> str:
    """What happened, to go on after the server's name."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"is not trusted: {getattr(error, 'verify_message', '') or error}"
    if isinstance(error, TimeoutError):
        return "did not answer in time"
    if isinstance(error, OSError):
        return f"cannot be reached: {_words(error)}"
    if isinstance(error, UnicodeError):
        return "has a name that cannot be resolved"
    if isinstance(error, http.client.IncompleteRead):
        return "broke off in the middle of its answer"
    return f"answers in no form of HTTP: {type(error).__name__}: {str(error)[:100]}"


def _words(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return error.reason or str(error)
    return error.strerror or str(error)
