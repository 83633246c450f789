"""Local ranges from the kernel's routes: each address that is reached through a pod's veth, and what is local by alias.

Routing CNIs (Calico, AWS, Azure in transparent mode, Cilium with endpoint routes, ptp) put one host route (/32, /128)
per pod on the node, before the pod's containers start. So its address is counted from the first packet, also where no
source will ever name its owner.

    by name     veths that such a CNI made, by how it names them: `cali`, `eni` or `azv` and eleven hex digits (see
                veth.py), `lxc` and twelve (Cilium, Endpoint2IfName)
    any veth    on request: another one is perhaps no pod's, but a container's of LXD
    local       routes of type local and protocol 66, which Google's guest agent makes for alias IP ranges
                (GoogleCloudPlatform/guest-agent, google_guest_agent/addresses.go). It makes them for the addresses of
                load balancers as well, which are no pod's: hence those to a single address do not count.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Iterable
from functools import partial

from netacct import log, rtnetlink
from netacct import routes as routing
from netacct.errors import NetacctError
from netacct.identity.ranges_provider import Fact, Told
from netacct.identity.source import Health
from netacct.model import Network
from netacct.policy import canonical, local_range_fault
from netacct.routes import Link, Route
from netacct.rtnetlink import Message, Overrun
from netacct.sleeper import Sleeper, Why

PROVIDER = "rtnetlink"

POLL = 300.0
"""Seconds between full dumps when nothing was signalled."""

DEBOUNCE = 0.02
"""Seconds between the first change and the word about it; a pod often gets an address of each family."""

_NAME = re.compile(r"(cali|eni|azv)[0-9a-f]{11}|lxc[0-9a-f]{12}")
_KINDS = ("veth", "netkit")
_GOOGLE = 66  # the guest agent's number in rtm_protocol


class PodRoutes:
    """The routes that lead to this node's pods, kept by messages of the kernel. No I/O.

    IPv4 routes of an interface that goes down vanish without a message of their own (net/ipv4/fib_trie.c,
    fib_table_flush), so the interface's message stands for them.

    Args:
        any_veth: whether a veth needs no CNI's name to be a pod's.
    """

    def __init__(self, *, any_veth: bool) -> None:
        self._any_veth = any_veth
        self._links: set[int] = set()
        self._routes: dict[Route, None] = {}

    def take(self, messages: Iterable[Message]) -> None:
        """Note what messages of a dump or of events say about links and routes."""
        for message in messages:
            if message.kind in (routing.RTM_NEWLINK, routing.RTM_DELLINK):
                self._link(routing.link(message), gone=message.kind == routing.RTM_DELLINK)
            elif message.kind in (routing.RTM_NEWROUTE, routing.RTM_DELROUTE):
                self._route(routing.route(message), gone=message.kind == routing.RTM_DELROUTE)

    def ranges(self) -> tuple[Network, ...]:
        """The local ranges of now, canonical."""
        return canonical(
            route.network
            for route in self._routes
            if (route.kind == routing.RTN_LOCAL or route.link in self._links) and not local_range_fault(route.network)
        )

    def _link(self, link: Link | None, *, gone: bool) -> None:
        if link is None:
            return
        if not gone and link.kind in _KINDS and (self._any_veth or _NAME.fullmatch(link.name)):
            self._links.add(link.number)
        else:
            self._links.discard(link.number)
        if gone or not link.up:
            self._routes = {route: None for route in self._routes if route.link != link.number}

    def _route(self, route: Route | None, *, gone: bool) -> None:
        if route is None:
            return
        to_one = route.network.prefixlen == route.network.max_prefixlen
        pods = to_one and route.kind == routing.RTN_UNICAST and route.link
        alias = not to_one and route.kind == routing.RTN_LOCAL and route.protocol == _GOOGLE
        if gone:
            self._routes.pop(route, None)
        elif pods or alias:
            self._routes[route] = None


class RtnetlinkRanges:
    """Follows links and routes in the network namespace of the thread that calls `start`.

    Args:
        any_veth: whether a veth needs no CNI's name to be a pod's.
        poll: seconds between full dumps when nothing was signalled.
    """

    name = PROVIDER

    def __init__(self, *, any_veth: bool = False, poll: float = POLL) -> None:
        self._any_veth, self._poll = any_veth, poll
        self._routes = PodRoutes(any_veth=any_veth)
        self._ranges: tuple[Network, ...] = ()
        self._changed: Callable[[tuple[Network, ...]], None] = lambda _: None
        self._health = Health(up=False, reason="not started")
        self._sleeper = Sleeper(f"ranges-{self.name}")
        self._log = log.get(source="rtnetlink-ranges")

    def read(self, seconds: float) -> Told:  # noqa: ARG002 -- the kernel keeps nobody waiting
        """What the routes of now say. Raises NetacctError."""
        found = PodRoutes(any_veth=self._any_veth)
        try:
            with rtnetlink.connect() as requests:
                found.take(routing.dump(requests))
        except OSError as error:
            raise NetacctError(f"cannot list links and routes: {error.strerror or error}") from error
        return Told(found.ranges())

    @property
    def facts(self) -> tuple[Fact, ...]:
        """None: what other routes say is not about this node's pods."""
        return ()

    def start(self, changed: Callable[[tuple[Network, ...]], None]) -> tuple[Network, ...]:
        """Subscribe, return the ranges of now, and tell all of them whenever they differ.

        Raises NetacctError where the kernel refuses.
        """
        self._changed = changed
        try:
            events = rtnetlink.connect(routing.GROUPS)
            requests = rtnetlink.connect()
        except OSError as error:
            raise NetacctError(f"cannot follow links and routes: {error.strerror}") from error
        self._look(requests)
        self._ranges = self._routes.ranges()
        self._sleeper.start(partial(self._follow, events, requests))
        return self._ranges

    def wait(self, seconds: float) -> None:
        """Nothing: `start` has the first answer."""

    def stop(self) -> None:
        """End the thread; nothing is told any more once this returned. Idempotent."""
        self._sleeper.stop()

    def healthy(self) -> Health:
        """Unhealthy, with the error, while links and routes cannot be listed."""
        return self._health

    def _follow(self, events: socket.socket, requests: socket.socket) -> None:
        with events, requests:
            while (why := self._sleeper.sleep(self._poll, events.fileno())) is not Why.STOP:
                if why is Why.READABLE:
                    time.sleep(DEBOUNCE)
                try:
                    self._routes.take(rtnetlink.pending(events))
                    if why is Why.DUE:
                        self._look(requests)
                except Overrun:
                    self._look(requests)
                found = self._routes.ranges()
                if found != self._ranges:
                    self._ranges = found
                    self._changed(found)

    def _look(self, requests: socket.socket) -> None:
        """List everything anew; what was known holds where that fails. Events that come meanwhile are taken after."""
        found = PodRoutes(any_veth=self._any_veth)
        try:
            found.take(routing.dump(requests))
        except OSError as error:
            reason = f"cannot list links and routes: {error.strerror or error}"
            if self._health.reason != reason:
                self._log.error("cannot list links and routes, what is known of them holds", error=str(error))
            self._health = Health(up=False, reason=reason)
            return
        self._routes, self._health = found, Health(up=True)
