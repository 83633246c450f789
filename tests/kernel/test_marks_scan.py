"""The scan for other users of mark bits, against the real thing planted in a namespace by the real tools."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab import Lab, inside, namespace

from netacct.errors import DatapathError
from netacct.kernel import marks, marks_route, marks_xtables

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root for network namespaces"),
    pytest.mark.skipif(shutil.which("iptables-legacy") is None, reason="needs iptables-legacy"),
]

MASK = 0x1F

needs_nft = pytest.mark.skipif(
    shutil.which("nft") is None or shutil.which("iptables-nft") is None, reason="needs nft and iptables-nft"
)


@pytest.fixture
def lab_empty() -> Iterator[Lab]:
    """A namespace with nothing in it."""
    with namespace("nacm") as lab:
        yield lab


def _scan(lab: Lab, mask: int = MASK) -> list[tuple[str, str, int]]:
    with inside(lab.name("node")):
        found = marks.scan(mask, Path("/nonexistent"))
    return [(finding.kind, finding.where, finding.bits) for finding in found]


def _plant(lab: Lab, *commands: str) -> None:
    for command in commands:
        lab.run("node", *command.split())


def test_an_empty_namespace_has_no_findings_and_stays_empty(lab_empty: Lab) -> None:
    """The scan finds nothing where nothing is, and makes no legacy table by looking."""
    assert _scan(lab_empty) == []
    assert lab_empty.run("node", "cat", "/proc/net/ip_tables_names", "/proc/net/ip6_tables_names") == ""


@pytest.mark.parametrize("tool", ["iptables", "ip6tables"])
@pytest.mark.parametrize(
    ("table", "rule", "bits"),
    [
        ("mangle", "FORWARD -j MARK --set-mark 0x1", 0x1F),
        ("mangle", "PREROUTING -j MARK --set-xmark 0x10/0x10", 0x10),
        ("nat", "OUTPUT -j MARK --or-mark 0x4", 0x4),
        ("mangle", "PREROUTING -j CONNMARK --restore-mark --nfmask 0xff --ctmask 0x80", 0x1F),
        ("mangle", "PREROUTING -p udp -j TPROXY --on-port 9 --tproxy-mark 0x1/0x1", 0x1),
        ("mangle", "OUTPUT -j HMARK --hmark-tuple src --hmark-mod 10 --hmark-offset 1 --hmark-rnd 0x1", 0x1F),
    ],
)
def test_a_legacy_rule_that_sets_our_bits_is_found(lab_empty: Lab, tool: str, table: str, rule: str, bits: int) -> None:
    """Each target that writes marks is found in each family and table, with the bits that it may change."""
    _plant(lab_empty, f"{tool}-legacy -t {table} -N before", f"{tool}-legacy -t {table} -A {rule}")
    words = rule.split()
    chain, target = words[0], words[words.index("-j") + 1]
    assert _scan(lab_empty) == [("sets", f"{tool} table {table} chain {chain} target {target}", bits)]


def test_a_set_that_maps_marks_is_found(lab_empty: Lab) -> None:
    """`SET --map-mark` takes its bits from the set's elements, so it may change all of ours."""
    _plant(
        lab_empty,
        "ipset create m hash:ip skbinfo",
        "iptables-legacy -t mangle -N users",
        "iptables-legacy -t mangle -A users -j SET --map-set m src --map-mark",
    )
    assert _scan(lab_empty) == [("sets", "iptables table mangle chain users target SET", MASK)]


def test_rules_that_match_our_bits_are_users_not_owners(lab_empty: Lab) -> None:
    """A rule that matches our bits, sets others, or saves marks into the connection is no finding, nor are ours."""
    _plant(
        lab_empty,
        "iptables-legacy -t mangle -A FORWARD -m mark --mark 0x1/0x1f -j ACCEPT",
        "iptables-legacy -t nat -A PREROUTING -j MARK --set-xmark 0x4000/0x4000",
        "iptables-legacy -t mangle -A POSTROUTING -j CONNMARK --save-mark",
        "iptables-legacy -t mangle -N NETACCT-TX-pod",
        "iptables-legacy -t mangle -A NETACCT-TX-pod -m mark --mark 0/0x1f -j MARK --set-xmark 0x1/0x1f",
    )
    assert _scan(lab_empty) == []


@needs_nft
@pytest.mark.parametrize(
    ("statement", "bits"),
    [
        ("meta mark set 0x1", 0x1F),
        ("meta mark set ct mark", 0x1F),
        ("meta mark set meta mark and 0xfffffff3 or 0x8", 0xC),
        ("meta mark set meta mark or 0x2", 0x2),
        ("meta mark set ip saddr map { 10.0.0.1 : 0x100 }", 0x1F),
        ("meta mark set meta mark and 0xffff0fff or 0x3000", 0),
        ("meta mark 0x1 accept", 0),
        ("ct mark set meta mark", 0),
    ],
)
def test_an_nftables_rule_that_sets_our_bits_is_found(lab_empty: Lab, statement: str, bits: int) -> None:
    """Each way to write a mark in nftables is found with the bits that it changes, and reading one is not."""
    ruleset = f"table ip t {{ chain c {{ type filter hook forward priority -150; {statement}; }}\n}}\n"
    lab_empty.run("node", "nft", "-f", "-", text=ruleset)
    assert _scan(lab_empty) == ([("sets", "nftables table t chain c", bits)] if bits else [])


@needs_nft
def test_a_rule_of_iptables_nft_is_found(lab_empty: Lab) -> None:
    """The xt targets that iptables-nft puts into nftables are read like those of legacy tables."""
    _plant(
        lab_empty,
        "iptables-nft -t mangle -A FORWARD -j MARK --set-xmark 0x10/0x1f",
        "ip6tables-nft -t mangle -A FORWARD -j CONNMARK --restore-mark --mask 0x3",
    )
    assert sorted(_scan(lab_empty)) == [
        ("sets", "nftables table mangle chain FORWARD", 0x3),
        ("sets", "nftables table mangle chain FORWARD", 0x1F),
    ]


def test_an_ip_rule_that_selects_by_our_bits_is_found(lab_empty: Lab) -> None:
    """Policy routing by our bits is found in both families; by others, or by no mark, it is not."""
    _plant(
        lab_empty,
        "ip rule add priority 10 fwmark 0x1 lookup 100",
        "ip -6 rule add priority 11 fwmark 0x10/0x30 lookup 100",
        "ip rule add priority 12 fwmark 0x80/0x80 lookup 100",
        "ip rule add priority 13 from 192.0.2.1 lookup 100",
    )
    assert _scan(lab_empty) == [
        ("selects", "ip rule priority 10 fwmark 0x1/0xffffffff", 0x1F),
        ("selects", "ip -6 rule priority 11 fwmark 0x10/0x30", 0x10),
    ]


def test_tc_actions_are_listed_by_kind(lab_empty: Lab) -> None:
    """The dump of tc actions finds those of a kind that this kernel has; one that sets no mark has no bits."""
    _plant(lab_empty, "ip link set lo up", "tc actions add action mirred egress redirect dev lo index 7")
    with inside(lab_empty.name("node")):
        assert marks_route.actions_of("mirred") == [("tc action mirred index 7", 0)]
        assert marks_route.actions() == []


def test_known_owners_are_found_by_interface_chain_and_socket(lab_empty: Lab, tmp_path: Path) -> None:
    """Cilium's interface, Tailscale's chain and NetBird's socket each tell that their owner is here."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/netbird.sock").touch()
    _plant(
        lab_empty,
        "ip link add cilium_host type veth peer name other",
        "iptables-legacy -t filter -N ts-forward",
    )
    with inside(lab_empty.name("node")):
        found = marks.scan(0x40010, tmp_path)
    assert [(finding.owner, finding.where, finding.bits, finding.kind) for finding in found] == [
        ("Cilium", "interface cilium_host", 0x40010, "present"),
        ("Tailscale", "chain ts-forward", 0x40000, "present"),
        ("NetBird", "/run/netbird.sock", 0x40010, "present"),
    ]


def test_modes_decide_on_what_the_node_has(lab_empty: Lab) -> None:
    """`auto` turns marks off beside a rule that sets our bits, `on` is refused there, and both set them without it."""
    rule = "mangle -A FORWARD -j MARK --set-xmark 0x1/0x1"
    _plant(lab_empty, f"iptables-legacy -t {rule}")
    nowhere = Path("/nonexistent")
    with inside(lab_empty.name("node")):
        assert not marks.resolve("auto", MASK, nowhere).enabled
        with pytest.raises(DatapathError, match="mangle chain FORWARD target MARK"):
            marks.resolve("on", MASK, nowhere)
    _plant(lab_empty, f"iptables-legacy -t {rule.replace('-A', '-D')}")
    with inside(lab_empty.name("node")):
        assert marks.resolve("auto", MASK, nowhere).enabled
        assert marks.resolve("on", MASK, nowhere).enabled


def test_a_large_table_is_read_whole(lab_empty: Lab) -> None:
    """Behind two thousand foreign rules in chains of their own the one that sets our bits is still found."""
    lines = ["*mangle", *(f":chain{at} - [0:0]" for at in range(20))]
    lines += [f"-A chain{at % 20} -s 10.{at // 256}.{at % 256}.0/24 -m mark --mark 0x1 -j ACCEPT" for at in range(2000)]
    lines += ["-A chain19 -j MARK --set-xmark 0x2/0x2", "COMMIT", ""]
    lab_empty.run("node", "iptables-legacy-restore", text="\n".join(lines))
    assert _scan(lab_empty) == [("sets", "iptables table mangle chain chain19 target MARK", 0x2)]
    with inside(lab_empty.name("node")):
        assert {f"chain{at}" for at in range(20)} < marks_xtables.read()[1]
