"""Reading the node's ends of pods' interfaces, on the real kernel."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from agentlab import datagrams
from support import OTHER_POD, POD, Netns, Node, sh

from netacct.kernel.interfaces import Interfaces
from netacct.model import Count, pack

pytestmark = pytest.mark.kernel

A, B = ({pack(ip) for ip in pod.values()} for pod in (POD, OTHER_POD))
MACVLAN = "10.244.1.12"


@pytest.fixture
def interfaces() -> Iterator[Interfaces]:
    """A reader, which opens its socket where the test runs."""
    made = Interfaces()
    yield made
    made.close()


@pytest.fixture
def names(node: Node) -> dict[str, int]:
    """The number of each veth on the node."""
    found: dict[str, int] = {}
    for name in ("v0", "v1", "v2"):
        number = node.netns.sh(f"ip -o link show {name}").partition(":")[0]
        found[name] = int(number)
    return found


def test_the_namespace_of_a_pod_says_whose_link_it_is(names: dict[str, int], interfaces: Interfaces) -> None:
    """A link is found by the addresses of its other end, of both families, with neither route nor neighbour."""
    sh("ip route flush dev v0", "ip -6 route flush dev v0", "ip neigh flush dev v0 nud permanent")
    found = interfaces.find(A | B)
    assert {(link.number, link.addresses) for link in found} == {
        (names["v0"], frozenset(A)),
        (names["v1"], frozenset(B)),
    }
    assert not any(link.unfiltered for link in found)


def test_only_wanted_addresses_are_told(node: Node, names: dict[str, int], interfaces: Interfaces) -> None:
    """Links to other addresses are left out, and of a link the addresses that nobody asked for."""
    node.pod.sh("ip addr add 10.244.1.13/32 dev eth0")
    assert [(link.number, link.addresses) for link in interfaces.find({pack(POD[4])})] == [
        (names["v0"], frozenset({pack(POD[4])}))
    ]
    assert interfaces.find({pack("192.0.2.1")}) == ()


def test_an_address_that_comes_later_is_found(node: Node, names: dict[str, int], interfaces: Interfaces) -> None:
    """A namespace that had no wanted address is asked again."""
    late = pack("10.244.1.13")
    assert interfaces.find({late}) == ()
    node.pod.sh("ip addr add 10.244.1.13/32 dev eth0")
    assert [link.number for link in interfaces.find({late})] == [names["v0"]]


def test_of_an_address_with_a_peer_the_pods_own_counts(
    node: Node, names: dict[str, int], interfaces: Interfaces
) -> None:
    """Of a point-to-point address, as some CNIs give, the local one is the pod's."""
    node.pod.sh("ip addr add 10.244.1.13 peer 169.254.1.1 dev eth0")
    assert [link.number for link in interfaces.find({pack("10.244.1.13")})] == [names["v0"]]
    assert interfaces.find({pack("169.254.1.1")}) == ()


def test_a_pod_that_is_gone_is_not_found(names: dict[str, int], interfaces: Interfaces) -> None:
    """With its link, what was known of it goes."""
    assert len(interfaces.find(A | B)) == 2
    sh("ip link del v0")
    assert [link.number for link in interfaces.find(A | B)] == [names["v1"]]
    assert names["v0"] not in interfaces.read()
    assert interfaces._addresses_in(4711) == {}


def test_a_number_that_another_link_has_now_says_nothing(
    node: Node, names: dict[str, int], interfaces: Interfaces
) -> None:
    """A new pod's link with the number of one that went is not taken for the old pod's, whose lease may be open yet."""
    assert len(interfaces.find(A | B)) == 2
    late = "10.244.1.13"
    node.netns.sh(
        "ip link del v0",
        f"ip link add later index {names['v0']} type veth peer name eth0 netns {node.pod.path}",
    )
    node.pod.sh(f"ip addr add {late}/32 dev eth0")
    found = interfaces.find(A | B | {pack(late)})
    assert {(link.number, link.addresses) for link in found} == {
        (names["v0"], frozenset({pack(late)})),
        (names["v1"], frozenset(B)),
    }


@pytest.mark.usefixtures("netns")
def test_macvlan_has_no_end_on_the_node(interfaces: Interfaces) -> None:
    """A pod on a macvlan, whose frames pass no interface of the node's own, is not found."""
    pod = Netns()
    try:
        sh(
            "ip link add up0 type veth peer name up1",
            "ip link set up0 up",
            f"ip link add m0 link up0 netns {pod.path} type macvlan",
        )
        pod.sh("ip link set m0 up", f"ip addr add {MACVLAN}/24 dev m0")
        assert interfaces.find({pack(MACVLAN)}) == ()
    finally:
        pod.close()


@pytest.mark.usefixtures("node")
@pytest.mark.parametrize(
    ("setting", "wanted", "unfiltered"),
    [
        ("sysctl -qw net.bridge.bridge-nf-call-iptables=1 net.bridge.bridge-nf-call-ip6tables=1", A, False),
        ("sysctl -qw net.bridge.bridge-nf-call-iptables=0 net.bridge.bridge-nf-call-ip6tables=1", A, True),
        ("sysctl -qw net.bridge.bridge-nf-call-iptables=0", {pack(POD[6])}, False),
        ("sysctl -qw net.bridge.bridge-nf-call-ip6tables=0", {pack(POD[6])}, True),
        ("sysctl -qw net.bridge.bridge-nf-call-iptables=0; ip link set br0 type bridge nf_call_iptables 1", A, False),
    ],
)
def test_a_bridge_tells_what_netfilter_sees(
    interfaces: Interfaces, setting: str, wanted: set[bytes], *, unfiltered: bool
) -> None:
    """A port counts as unfiltered when neither namespace nor bridge shows netfilter a family that the pod has."""
    sh("ip link add br0 type bridge", "ip link set v0 master br0", setting)
    assert [link.unfiltered for link in interfaces.find(wanted)] == [unfiltered]


@pytest.mark.parametrize("family", [4, 6])
def test_counters_are_those_of_layer_three_as_the_pod_sees_them(
    node: Node, names: dict[str, int], interfaces: Interfaces, family: int
) -> None:
    """What a pod sends is transmit, what it gets is receive, in bytes without link headers."""
    if family == 4:
        for space in (node.netns, node.pod, node.other_pod):
            space.sh("sysctl -qw net.ipv6.conf.all.disable_ipv6=1")  # reports of groups would count
    before = interfaces.read()
    sent = datagrams(node, "pod", "other", packets=50, family=4 if family == 4 else 6, size=1000)
    after = interfaces.read()
    slack = 0 if family == 4 else 1000
    for name, direction in (("v0", "transmit"), ("v1", "receive")):
        number = names[name]
        moved: Count = getattr(after[number], direction).minus(getattr(before[number], direction))
        assert sent <= moved.bytes <= sent + slack
    assert after[names["v0"]].receive.minus(before[names["v0"]].receive).bytes <= slack
