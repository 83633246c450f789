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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from netacct import clock, log
from netacct.identity.heard import Heard
from netacct.identity.route_follower import POLL, PodRoutes, RouteFollower, is_host_route
from netacct.identity.source import Health, Replace, SourceEvent, Update
from netacct.model import Address, Observation
from netacct.policy import local_range_fault
from netacct.routes import Link

SOURCE = "veth"

_POD_LINK = re.compile(r".{0,4}([0-9a-f]{11})")
"""A host-side name (of up to 15 bytes, IFNAMSIZ) that can be one of a pod's."""


def digest(namespace: str, name: str) -> str:
    """What the host-side name of a pod's interface ends with, whatever its prefix."""
    return hashlib.sha1(f"{namespace}.{name}".encode(), usedforsecurity=False).hexdigest()[:11]


def _owner(link: Link) -> str | None:
    """The hash in the name of a pod's interface."""
    match = _POD_LINK.fullmatch(link.name)
    return match[1] if match else None


def _empty() -> PodRoutes[str]:
    return PodRoutes(_owner, is_host_route)


def _owners(known: PodRoutes[str]) -> Mapping[Address, str]:
    """The hash of the owner's name for each address that a pod's interface leads to."""
    return {
        route.network.network_address.packed: known.links[route.link]
        for route in known.routes
        if route.link in known.links and not local_range_fault(route.network)
    }


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
        self._heard = Heard()
        self._told: dict[Address, Observation] | None = None
        self._emit: Callable[[SourceEvent], None]
        self._follower = RouteFollower(_empty, self._tell, f"source-{self.name}", log.get(source=self.name), poll)

    def learn(self, event: SourceEvent) -> None:
        """Hear what another source says. May be called from any thread, also before `start`; never blocks for long."""
        self._heard.note(event)
        self._follower.wake()

    def start(self, emit: Callable[[SourceEvent], None]) -> None:
        """Subscribe, look once, in this call, then follow in a thread. Raises NetacctError where the kernel refuses."""
        self._emit = emit
        self._follower.look()
        self._tell()
        self._follower.follow()
        self._follower.wake()  # for what was learnt since it told

    def stop(self) -> None:
        """End the thread and free everything."""
        self._follower.stop()

    def healthy(self) -> Health:
        """Unhealthy, with the error, while links and routes cannot be listed."""
        return self._follower.healthy()

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
        pods: dict[str, list[Observation]] = {}
        for seen in self._heard.observations():
            pods.setdefault(digest(seen.pod.namespace, seen.pod.name), []).append(seen)
        for ip, owner in _owners(self._follower.known).items():
            named = pods.get(owner)
            if named:
                best = max(named, key=lambda seen: (seen.ip == ip, seen.created, seen.seen_at))
                yield ip, replace(best, source=self.name, ip=ip, seen_at=at)
