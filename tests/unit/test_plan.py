"""What the plan for the kernel says, case by case; the laws are in tests/property/test_plan_properties.py."""

import ipaddress
import random
from collections.abc import Mapping

import pytest

from netacct.kernel.plan import PREFILL_LIMIT, FamilyPlan, build, round_lengths
from netacct.model import Network, pack
from netacct.policy import MarkTable, Policy, Prefix, TrafficClass, Tunnel

NAMES = ("pod", "node", "service", "private", "internet", "storage")


def policy(cidrs: Mapping[str, str], default: str = "internet") -> Policy:
    """A policy of these CIDRs."""
    prefixes = tuple(Prefix(ipaddress.ip_network(cidr), name, "p.yaml:1") for cidr, name in cidrs.items())
    return Policy("p", "p.yaml", "00", tuple(map(TrafficClass, NAMES)), prefixes, default)


def nets(*cidrs: str) -> list[Network]:
    """Networks from text."""
    return [ipaddress.ip_network(cidr) for cidr in cidrs]


def family(cidrs: Mapping[str, str], *local: str, own: tuple[str, ...] = (), default: str = "internet") -> FamilyPlan:
    """The IPv4 part of a plan."""
    return build(policy(cidrs, default), nets(*local), map(pack, own), None, (4,)).families[0]


def layers(plan: FamilyPlan) -> list[dict[str, str]]:
    """The layers as text."""
    return [{group.traffic: " ".join(map(str, group.networks)) for group in layer} for layer in plan.layers]


def test_disjoint_cidrs_need_one_layer() -> None:
    """CIDRs that do not nest lie in one layer, in the policy's order of classes, networks sorted."""
    plan = family({"172.16.0.0/12": "private", "10.0.0.0/8": "private", "11.0.0.0/8": "pod"})
    assert [(group.traffic, list(group.networks)) for group in plan.layers[0]] == [
        ("pod", nets("11.0.0.0/8")),
        ("private", nets("10.0.0.0/8", "172.16.0.0/12")),
    ]
    assert len(plan.layers) == 1


def test_exception_inside_lies_in_an_earlier_layer() -> None:
    """A CIDR inside of one of another class is tested first."""
    cidrs = {"10.0.0.0/8": "private", "10.1.0.0/16": "pod", "10.1.2.0/24": "private", "11.0.0.0/8": "pod"}
    assert layers(family(cidrs)) == [
        {"private": "10.1.2.0/24"},
        {"pod": "10.1.0.0/16"},
        {"pod": "11.0.0.0/8", "private": "10.0.0.0/8"},
    ]


def test_redundant_cidrs_go() -> None:
    """A CIDR inside of one of its own class decides nothing and is dropped, and what is inside of it stays right."""
    cidrs = {"10.0.0.0/8": "private", "10.1.0.0/16": "private", "10.1.2.0/24": "pod", "20.0.0.0/8": "internet"}
    assert layers(family(cidrs)) == [{"pod": "10.1.2.0/24"}, {"private": "10.0.0.0/8"}]


def test_default_class_inside_another_is_not_redundant() -> None:
    """A CIDR of the default class inside of another class stays: without it the outer one would win."""
    assert layers(family({"10.0.0.0/8": "private", "10.1.0.0/16": "internet"})) == [
        {"internet": "10.1.0.0/16"},
        {"private": "10.0.0.0/8"},
    ]


def test_halves_become_a_whole() -> None:
    """Adjacent halves of one class and depth are merged, repeatedly; neighbours that are no halves are not."""
    cidrs = {"10.0.0.0/10": "pod", "10.64.0.0/10": "pod", "10.128.0.0/9": "pod", "11.0.0.0/9": "pod"}
    assert layers(family(cidrs)) == [{"pod": "10.0.0.0/8 11.0.0.0/9"}]


def test_whole_family() -> None:
    """A /0 is a CIDR like any other."""
    cidrs = {"0.0.0.0/0": "private", "10.0.0.0/8": "internet"}
    assert layers(family(cidrs)) == [{"internet": "10.0.0.0/8"}, {"private": "0.0.0.0/0"}]


def test_no_cidr() -> None:
    """A policy without CIDRs needs no layer."""
    assert family({}).layers == ()


def test_local_range_is_pod_besides() -> None:
    """A local range is a prefix of `pod` and beats an equal one of another class."""
    assert layers(family({"10.0.0.0/8": "private", "10.1.0.0/24": "storage"}, "10.1.0.0/24")) == [
        {"pod": "10.1.0.0/24"},
        {"private": "10.0.0.0/8"},
    ]


def test_local_ranges_are_collapsed() -> None:
    """Overlapping local ranges become the larger one, sorted, whichever order they come in."""
    assert list(family({}, "10.0.1.7/32", "10.0.2.0/24", "10.0.1.0/24").local) == nets("10.0.1.0/24", "10.0.2.0/24")


def test_prefilled_has_every_address_but_own() -> None:
    """The first and the last address of a range are prefilled too, and the node's own are not."""
    plan = family({}, "10.0.0.4/30", "10.0.0.1/32", own=("10.0.0.5", "192.0.2.1", "127.0.0.1"))
    assert plan.prefilled == tuple(map(pack, ("10.0.0.1", "10.0.0.4", "10.0.0.6", "10.0.0.7")))
    assert plan.own == (pack("10.0.0.5"), pack("192.0.2.1"))
    assert plan.dynamic == ()


@pytest.mark.parametrize(
    ("local", "dynamic"),
    [
        (["10.0.0.0/20"], []),
        (["10.0.0.0/19"], ["10.0.0.0/19"]),
        (["10.0.0.0/20", "11.0.0.0/32"], ["10.0.0.0/20"]),
        (["10.0.0.0/21", "11.0.0.0/21"], []),
        (["10.0.0.0/21", "11.0.0.0/21", "fd00::/128"], ["11.0.0.0/21"]),
        (["fd00::/64", "10.0.0.0/24"], ["fd00::/64"]),
        (["fd00::/116", "10.0.0.0/20"], ["fd00::/116"]),
    ],
)
def test_prefill_limit(local: list[str], dynamic: list[str]) -> None:
    """The smallest ranges are prefilled as long as all fit, over both families; equal ones IPv4 and low first."""
    plan = build(policy({}), nets(*local), [], None)
    assert [net for part in plan.families for net in part.dynamic] == nets(*dynamic)
    assert sum(len(part.prefilled) for part in plan.families) <= PREFILL_LIMIT


def test_own_address_does_not_decide_what_is_dynamic() -> None:
    """A range one address too large stays dynamic also where the node's own address would make it fit."""
    plan = family({}, "10.0.0.0/20", "11.0.0.0/32", own=("10.0.0.1",))
    assert list(plan.dynamic) == nets("10.0.0.0/20")


def test_families() -> None:
    """Each family has its own part, and one that is not asked for is left out with its ranges."""
    rules = policy({"10.0.0.0/8": "private", "fd00::/8": "private"})
    plan = build(rules, nets("10.0.0.0/24", "fd00::/120"), [pack("fd00::1"), pack("fe80::1"), pack("10.0.0.1")], None)
    assert [part.family for part in plan.families] == [4, 6]
    assert [str(part.loopback) for part in plan.families] == ["127.0.0.0/8", "::1/128"]
    assert [part.own for part in plan.families] == [(pack("10.0.0.1"),), (pack("fd00::1"),)]
    assert [len(part.prefilled) for part in plan.families] == [255, 255]
    alone = build(rules, nets("10.0.0.0/24", "fd00::/120"), [], None, families=(6,))
    assert [part.local for part in alone.families] == [tuple(nets("fd00::/120"))]


def test_plan_carries_the_policy() -> None:
    """Names, hash, classes, default, tunnel, marks and capacity arrive as they were given."""
    marks = MarkTable(0x1F, {"pod": 1})
    plan = build(policy({}), [], [], marks, dynamic_capacity=7)
    assert (plan.policy, plan.policy_hash, plan.classes, plan.default) == ("p", "00", NAMES, "internet")
    assert (plan.tunnel, plan.marks, plan.dynamic_capacity) == (Tunnel(), marks, 7)
    assert build(policy({}), [], [], None).marks is None


def test_impossible_local_range() -> None:
    """A local range that would count somebody else's packets is refused with the reason."""
    with pytest.raises(ValueError, match=r"0\.0\.0\.0/0 holds loopback"):
        build(policy({}), nets("0.0.0.0/0"), [], None)


def test_many_cidrs_are_planned_whole() -> None:
    """Of 8,000 random CIDRs each has its class in the plan, unless one around it says the same."""
    pick = random.Random(1)
    cidrs: dict[str, str] = {}
    while len(cidrs) < 8000:
        length = pick.randint(8, 32)
        net = ipaddress.ip_network((pick.getrandbits(length) << 32 - length, length))
        cidrs[str(net)] = pick.choice(NAMES)
    rules = policy(cidrs)
    layers = build(rules, nets("10.0.0.0/24"), [], None).families[0].layers
    planned = {str(net) for layer in layers for group in layer for net in group.networks}
    assert 4000 < len(planned) <= 8001


def test_round_lengths() -> None:
    """Networks are split to the next length that is given, those that fit are kept, duplicates go, all sorted."""
    given = nets("10.0.0.0/15", "9.1.1.1/32", "8.0.0.0/8", "10.1.0.0/16")
    assert list(round_lengths(given, (32, 16, 8))) == nets("8.0.0.0/8", "9.1.1.1/32", "10.0.0.0/16", "10.1.0.0/16")


def test_round_lengths_of_a_whole_family() -> None:
    """A /0 is split where /0 is not among the lengths, as hash:net needs it."""
    assert list(round_lengths(nets("::/0"), (1, 128))) == nets("::/1", "8000::/1")


def test_round_lengths_too_short() -> None:
    """A network that is longer than every length is an error, because it cannot be split to one."""
    with pytest.raises(ValueError, match="longer than every"):
        round_lengths(nets("10.0.0.0/25"), (8, 24))
