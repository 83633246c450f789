"""A layout as the text of the real tools; whether they accept it is a kernel test."""

from __future__ import annotations

import ipaddress
from pathlib import Path

import pytest

from netacct.kernel import layout as xt
from netacct.kernel import render
from netacct.kernel.plan import Plan, build
from netacct.model import Family, pack
from netacct.policy import MarkTable, Policy, Prefix, TrafficClass

GOLDEN = Path(__file__).parent.parent / "golden"

CIDRS = {"10.244.0.0/16": "pod", "10.96.0.0/12": "service", "10.0.0.0/8": "private", "fd00:10:244::/48": "pod"}


def _plan() -> Plan:
    policy = Policy(
        "small",
        "small.yaml",
        "0",
        tuple(TrafficClass(name) for name in ("pod", "node", "service", "private", "internet")),
        tuple(Prefix(ipaddress.ip_network(cidr), traffic, "test") for cidr, traffic in CIDRS.items()),
        "internet",
    )
    local = [ipaddress.ip_network("10.244.1.0/30"), ipaddress.ip_network("fd00:10:244:1::/64")]
    own = [pack("10.244.1.1"), pack("192.168.50.1"), pack("fd00:10:244:1::1")]
    return build(policy, local, own, MarkTable(0x1F, {"pod": 1, "internet": 5}))


def _layout(family: Family) -> tuple[xt.Layout, tuple[bytes, ...]]:
    plan = _plan()
    at = [part.family for part in plan.families].index(family)
    return xt.build(plan)[at], plan.families[at].prefilled


@pytest.mark.parametrize("family", [4, 6])
def test_the_text_is_the_one_that_was_reviewed(family: Family) -> None:
    """The sets and rules of a small plan are, to the letter, those of the golden files (rewrite them when meant)."""
    layout, prefilled = _layout(family)
    epochs = {spec.name: 1000 + at for at, spec in enumerate(layout.sets)}
    names = {spec.name: f"{spec.name}-0k3x9z" for spec in layout.sets if spec.catch_all}
    for kind, text in (
        ("ipset", render.ipset_text(layout, prefilled, epochs, names)),
        ("iptables", render.iptables_text(layout, names)),
    ):
        assert text == (GOLDEN / f"layout-v{family}.{kind}").read_text(encoding="utf-8")


def test_a_sentinel_is_written_only_where_an_epoch_is_known() -> None:
    """Without epochs the text has no sentinel; with one it is the all-ones address, or the end of a bitmap's range."""
    layout, prefilled = _layout(6)
    assert "ffff:ffff" not in render.ipset_text(layout, prefilled)
    text = render.ipset_text(layout, prefilled, {"nacc6-tx-pod": 77})
    assert [line for line in text.splitlines() if "packets" in line] == [
        "add nacc6-tx-pod ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff packets 1 bytes 77"
    ]
    layout, prefilled = _layout(4)
    text = render.ipset_text(layout, prefilled, {"nacc4-tx-pod": 77})
    assert "create nacc4-tx-pod bitmap:ip range 10.244.1.0-10.244.1.4 counters\n" in text
    assert [line for line in text.splitlines() if "packets" in line] == [
        "add nacc4-tx-pod 10.244.1.4 packets 1 bytes 77"
    ]


def test_the_lines_for_people_are_the_rules_of_the_restore_text() -> None:
    """`rules` gives each rule of the restore input once, hooks first, and nothing else."""
    layout, _ = _layout(4)
    lines = render.rules(layout)
    restored = [line for line in render.iptables_text(layout).splitlines() if line.startswith(("-A", "-I"))]
    assert sorted(lines) == sorted(restored)
    assert [line.split()[0] for line in lines] == sorted((line.split()[0] for line in lines), reverse=True)


def test_the_removal_names_everything_that_the_text_makes() -> None:
    """Each hook is deleted, each chain emptied and then deleted, the hooks before the chains they lead to."""
    layout, _ = _layout(4)
    commands = [line.split()[:2] for line in render.removal_text(layout).splitlines() if line.startswith("-")]
    chains = [chain.name for chain in layout.chains]
    hooks = [hook.name for hook in layout.hooks for _ in hook.rules]
    assert commands == [["-D", name] for name in hooks] + [[f"-{way}", name] for way in "FX" for name in chains]


def test_every_field_of_a_rule_is_written() -> None:
    """A rule with everything in it shows everything, in the order of iptables-save."""
    rule = xt.Rule(
        xt.Jump("NETACCT-TX", goto=True),
        source=ipaddress.ip_network("10.0.0.0/8"),
        destination=ipaddress.ip_network("192.0.2.0/24"),
        not_in="lo",
        not_out="eth0",
        udp_ports=(1, 2),
        unmarked=0x1F,
        sets=(xt.SetMatch("a", "src", negate=True), xt.SetMatch("b", "dst", update_counters=False)),
    )
    assert render.rule_text(rule, {"b": "b-000001"}) == (
        " -s 10.0.0.0/8 -d 192.0.2.0/24 ! -i lo ! -o eth0 -p udp -m multiport --dports 1,2 -m mark --mark 0x0/0x1f"
        " -m set ! --match-set a src -m set --match-set b-000001 dst ! --update-counters -g NETACCT-TX"
    )
    assert render.rule_text(xt.Rule()) == ""
