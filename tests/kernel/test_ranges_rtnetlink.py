"""Local ranges by the kernel's routes, on real links and routes that come and go as CNIs make them."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import support

from netacct import rtnetlink
from netacct.identity.ranges_rtnetlink import RtnetlinkRanges
from netacct.identity.veth import digest
from netacct.model import Network

pytestmark = pytest.mark.kernel

HASH = digest("team-a", "train-0")
V4, V6 = "10.1.2.3", "fd00::3"


def attach(netns: support.Netns, name: str, *addresses: str, kind: str = "veth") -> None:
    """An interface and host routes, as a routing CNI leaves them."""
    peer = f"peer name peer{name[-6:]}" if kind == "veth" else ""
    netns.sh(
        f"ip link add {name} type {kind} {peer} && ip link set {name} up",
        *([f"ip link set peer{name[-6:]} up"] if peer else []),
        *(f"ip route add {address} dev {name}" for address in addresses),
    )


class Follower:
    """A running provider and what it told."""

    def __init__(self, *, any_veth: bool = False, poll: float = 3600.0) -> None:
        self.told: queue.Queue[tuple[Network, ...]] = queue.Queue()
        self.provider = RtnetlinkRanges(any_veth=any_veth, poll=poll)
        self.first = texts(self.provider.start(self.told.put))

    def next(self) -> list[str]:
        """All ranges after the next change."""
        return texts(self.told.get(timeout=support.PATIENCE))

    def until(self, ranges: list[str]) -> None:
        """Wait until these are the ranges: several changes at once may be told one by one."""
        while self.next() != ranges:
            pass

    def quiet(self) -> bool:
        """Whether nothing is told for a while."""
        try:
            self.told.get(timeout=0.2)
        except queue.Empty:
            return True
        return False


def texts(networks: tuple[Network, ...]) -> list[str]:
    """Networks as text."""
    return [str(each) for each in networks]


Follow = Callable[..., Follower]


@pytest.fixture
def follow() -> Iterator[Follow]:
    """Makes followers, in the namespace of the caller, and stops them."""
    made: list[Follower] = []

    def start(*, any_veth: bool = False, poll: float = 3600.0) -> Follower:
        made.append(Follower(any_veth=any_veth, poll=poll))
        return made[-1]

    yield start
    for follower in made:
        follower.provider.stop()


@pytest.mark.parametrize("name", [f"cali{HASH}", f"eni{HASH}", f"azv{HASH}", f"lxc{HASH}0"])
def test_what_is_there_is_told_first(netns: support.Netns, follow: Follow, name: str) -> None:
    """Host routes of both families to a veth with a CNI's name are the first answer."""
    attach(netns, name, V4, V6)
    assert follow().first == [f"{V4}/32", f"{V6}/128"]


@pytest.mark.parametrize("name", ["veth1a2b3c4d", "calico", "enix", "lxc_health", f"x{HASH}"])
def test_other_veths_are_only_counted_on_request(netns: support.Netns, follow: Follow, name: str) -> None:
    """A veth whose name is no CNI's is left out, unless every veth was asked for."""
    attach(netns, name, V4)
    assert follow().first == []
    assert follow(any_veth=True).first == [f"{V4}/32"]


def test_only_veths_and_only_host_routes(netns: support.Netns, follow: Follow) -> None:
    """Neither routes to whole networks count, nor host routes through interfaces of other kinds."""
    attach(netns, f"cali{HASH}", "10.2.0.0/24", "fd00:2::/64")
    attach(netns, f"eni{HASH}", V4, kind="bridge")
    netns.sh("ip route add blackhole 10.4.0.1/32 && ip address add 10.5.0.1/32 dev lo")
    assert follow(any_veth=True).first == []


def test_routes_of_every_table_count(netns: support.Netns, follow: Follow) -> None:
    """A host route counts in whichever table it is."""
    attach(netns, f"eni{HASH}")
    netns.sh(f"ip route add {V4} dev eni{HASH} table 100")
    assert follow().first == [f"{V4}/32"]


def test_googles_local_routes(netns: support.Netns, follow: Follow) -> None:
    """Local routes of Google's guest agent to a range count; those to one address (a load balancer's) do not."""
    netns.sh(
        "ip link add e0 type veth peer name e1 && ip link set e1 up && ip link set e0 up",
        "ip route add local 10.8.1.0/24 dev e0 proto 66",
        "ip route add local 198.51.100.9/32 dev e0 proto 66",
        "ip route add local 10.9.0.0/24 dev e0 proto static",
        "ip route add 10.10.0.0/24 dev e0 proto 66",
    )
    follower = follow()
    assert follower.first == ["10.8.1.0/24"]
    netns.sh("ip route del local 10.8.1.0/24 dev e0 proto 66")
    assert follower.next() == []


def test_routes_come_and_go(netns: support.Netns, follow: Follow) -> None:
    """A new host route is told as it comes, and taken back with the route or the interface."""
    follower = follow()
    assert follower.first == []
    name = f"cali{HASH}"
    attach(netns, name, V4)
    assert follower.next() == [f"{V4}/32"]
    netns.sh(f"ip route add {V6} dev {name}")
    assert follower.next() == [f"{V4}/32", f"{V6}/128"]
    netns.sh(f"ip route del {V4} dev {name}")
    assert follower.next() == [f"{V6}/128"]
    netns.sh(f"ip link del {name}")
    assert follower.next() == []
    assert follower.quiet()


def test_an_interface_that_goes_down_takes_its_routes_along(netns: support.Netns, follow: Follow) -> None:
    """IPv4 routes vanish without a message when their interface goes down, and are taken back all the same."""
    attach(netns, f"cali{HASH}", V4)
    attach(netns, f"azv{HASH[::-1]}", "10.1.2.4")
    follower = follow()
    netns.sh(f"ip link set cali{HASH} down")
    assert follower.next() == ["10.1.2.4/32"]


def test_an_interface_that_gets_its_name_later(netns: support.Netns, follow: Follow) -> None:
    """A veth that is made under another name and renamed, as by some CNIs, counts from then on."""
    attach(netns, "tmp1a2b3c")
    follower = follow()
    netns.sh(f"ip link set tmp1a2b3c down && ip link set tmp1a2b3c name lxc{HASH}0 && ip link set lxc{HASH}0 up")
    netns.sh(f"ip route add {V4} dev lxc{HASH}0")
    assert follower.next() == [f"{V4}/32"]


def test_ranges_that_cannot_be_local_are_left_out(netns: support.Netns, follow: Follow) -> None:
    """A host route to an IPv6 link-local address names nobody's pod."""
    attach(netns, f"cali{HASH}", "fe80::7", V4)
    assert follow().first == [f"{V4}/32"]


def test_a_storm_of_changes_ends_right(
    netns: support.Netns, follow: Follow, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """When the kernel had to drop messages, everything is listed anew."""
    connect = rtnetlink.connect

    def small(groups: int = 0) -> socket.socket:
        """With the least memory for messages that there is: a few fill it."""
        made = connect(groups)
        if groups:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        return made

    monkeypatch.setattr(rtnetlink, "connect", small)
    attach(netns, f"cali{HASH}")
    follower = follow()
    routes = tmp_path / "routes"
    routes.write_text("".join(f"route add 10.1.{i >> 6}.{i & 63} dev cali{HASH}\n" for i in range(256)))
    netns.sh(f"ip -batch {routes}")
    follower.until([f"10.1.{i >> 6}.{i & 63}/32" for i in range(256)])


def test_a_poll_finds_what_no_message_told(
    netns: support.Netns, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when no message comes at all, a change is found at the next full look."""
    connect = rtnetlink.connect

    def deaf(groups: int = 0) -> socket.socket:
        """Subscribed to nothing."""
        made = connect()
        made.settimeout(0.0 if groups else support.PATIENCE)
        return made

    monkeypatch.setattr(rtnetlink, "connect", deaf)
    follower = follow(poll=0.1)
    attach(netns, f"cali{HASH}", V4)
    follower.until([f"{V4}/32"])


def test_health(netns: support.Netns, follow: Follow) -> None:
    """A running provider is healthy, one that was not started is not, and its thread ends with it."""
    assert netns
    assert not RtnetlinkRanges().healthy().up
    follower = follow()
    assert follower.provider.healthy().up
    assert follower.provider.facts == ()
    follower.provider.stop()
    assert not any(thread.name == "ranges-rtnetlink" for thread in threading.enumerate())


def test_reading_once(netns: support.Netns) -> None:
    """Who does not follow gets the ranges of now."""
    attach(netns, f"cali{HASH}", V4, V6)
    assert texts(RtnetlinkRanges().read(1).ranges) == [f"{V4}/32", f"{V6}/128"]
