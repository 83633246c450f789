"""Following the kernel's links and routes, for who draws conclusions from those that lead to pods.

Pods' routes, kept by messages of the kernel, and a thread that keeps them.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from netacct import routes as routing
from netacct import rtnetlink
from netacct.errors import NetacctError
from netacct.identity.source import Health
from netacct.routes import Link, Route
from netacct.rtnetlink import Message, Overrun
from netacct.sleeper import Sleeper, Why

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

POLL = 300.0
"""Seconds between full dumps when nothing was signalled."""

T = TypeVar("T")


class PodRoutes(Generic[T]):
    """Routes and the pods' interfaces, kept by messages of the kernel. No I/O.

    IPv4 routes of an interface that goes down vanish without a message of their own (net/ipv4/fib_trie.c,
    fib_table_flush), so the interface's message stands for them.

    Args:
        of_link: what there is to know of an interface; None where it is no pod's.
        wanted: which routes to keep.

    Attributes:
        links: what is known of each pod's interface, by its number.
        routes: those to keep.
    """

    def __init__(self, of_link: Callable[[Link], T | None], wanted: Callable[[Route], bool]) -> None:
        self._of_link, self._wanted = of_link, wanted
        self.links: dict[int, T] = {}
        self.routes: dict[Route, None] = {}

    def take(self, messages: Iterable[Message]) -> None:
        """Note what messages of a dump or of events say about links and routes."""
        for message in messages:
            if message.kind in (routing.RTM_NEWLINK, routing.RTM_DELLINK):
                self._link(routing.link(message), gone=message.kind == routing.RTM_DELLINK)
            elif message.kind in (routing.RTM_NEWROUTE, routing.RTM_DELROUTE):
                self._route(routing.route(message), gone=message.kind == routing.RTM_DELROUTE)

    def _link(self, link: Link | None, *, gone: bool) -> None:
        if link is None:
            return
        known = None if gone else self._of_link(link)
        if known is None:
            self.links.pop(link.number, None)
        else:
            self.links[link.number] = known
        if gone or not link.up:
            self.routes = {route: None for route in self.routes if route.link != link.number}

    def _route(self, route: Route | None, *, gone: bool) -> None:
        if route is None:
            return
        if gone:
            self.routes.pop(route, None)
        elif self._wanted(route):
            self.routes[route] = None


def is_host_route(route: Route) -> bool:
    """Whether it leads to one address through an interface."""
    to_one = route.network.prefixlen == route.network.max_prefixlen
    return to_one and route.kind == routing.RTN_UNICAST and bool(route.link)


class RouteFollower(Generic[T]):
    """Follows links and routes in the network namespace of the thread that calls `look`.

    Args:
        make: an empty `PodRoutes`.
        changed: called in the thread after each look and each change.
        name: of the thread.
        logger: where failures go.
        poll: seconds between full dumps when nothing was signalled.
        debounce: seconds between the first change and the word about it.

    Attributes:
        known: the routes of now. For the thread, or before there is one.
    """

    def __init__(
        self,
        make: Callable[[], PodRoutes[T]],
        changed: Callable[[], None],
        name: str,
        logger: FilteringBoundLogger,
        poll: float = POLL,
        debounce: float = 0.0,
    ) -> None:
        self._make, self._changed, self._poll, self._debounce = make, changed, poll, debounce
        self.known = make()
        self._health = Health(up=False, reason="not started")
        self._sleeper = Sleeper(name)
        self._log = logger
        self._events: socket.socket
        self._requests: socket.socket

    def look(self) -> None:
        """Subscribe and look once. Raises NetacctError where the kernel refuses."""
        try:
            self._events = rtnetlink.connect(routing.GROUPS)
            self._requests = rtnetlink.connect()
        except OSError as error:
            raise NetacctError(f"cannot follow links and routes: {error.strerror}") from error
        self._look()

    def follow(self) -> None:
        """Follow in a thread, after `look`."""
        self._sleeper.start(partial(self._follow, self._events, self._requests))

    def wake(self) -> None:
        """Let the thread call `changed`. From any thread, also before there is one."""
        self._sleeper.wake()

    def stop(self) -> None:
        """End the thread; nothing is told any more once this returned. Idempotent."""
        self._sleeper.stop()

    def healthy(self) -> Health:
        """Unhealthy, with the error, while links and routes cannot be listed."""
        return self._health

    def _follow(self, events: socket.socket, requests: socket.socket) -> None:
        with events, requests:
            while (why := self._sleeper.sleep(self._poll, events.fileno())) is not Why.STOP:
                if why is Why.READABLE and self._debounce:
                    time.sleep(self._debounce)
                try:
                    self.known.take(rtnetlink.pending(events))
                    if why is Why.DUE:
                        self._look()
                except Overrun:
                    self._look()
                self._changed()

    def _look(self) -> None:
        """List everything anew; what was known holds where that fails. Events that come meanwhile are taken after."""
        found = self._make()
        try:
            found.take(routing.dump(self._requests))
        except OSError as error:
            reason = f"cannot list links and routes: {error.strerror or error}"
            if self._health.reason != reason:
                self._log.error("cannot list links and routes, what is known of them holds", error=str(error))
            self._health = Health(up=False, reason=reason)
            return
        self.known, self._health = found, Health(up=True)
