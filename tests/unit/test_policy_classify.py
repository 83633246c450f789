"""Which class an address has and why, and what `rules explain` says about it."""

import ipaddress

import pytest

from netacct.errors import UsageError
from netacct.explain import explain
from netacct.model import Network, pack
from netacct.policy import (
    MarkTable,
    Policy,
    Prefix,
    Reason,
    TrafficClass,
    Verdict,
    can_be_local,
    canonical,
    classify,
    countable_own,
    local_range_fault,
)
from netacct.policy_file import load


def nets(*cidrs: str) -> tuple[Network, ...]:
    """Networks from text."""
    return tuple(ipaddress.ip_network(cidr) for cidr in cidrs)


CIDRS = {
    "10.0.0.0/8": "private",
    "10.244.0.0/16": "pod",
    "10.244.1.0/24": "storage",
    "10.244.1.128/25": "pod",
    "fd00::/8": "private",
    "fd00:1::/32": "storage",
}
POLICY = Policy(
    name="site",
    path="/etc/netacct/site.yaml",
    hash="0123456789ab",
    classes=(
        *map(TrafficClass, ("pod", "node", "service", "private", "internet")),
        TrafficClass("storage", "eu-1a", "eu-1"),
    ),
    prefixes=tuple(
        Prefix(ipaddress.ip_network(cidr), name, f"site.yaml:{line}")
        for line, (cidr, name) in enumerate(CIDRS.items(), 1)
    ),
    default="internet",
    marks=MarkTable(0x1F, {"storage": 6}),
    default_origin="site.yaml:9",
)
OWN = frozenset({pack("10.244.1.9"), pack("192.0.2.1"), pack("fe80::1")})


@pytest.mark.parametrize(
    ("address", "traffic", "line"),
    [
        ("10.1.0.0", "private", "site.yaml:1"),
        ("10.244.0.1", "pod", "site.yaml:2"),
        ("10.244.1.127", "storage", "site.yaml:3"),
        ("10.244.1.128", "pod", "site.yaml:4"),
        ("9.255.255.255", "internet", "site.yaml:9"),
        ("11.0.0.0", "internet", "site.yaml:9"),
        ("fd00:1::1", "storage", "site.yaml:6"),
        ("fd00:2::1", "private", "site.yaml:5"),
        ("2001:db8::1", "internet", "site.yaml:9"),
        ("192.0.2.1", "node", ""),
        ("10.244.1.9", "node", ""),
        ("127.8.8.8", "node", ""),
        ("::1", "node", ""),
        ("fe80::1", "internet", "site.yaml:9"),
    ],
)
def test_longest_prefix(address: str, traffic: str, line: str) -> None:
    """The longest prefix over all classes decides, unless the address is the node's own or a loopback one."""
    verdict = classify(POLICY, pack(address), OWN)
    assert (verdict.traffic, verdict.origin) == (traffic, line)


def test_local_range_beats_equal_cidr() -> None:
    """A local range makes `pod` of what an equal CIDR gives to another class, and says so."""
    local = nets("10.244.1.0/24")
    verdict = classify(POLICY, pack("10.244.1.1"), OWN, local)
    assert (verdict.traffic, verdict.reason, verdict.prefix, verdict.origin) == ("pod", Reason.LOCAL, local[0], "")
    assert [str(prefix.network) for prefix in verdict.beaten] == ["10.244.1.0/24", "10.244.0.0/16", "10.0.0.0/8"]


def test_longer_cidr_beats_local_range() -> None:
    """A CIDR inside of a local range keeps its class, because its prefix is longer."""
    assert classify(POLICY, pack("10.244.1.1"), OWN, nets("10.244.0.0/20")).traffic == "storage"


def test_overlapping_local_ranges_count_as_the_larger() -> None:
    """A local range inside of another adds nothing, in whichever order they come."""
    wide, narrow = nets("10.244.0.0/20", "10.244.1.0/24")
    for local in ((wide, narrow), (narrow, wide)):
        assert classify(POLICY, pack("10.244.1.1"), OWN, local).traffic == "storage"


def test_own_address_in_local_range() -> None:
    """The node's own address is `node` also inside of a local range, and nothing decided but that."""
    verdict = classify(POLICY, pack("10.244.1.9"), OWN, nets("10.244.1.0/24"))
    assert (verdict.traffic, verdict.reason, verdict.prefix) == ("node", Reason.OWN, None)


def test_uncovered_address() -> None:
    """What no CIDR covers has the default class, beat nothing, and is decided by the line of the default."""
    assert classify(POLICY, pack("8.8.8.8")) == Verdict("internet", Reason.DEFAULT, None, "site.yaml:9")


@pytest.mark.parametrize(
    ("address", "default", "openai"),
    [
        ("10.1.0.6", "private", "private"),
        ("10.255.255.255", "private", "private"),
        ("11.0.0.0", "internet", "internet"),
        ("169.254.169.254", "private", "internet"),
        ("100.64.3.4", "private", "internet"),
        ("100.128.0.1", "internet", "internet"),
        ("172.31.255.255", "private", "internet"),
        ("172.32.0.0", "internet", "internet"),
        ("192.168.77.3", "private", "internet"),
        ("224.0.0.251", "private", "internet"),
        ("255.255.255.255", "private", "internet"),
        ("0.0.0.0", "private", "internet"),  # noqa: S104 -- a DHCP client's source, nothing binds to it
        ("8.8.8.8", "internet", "internet"),
        ("198.18.0.1", "internet", "internet"),
        ("203.0.113.10", "internet", "internet"),
        ("127.0.0.1", "node", "node"),
        ("fd00::5", "private", "internet"),
        ("fe80::5", "private", "internet"),
        ("ff02::1", "private", "internet"),
        ("::", "private", "internet"),
        ("2001:4860:4860::8888", "internet", "internet"),
    ],
)
def test_shipped_policies(address: str, default: str, openai: str) -> None:
    """`default` keeps what is never on the internet out of it; `openai-7500` draws the line at 10.0.0.0/8."""
    assert classify(load("default"), pack(address)).traffic == default
    assert classify(load("openai-7500"), pack(address)).traffic == openai


@pytest.mark.parametrize(
    ("name", "address", "traffic"),
    [
        ("azure", "168.63.129.16", "private"),
        ("azure", "10.0.0.10", "service"),
        ("azure", "10.244.3.4", "pod"),
        ("azure", "10.224.0.4", "private"),
        ("gke", "34.118.224.1", "service"),
        ("gke", "199.36.153.10", "google-apis"),
        ("gke", "199.36.153.12", "internet"),
        ("aws", "172.20.0.10", "service"),
        ("aws", "fd00:ec2::254", "private"),
    ],
)
def test_cloud_policies(name: str, address: str, traffic: str) -> None:
    """The cloud policies know the addresses of their platform that look like something else."""
    assert classify(load(name), pack(address)).traffic == traffic


def test_canonical() -> None:
    """Networks come out sorted, IPv4 first, without the ones inside of others and without merging neighbours."""
    mixed = nets("fd00::/64", "10.0.1.0/24", "10.0.0.0/24", "10.0.0.7/32", "10.0.1.0/24", "fd00::1/128")
    assert canonical(mixed) == nets("10.0.0.0/24", "10.0.1.0/24", "fd00::/64")


def test_countable_own() -> None:
    """Loopback and IPv6 link-local addresses are not named; IPv4 link-local ones are."""
    texts = ("127.0.0.1", "::1", "fe80::1", "169.254.1.1", "192.0.2.1", "2001:db8::1")
    assert countable_own(map(pack, texts)) == {pack("169.254.1.1"), pack("192.0.2.1"), pack("2001:db8::1")}


@pytest.mark.parametrize(
    "cidr", ["127.0.0.0/8", "0.0.0.0/0", "240.0.0.0/4", "224.0.0.1/32", "ff00::/9", "fe80::/64", "::/0"]
)
def test_no_local_range(cidr: str) -> None:
    """A range with loopback, multicast, link-local, unspecified or all-ones addresses cannot be local."""
    assert local_range_fault(ipaddress.ip_network(cidr)).startswith(cidr)


@pytest.mark.parametrize("cidr", ["10.244.1.0/24", "169.254.0.0/16", "240.0.0.0/5", "fd00::/64", "2001:db8::1/128"])
def test_local_range(cidr: str) -> None:
    """A range of ordinary addresses can be local."""
    assert local_range_fault(ipaddress.ip_network(cidr)) == ""


@pytest.mark.parametrize("size", [4, 16])
def test_a_single_address_is_local_as_its_range_is(size: int) -> None:
    """An address can be local exactly where the range of it alone can, whatever it begins with."""
    rests = (bytes(size - 1), bytes(size - 2) + b"\1", b"\x80" * (size - 1), b"\xff" * (size - 1))
    for ip in (bytes([first]) + rest for first in range(256) for rest in rests):
        assert can_be_local(ip) is (local_range_fault(ipaddress.ip_network(ip)) == "")


def test_explain_prefix() -> None:
    """The facts name the class, the line that decided, what lost against it, and what the class carries."""
    assert explain(POLICY, "10.244.1.1", OWN, nets("10.244.0.0/20")) == {
        "address": "10.244.1.1",
        "traffic": "storage",
        "because": "policy",
        "prefix": "10.244.1.0/24",
        "line": "site.yaml:3",
        "beaten": "10.244.0.0/20 pod (local range), 10.244.0.0/16 pod (site.yaml:2), 10.0.0.0/8 private (site.yaml:1)",
        "zone": "eu-1a",
        "region": "eu-1",
        "mark": "0x6/0x1f",
        "policy": "site (/etc/netacct/site.yaml, 0123456789ab)",
    }


def test_explain_local_range() -> None:
    """A local range that decided comes with who named it; one that lost, or that nobody is known for, does not."""
    (local,) = nets("10.244.7.0/24")
    facts = explain(POLICY, "10.244.7.1", OWN, [local], names={local: "cni, kubernetes"})
    assert (facts["because"], facts["prefix"], facts["named_by"]) == ("local range", "10.244.7.0/24", "cni, kubernetes")
    assert "named_by" not in explain(POLICY, "10.244.7.1", OWN, [local])
    (wider,) = nets("10.244.0.0/20")
    assert "named_by" not in explain(POLICY, "10.244.1.1", OWN, [wider], names={wider: "cni"})


def test_explain_own() -> None:
    """The node's own address is explained as that, without a line, because no line decided."""
    facts = explain(POLICY, "192.0.2.1", OWN)
    assert (facts["traffic"], facts["because"], facts.get("line")) == ("node", "the node's own address", None)


def test_explain_loopback() -> None:
    """A loopback address is explained by the loopback range."""
    facts = explain(POLICY, "127.0.0.53")
    assert (facts["traffic"], facts["because"], facts["prefix"]) == ("node", "loopback address", "127.0.0.0/8")


def test_explain_mapped() -> None:
    """An IPv4-mapped IPv6 address is answered as the IPv4 address whose packets are on the wire, with a note."""
    facts = explain(POLICY, "::ffff:10.244.1.1")
    assert (facts["address"], facts["traffic"]) == ("10.244.1.1", "storage")
    assert "10.244.1.1" in facts["note"]
    assert facts["note"].startswith("::ffff:10.244.1.1 is")


def test_explain_zone() -> None:
    """A zone behind an IPv6 address changes nothing, and the answer says so."""
    facts = explain(POLICY, "fe80::1%eth0")
    assert facts.pop("note") == "the zone eth0 plays no part: packets do not carry it"
    assert facts == explain(POLICY, "fe80::1")


@pytest.mark.parametrize("text", ["", "10.0.0", "10.0.0.0/8", "example.org", "1.2.3.4.5", "::g"])
def test_explain_no_address(text: str) -> None:
    """What is no address is an error of usage, exit code 2."""
    with pytest.raises(UsageError) as caught:
        explain(POLICY, text)
    assert caught.value.exit_code == 2
