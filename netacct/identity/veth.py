"""The source `veth`: pods' addresses from the routes that some CNIs put on the node, one per pod.

Calico, the AWS VPC CNI and Azure's CNI in transparent mode give each pod a host route (/32, /128) through a veth whose
name says whose it is: a prefix (`cali`, `eni`, `azv`, or what their configuration makes of it) and the first eleven hex
digits of sha1("NAMESPACE.POD"). A hash can be checked and not read backwards, so this source says something only about
pods that it heard of from another one (`learn`): of those it proves, by the kernel's word alone, which addresses they
have now. The route is there before the CNI's ADD returns, and away before its DEL does.

    calico   libcalico-go/lib/backend/k8s/conversion/workload_endpoint_default.go, VethNameForWorkload
    AWS      amazon-vpc-cni-k8s/pkg/networkutils/names.go, GeneratePodHostVethName (its first interface)
    Azure    azure-container-networking/cni/network/network.go and network/endpoint_linux.go
"""

from __future__ import annotations

import hashlib
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from netacct import clock, log, rtnetlink
from netacct.errors import NetacctError
from netacct.identity.source import Health, Replace, SourceEvent, Update
from netacct.model import Address, Observation
from netacct.rtnetlink import Message, Overrun
from netacct.sleeper import Sleeper, Why

SOURCE = "veth"

POLL = 300.0
"""Seconds between full dumps when nothing was signalled."""

# linux/rtnetlink.h, linux/if_link.h, linux/if.h
_RTM_NEWLINK, _RTM_DELLINK, _RTM_GETLINK = 16, 17, 18
_RTM_NEWROUTE, _RTM_DELROUTE, _RTM_GETROUTE = 24, 25, 26
_RTMGRP_LINK, _RTMGRP_IPV4_ROUTE, _RTMGRP_IPV6_ROUTE = 0x1, 0x40, 0x400
_IFINFOMSG = struct.Struct("=BxHiII")  # family, type, index, flags, change
_RTMSG = struct.Struct("=BBBBBBBBI")  # family, dst_len, src_len, tos, table, protocol, scope, type, flags
_IFLA_IFNAME = 3
_IFF_UP = 0x1
_RTA_DST, _RTA_OIF = 1, 4
_RTN_UNICAST = 1
_RTM_F_CLONED = 0x200

_POD_LINK = re.compile(r".{0,4}([0-9a-f]{11})")
"""A host-side name (of up to 15 bytes, IFNAMSIZ) that can be one of a pod's."""


def digest(namespace: str, name: str) -> str:
    """What the host-side name of a pod's interface ends with, whatever its prefix."""
    return hashlib.sha1(f"{namespace}.{name}".encode(), usedforsecurity=False).hexdigest()[:11]


class Routes:
    """Which address is reached through which pod's interface, kept by messages of the kernel. No I/O.

    IPv4 routes of an interface that goes down vanish without a message of their own (net/ipv4/fib_trie.c,
    fib_table_flush), so the interface's message stands for them.
    """

    def __init__(self) -> None:
        self._links: dict[int, str] = {}
        self._routes: dict[tuple[Address, int], None] = {}

    def take(self, message: Message) -> None:
        """Note what a message says: RTM_NEWLINK, RTM_DELLINK, RTM_NEWROUTE or RTM_DELROUTE, of a dump or an event."""
        if message.kind in (_RTM_NEWLINK, _RTM_DELLINK):
            self._link(message)
        elif message.kind in (_RTM_NEWROUTE, _RTM_DELROUTE):
            self._route(message)

    def owners(self) -> Mapping[Address, str]:
        """The hash of the owner's name for each address that a pod's interface leads to."""
        return {ip: self._links[index] for ip, index in self._routes if index in self._links}

    def _link(self, message: Message) -> None:
        family, _type, index, flags, _change = _IFINFOMSG.unpack_from(message.body)
        if family != socket.AF_UNSPEC:
            return  # a bridge's word about its port (AF_BRIDGE), whose "deleted" means that it left the bridge
        name = rtnetlink.attributes(message.body, _IFINFOMSG.size).get(_IFLA_IFNAME, b"")
        match = _POD_LINK.fullmatch(name.rstrip(b"\0").decode(errors="replace"))
        if message.kind == _RTM_NEWLINK and match:
            self._links[index] = match[1]
        else:
            self._links.pop(index, None)
        if message.kind == _RTM_DELLINK or not flags & _IFF_UP:
            self._routes = {key: None for key in self._routes if key[1] != index}

    def _route(self, message: Message) -> None:
        family, length, _source, _tos, _table, _protocol, _scope, kind, flags = _RTMSG.unpack_from(message.body)
        size = {socket.AF_INET: 4, socket.AF_INET6: 16}.get(family, 0)
        if kind != _RTN_UNICAST or length != size * 8 or flags & _RTM_F_CLONED:
            return
        found = rtnetlink.attributes(message.body, _RTMSG.size)
        ip, index = found.get(_RTA_DST, b""), found.get(_RTA_OIF, b"")
        if len(ip) != size or len(index) != 4:
            return
        key = (ip, struct.unpack("=i", index)[0])
        if message.kind == _RTM_NEWROUTE:
            self._routes[key] = None
        else:
            self._routes.pop(key, None)


class VethSource:
    """Follows links and host routes in the network namespace of the thread that calls `start`.

    Of an address behind a pod's interface it says that it is the pod's whom another source gave it; where no source
    knows the address, that it is the newest sandbox's of that name. It takes back only its own word: where another
    source vouches for the pod as well, the lease lasts until that one takes its word back, too.

    Args:
        poll: seconds between full dumps when nothing was signalled.
    """

    name = SOURCE

    def __init__(self, poll: float = POLL) -> None:
        self._poll = poll
        self._lock = threading.Lock()
        self._known: dict[tuple[str, Address, str, str], Observation] = {}
        self._told: dict[Address, Observation] | None = None
        self._routes = Routes()
        self._health = Health(up=False, reason="not started")
        self._emit: Callable[[SourceEvent], None]
        self._sleeper = Sleeper(f"source-{self.name}")
        self._log = log.get(source=self.name)

    def learn(self, event: SourceEvent) -> None:
        """Hear what another source says. May be called from any thread, also before `start`; never blocks for long."""
        with self._lock:
            if isinstance(event, Replace):
                self._known = {key: seen for key, seen in self._known.items() if key[0] != event.source}
            for seen in event.observations:
                key = (seen.source, seen.ip, seen.pod.uid or f"{seen.pod.namespace}/{seen.pod.name}", seen.sandbox)
                if seen.present:
                    self._known[key] = seen
                else:
                    self._known.pop(key, None)
        self._sleeper.wake()

    def start(self, emit: Callable[[SourceEvent], None]) -> None:
        """Subscribe, look once, in this call, then follow in a thread. Raises NetacctError where the kernel refuses."""
        self._emit = emit
        try:
            events = rtnetlink.connect(_RTMGRP_LINK | _RTMGRP_IPV4_ROUTE | _RTMGRP_IPV6_ROUTE)
            requests = rtnetlink.connect()
        except OSError as error:
            raise NetacctError(f"cannot follow links and routes: {error.strerror}") from error
        self._look(requests)
        self._tell()
        self._sleeper.start(partial(self._follow, events, requests))
        self._sleeper.wake()  # for what was learnt since it told

    def stop(self) -> None:
        """End the thread and free everything."""
        self._sleeper.stop()

    def healthy(self) -> Health:
        """Unhealthy, with the error, while links and routes cannot be listed."""
        return self._health

    def _follow(self, events: socket.socket, requests: socket.socket) -> None:
        with events, requests:
            while (why := self._sleeper.sleep(self._poll, events.fileno())) is not Why.STOP:
                try:
                    for message in rtnetlink.pending(events):
                        self._routes.take(message)
                    if why is Why.DUE:
                        self._look(requests)
                except Overrun:
                    self._look(requests)
                self._tell()

    def _look(self, requests: socket.socket) -> None:
        """List everything anew; what was known holds where that fails. Events that come meanwhile are taken after."""
        try:
            found = _dump(requests)
        except OSError as error:
            reason = f"cannot list links and routes: {error.strerror or error}"
            if self._health.reason != reason:
                self._log.error("cannot list links and routes, what is known of them holds", error=str(error))
            self._health = Health(up=False, reason=reason)
            return
        self._routes, self._health = found, Health(up=True)

    def _tell(self) -> None:
        """Emit what differs from what was told before."""
        at = clock.now()
        now = dict(self._named(at))
        before, self._told = self._told, now
        if before is None:
            self._emit(Replace(self.name, tuple(now.values()), at))
            return
        gone = [
            replace(old, present=False, seen_at=at)
            for ip, old in before.items()
            if ip not in now or (now[ip].pod.uid, now[ip].sandbox) != (old.pod.uid, old.sandbox)
        ]
        new = [seen for ip, seen in now.items() if ip not in before or replace(before[ip], seen_at=at) != seen]
        for ip, seen in now.items():
            if seen not in new:
                now[ip] = before[ip]
        if gone or new:
            self._emit(Update(self.name, (*gone, *new)))

    def _named(self, at: float) -> Iterator[tuple[Address, Observation]]:
        """Each address behind a pod's interface whose name is known, with whose it is."""
        with self._lock:
            known = list(self._known.values())
        pods: dict[str, list[Observation]] = {}
        for seen in known:
            pods.setdefault(digest(seen.pod.namespace, seen.pod.name), []).append(seen)
        for ip, owner in self._routes.owners().items():
            named = pods.get(owner)
            if named:
                best = max(named, key=lambda seen: (seen.ip == ip, seen.created, seen.seen_at))
                yield ip, replace(best, source=self.name, ip=ip, seen_at=at)


def _dump(requests: socket.socket) -> Routes:
    """All links and routes of now. Raises OSError."""
    questions = (
        (_RTM_GETLINK, _IFINFOMSG.pack(socket.AF_UNSPEC, 0, 0, 0, 0)),
        (_RTM_GETROUTE, _RTMSG.pack(socket.AF_INET, 0, 0, 0, 0, 0, 0, 0, 0)),
        (_RTM_GETROUTE, _RTMSG.pack(socket.AF_INET6, 0, 0, 0, 0, 0, 0, 0, 0)),
    )
    routes = Routes()
    for kind, body in questions:
        for message in rtnetlink.dump_whole(requests, kind, body):
            routes.take(message)
    return routes
