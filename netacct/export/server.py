"""A small HTTP/1.1 server on the standard library, in which no client can hold up another one.

One thread accepts; each connection has a thread of its own, of which there are only so many. When all are taken, the
connection that has waited longest for its client makes room, so idle and slow clients cost nobody else an answer; only
when every thread is at work does a newcomer get 503.
"""

from __future__ import annotations

import contextlib
import itertools
import selectors
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from email.utils import formatdate
from http import HTTPStatus

from netacct.export import wire
from netacct.export.connection import DEFAULT_LIMITS, Connection, Limits, State
from netacct.export.endpoints import Handler
from netacct.export.listen import ListenAddress, open_listeners
from netacct.export.quiet import Log, Sparingly, no_log
from netacct.export.wire import BadRequestError, Request, Response

_METHODS = ("GET", "HEAD")
_BREATH = 0.1  # seconds without accepting after the kernel refused a descriptor or a thread
_GRACE = 0.6  # seconds that a response in the making gets when the server stops
_STOP = 0.9  # seconds after which stop() returns, come what may


class Server:
    """Serves handlers by path on all addresses, from `start` to `stop`.

    Args:
        addresses: where to listen.
        routes: path -> handler. A handler runs in the thread of its connection, several at once.
        log: told about handlers that raise and about a kernel that refuses a connection, at most once a minute each.
        limits: what one client may take.
    """

    def __init__(
        self,
        addresses: Sequence[ListenAddress],
        routes: Mapping[str, Handler],
        log: Log = no_log,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self._wanted = addresses
        self._routes = routes
        self._log = Sparingly(log, time.monotonic)
        self._limits = limits
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        self._connections: set[Connection] = set()
        self._stopping = threading.Event()
        self._listeners: list[socket.socket] = []
        self._wake: socket.socket | None = None
        self._acceptor: threading.Thread | None = None

    @property
    def addresses(self) -> list[ListenAddress]:
        """Where it listens now, with the ports that the kernel chose."""
        return [ListenAddress(*listener.getsockname()[:2]) for listener in self._listeners]

    def start(self) -> None:
        """Listen and serve. Raises NetacctError, with nothing left open, where an address cannot be had."""
        self._listeners = open_listeners(self._wanted)
        self._wake, woken = socket.socketpair()
        self._acceptor = threading.Thread(target=self._accept_all, args=(woken,), name="netacct-http", daemon=True)
        self._acceptor.start()

    def stop(self) -> None:
        """Accept nobody any more, let responses in the making finish, and be gone within a second."""
        deadline = time.monotonic() + _STOP
        self._stopping.set()
        if self._wake is None or self._acceptor is None:
            return
        self._wake.close()
        self._acceptor.join(_STOP)
        self._interrupt(State.READING)
        self._wait_until_empty(deadline - (_STOP - _GRACE))
        self._interrupt(*State)
        self._wait_until_empty(deadline)
        self._wake = None

    def _interrupt(self, *states: State) -> None:
        with self._changed:
            for connection in self._connections:
                if connection.state in states:
                    connection.interrupt()

    def _wait_until_empty(self, deadline: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._connections, max(0.0, deadline - time.monotonic()))

    def _accept_all(self, woken: socket.socket) -> None:
        with selectors.DefaultSelector() as selector:
            for ready in (woken, *self._listeners):
                selector.register(ready, selectors.EVENT_READ)
            while not self._stopping.is_set():
                self._accept(key.fileobj for key, _ in selector.select() if key.fileobj is not woken)
        for opened in (woken, *self._listeners):
            opened.close()

    def _accept(self, ready: Iterable[object]) -> None:
        for listener in ready:
            try:
                assert isinstance(listener, socket.socket)
                self._admit(listener.accept()[0])
            except (BlockingIOError, ConnectionAbortedError):
                continue  # the client left between our being told and our asking
            except (OSError, RuntimeError) as error:
                # No descriptor or no thread to be had. Closing an idle connection frees one of each.
                self._log("a connection could not be accepted", error=repr(error))
                with self._changed:
                    self._evict()
                self._stopping.wait(_BREATH)

    def _admit(self, sock: socket.socket) -> None:
        """Give the connection a thread, or refuse it. Raises RuntimeError where the kernel has no thread for it."""
        connection = Connection(sock, self._limits)
        name = f"netacct-http-{next(self._numbers)}"
        thread = threading.Thread(target=self._serve, args=(connection,), name=name, daemon=True)
        with self._changed:
            room = len(self._connections) < self._limits.connections or self._evict()
            if room:
                self._connections.add(connection)
        if not room:
            self._refuse(sock)
            return
        try:
            thread.start()
        except RuntimeError:
            self._forget(connection)
            raise

    def _evict(self) -> bool:
        """End the connection that has waited longest for its client, if one waits. The lock must be held."""
        waiting = [c for c in self._connections if c.state is not State.ANSWERING and not c.interrupted]
        if not waiting:
            return False
        min(waiting, key=lambda connection: connection.since).interrupt()
        return True

    def _refuse(self, sock: socket.socket) -> None:
        response = wire.text(HTTPStatus.SERVICE_UNAVAILABLE, "too many connections: try again later")
        with contextlib.suppress(OSError), sock:
            sock.setblocking(False)
            sock.send(wire.serialise(response, formatdate(usegmt=True), close=True))
            sock.shutdown(socket.SHUT_WR)
            sock.recv(wire.MAX_HEAD)  # what is unread when it closes would reset the connection ahead of the response

    def _serve(self, connection: Connection) -> None:
        try:
            self._converse(connection)
        except OSError:
            pass  # the client left, or was too slow, or the server stops
        finally:
            self._forget(connection)

    def _forget(self, connection: Connection) -> None:
        with self._changed:  # closed under the lock: nobody shall interrupt a descriptor that is someone else's already
            self._connections.discard(connection)
            connection.close()
            self._changed.notify_all()

    def _converse(self, connection: Connection) -> None:
        while True:
            connection.enter(State.READING)
            if self._stopping.is_set():  # asked only after the state is told: stop() must not miss this connection
                return
            try:
                head = connection.read_head()
                if head is None:
                    return
                connection.enter(State.ANSWERING)
                request = wire.parse(head)
            except BadRequestError as error:
                connection.write(_serialise(wire.text(error.status), close=True))
                break
            response = self._answer(request)
            close = self._stopping.is_set() or not request.reusable
            connection.write(_serialise(response, close=close, head_only=request.method == "HEAD"))
            if close:
                break
        if not self._stopping.is_set():
            connection.linger()

    def _answer(self, request: Request) -> Response:
        handler = self._routes.get(request.path)
        if handler is None:
            return wire.text(HTTPStatus.NOT_FOUND)
        if request.method not in _METHODS:
            return wire.text(HTTPStatus.METHOD_NOT_ALLOWED, headers=(("Allow", ", ".join(_METHODS)),))
        try:
            return handler(request)
        except Exception as error:  # noqa: BLE001 - whatever it is, the client learns nothing of it and the server goes on
            self._log("a request could not be answered", path=request.path, error=repr(error))
            return wire.text(HTTPStatus.INTERNAL_SERVER_ERROR)


def _serialise(response: Response, *, close: bool, head_only: bool = False) -> bytes:
    return wire.serialise(response, formatdate(usegmt=True), close=close, head_only=head_only)
