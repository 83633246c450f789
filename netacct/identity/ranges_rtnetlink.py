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
from collections.abc import Callable
from functools import partial

from netacct import log, rtnetlink
from netacct import routes as routing
from netacct.errors import NetacctError
from netacct.identity.ranges_provider import Fact, Told
from netacct.identity.route_follower import POLL, PodRoutes, RouteFollower, is_host_route
from netacct.identity.source import Health
from netacct.model import Network
from netacct.policy import canonical, local_range_fault
from netacct.routes import Link, Route

PROVIDER = "rtnetlink"

DEBOUNCE = 0.02
"""Seconds between the first change and the word about it; a pod often gets an address of each family."""

_NAME = re.compile(r"(cali|eni|azv)[0-9a-f]{11}|lxc[0-9a-f]{12}")
_KINDS = ("veth", "netkit")
_GOOGLE = 66  # the guest agent's number in rtm_protocol


def _is_pods(link: Link, *, any_veth: bool) -> bool | None:
    """True for a pod's interface. `any_veth`: a veth needs no CNI's name to be one."""
    return (link.kind in _KINDS and (any_veth or bool(_NAME.fullmatch(link.name)))) or None


def _is_wanted(route: Route) -> bool:
    to_one = route.network.prefixlen == route.network.max_prefixlen
    alias = not to_one and route.kind == routing.RTN_LOCAL and route.protocol == _GOOGLE
    return is_host_route(route) or alias


def _ranges(known: PodRoutes[bool]) -> tuple[Network, ...]:
    """The local ranges of now, canonical."""
    return canonical(
        route.network
        for route in known.routes
        if (route.kind == routing.RTN_LOCAL or route.link in known.links) and not local_range_fault(route.network)
    )


class RtnetlinkRanges:
    """Follows links and routes in the network namespace of the thread that calls `start`.

    Args:
        any_veth: whether a veth needs no CNI's name to be a pod's.
        poll: seconds between full dumps when nothing was signalled.
    """

    name = PROVIDER

    def __init__(self, *, any_veth: bool = False, poll: float = POLL) -> None:
        self._empty = partial(PodRoutes[bool], partial(_is_pods, any_veth=any_veth), _is_wanted)
        self._ranges: tuple[Network, ...] = ()
        self._changed: Callable[[tuple[Network, ...]], None] = lambda _: None
        logger = log.get(source="rtnetlink-ranges")
        self._follower = RouteFollower(self._empty, self._tell, f"ranges-{self.name}", logger, poll, DEBOUNCE)

    def read(self, seconds: float) -> Told:  # noqa: ARG002 -- the kernel keeps nobody waiting
        """What the routes of now say. Raises NetacctError."""
        found = self._empty()
        try:
            with rtnetlink.connect() as requests:
                found.take(routing.dump(requests))
        except OSError as error:
            raise NetacctError(f"cannot list links and routes: {error.strerror or error}") from error
        return Told(_ranges(found))

    @property
    def facts(self) -> tuple[Fact, ...]:
        """None: what other routes say is not about this node's pods."""
        return ()

    def start(self, changed: Callable[[tuple[Network, ...]], None]) -> tuple[Network, ...]:
        """Subscribe, return the ranges of now, and tell all of them whenever they differ.

        Raises NetacctError where the kernel refuses.
        """
        self._changed = changed
        self._follower.look()
        self._ranges = _ranges(self._follower.known)
        self._follower.follow()
        return self._ranges

    def wait(self, seconds: float) -> None:
        """Nothing: `start` has the first answer."""

    def stop(self) -> None:
        """End the thread; nothing is told any more once this returned. Idempotent."""
        self._follower.stop()

    def healthy(self) -> Health:
        """Unhealthy, with the error, while links and routes cannot be listed."""
        return self._follower.healthy()

    def _tell(self) -> None:
        found = _ranges(self._follower.known)
        if found != self._ranges:
            self._ranges = found
            self._changed(found)
