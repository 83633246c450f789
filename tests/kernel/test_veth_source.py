"""The source `veth` on the real kernel: links and routes come and go as CNIs make them."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
import support

from netacct import routes, rtnetlink
from netacct.identity.source import Replace, SourceEvent, Update
from netacct.identity.veth import VethSource, digest
from netacct.model import Observation, Pod, pack, unpack
from netacct.rtnetlink import Message, Overrun

pytestmark = pytest.mark.kernel

POD = Pod("team-a", "train-0", "u0")
V4, V6 = "10.1.2.3", "fd00::3"


def observed(
    ip: str, pod: Pod = POD, sandbox: str = "s0", created: float = 1.0, *, present: bool = True
) -> Observation:
    """What the source `cni` says of a pod."""
    return Observation("cni", pack(ip), pod, sandbox, created, 2.0, present)


def attach(netns: support.Netns, name: str, *addresses: str) -> None:
    """A veth and host routes, as a routing CNI leaves them."""
    netns.sh(
        f"ip link add {name} type veth peer name peer",
        f"ip link set {name} up && ip link set peer up",
        *(f"ip route add {address} dev {name}" for address in addresses),
    )


class Follower:
    """A running source and what it said."""

    def __init__(self, *known: Observation, poll: float = 3600.0) -> None:
        self.events: queue.Queue[SourceEvent] = queue.Queue()
        self.source = VethSource(poll)
        self.source.learn(Replace("cni", known, 2.0))
        self.source.start(self.events.put)
        first = self.events.get(timeout=support.PATIENCE)
        assert isinstance(first, Replace)
        self.first = first.observations

    def next(self) -> list[tuple[str, str, bool]]:
        """The next event: address, sandbox and presence of each observation."""
        event = self.events.get(timeout=support.PATIENCE)
        assert isinstance(event, Update)
        return words(event.observations)

    def quiet(self) -> bool:
        """Whether nothing is said for a while."""
        try:
            self.events.get(timeout=0.2)
        except queue.Empty:
            return True
        return False


def words(observations: tuple[Observation, ...]) -> list[tuple[str, str, bool]]:
    """Address, sandbox and presence of each observation."""
    return sorted((unpack(seen.ip), seen.sandbox, seen.present) for seen in observations)


Follow = Callable[..., Follower]


@pytest.fixture
def follow() -> Iterator[Follow]:
    """Makes followers, in the namespace of the caller, and stops them."""
    made: list[Follower] = []

    def start(*known: Observation, poll: float = 3600.0) -> Follower:
        made.append(Follower(*known, poll=poll))
        return made[-1]

    yield start
    for follower in made:
        follower.source.stop()


@pytest.mark.parametrize("prefix", ["cali", "eni", "azv", "x"])
def test_routes_that_are_there_are_told_first(netns: support.Netns, follow: Follow, prefix: str) -> None:
    """At the start, the addresses of both families behind a known pod's interface are told, whatever its prefix."""
    attach(netns, prefix + digest("team-a", "train-0"), V4, V6)
    first = follow(observed(V4), observed(V6)).first
    assert words(first) == [(V4, "s0", True), (V6, "s0", True)]
    assert {(seen.source, seen.pod, seen.created) for seen in first} == {("veth", POD, 1.0)}


def test_routes_come_and_go(netns: support.Netns, follow: Follow) -> None:
    """A new host route is told, its removal takes the same word back, and so does a removed interface."""
    follower = follow(observed(V4), observed(V6))
    assert follower.first == ()
    name = "cali" + digest("team-a", "train-0")
    attach(netns, name, V4)
    assert follower.next() == [(V4, "s0", True)]
    netns.sh(f"ip route add {V6} dev {name}")
    assert follower.next() == [(V6, "s0", True)]
    netns.sh(f"ip route del {V4} dev {name}")
    assert follower.next() == [(V4, "s0", False)]
    netns.sh(f"ip link del {name}")
    assert follower.next() == [(V6, "s0", False)]


def test_an_interface_that_goes_down_takes_its_routes_along(netns: support.Netns, follow: Follow) -> None:
    """IPv4 routes vanish without a message when their interface goes down, and are taken back all the same."""
    name = "cali" + digest("team-a", "train-0")
    attach(netns, name, V4)
    follower = follow(observed(V4))
    netns.sh(f"ip link set {name} down")
    assert follower.next() == [(V4, "s0", False)]
    netns.sh(f"ip link set {name} up", f"ip route add {V4} dev {name}")
    assert follower.next() == [(V4, "s0", True)]


def test_a_name_that_is_learnt_later(netns: support.Netns, follow: Follow) -> None:
    """Nothing is said of an interface whose pod nobody knows until a source names it, and only as long as it does."""
    attach(netns, "cali" + digest("team-a", "train-0"), V4, V6)
    follower = follow(observed("10.9.9.9", Pod("team-a", "train-1", "u1")))
    assert follower.first == ()
    follower.source.learn(Update("cni", (observed(V4),)))
    assert follower.next() == [(V4, "s0", True), (V6, "s0", True)]
    follower.source.learn(Update("cni", (observed(V4, present=False),)))
    assert follower.next() == [(V4, "s0", False), (V6, "s0", False)]


def test_a_new_sandbox_of_the_same_name(netns: support.Netns, follow: Follow) -> None:
    """When a pod of the same name comes with another uid, its address is the new one's, and the old word ends."""
    attach(netns, "cali" + digest("team-a", "train-0"), V4)
    follower = follow(observed(V4))
    heir = observed(V4, Pod("team-a", "train-0", "u1"), "s1", created=9.0)
    follower.source.learn(Update("cni", (heir,)))
    assert follower.next() == [(V4, "s0", False), (V4, "s1", True)]


def test_what_is_no_pods_route_is_nothing(netns: support.Netns, follow: Follow) -> None:
    """Routes through other interfaces, of other lengths, to link-local addresses, and unreachable ones say nothing."""
    name = "cali" + digest("team-a", "train-0")
    attach(netns, name)
    netns.sh("ip link add veth1234 type veth peer name far", "ip link set veth1234 up", "ip link set far up")
    follower = follow(observed(V4), observed(V6))
    netns.sh(
        f"ip route add 10.1.2.0/24 dev {name}",
        f"ip route add fd00::/64 dev {name}",
        f"ip route add fe80::5/128 dev {name}",
        f"ip route add {V4} dev veth1234",
        f"ip route add unreachable {V6}",
        f"ip addr add 10.7.7.7/32 dev {name}",
    )
    assert follower.quiet()


def test_lost_messages_lead_to_a_new_list(
    netns: support.Netns, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the kernel dropped messages, everything is listed anew, and nothing is missed."""
    pending = rtnetlink.pending

    def lost(events: socket.socket) -> Iterator[Message]:
        yield from (message for message in pending(events) if not message)
        raise Overrun

    monkeypatch.setattr(rtnetlink, "pending", lost)
    follower = follow(observed(V4))
    attach(netns, "cali" + digest("team-a", "train-0"), V4)
    assert follower.next() == [(V4, "s0", True)]


def test_the_poll_finds_what_no_message_told(
    netns: support.Netns, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without any message, routes that came and went are found when it is time to look."""
    monkeypatch.setattr(routes, "GROUPS", 1 << 30)  # a group in which nothing is said
    follower = follow(observed(V4), poll=0.1)
    attach(netns, "cali" + digest("team-a", "train-0"), V4)
    assert follower.next() == [(V4, "s0", True)]
    netns.sh(f"ip route del {V4}")
    assert follower.next() == [(V4, "s0", False)]


def test_stopping_ends_the_thread(netns: support.Netns) -> None:
    """After `stop`, also twice, no thread is left and nothing more is said, whatever it is told."""
    follower = Follower(observed(V4))
    follower.source.stop()
    follower.source.stop()
    attach(netns, "cali" + digest("team-a", "train-0"), V4)
    follower.source.learn(Update("cni", (observed(V4),)))
    assert "source-veth" not in {thread.name for thread in threading.enumerate()}
    assert follower.quiet()
