"""Following cluster ranges: what holds while a file is written anew, what is told, and to whom."""

from __future__ import annotations

import ipaddress
import queue
from pathlib import Path

import pytest

from netacct.errors import DatapathError
from netacct.identity.cluster import Kept, Reading, keep
from netacct.identity.cluster_ranges import ClusterRanges
from netacct.identity.cluster_routes import LIMIT, joined_up, plugin_of
from netacct.policy import Prefix

FLANNEL = "found in /run/flannel/subnet.env (FLANNEL_NETWORK)"


def fact(cidr: str, traffic: str = "pod", origin: str = "found in a test") -> Prefix:
    """A fact."""
    return Prefix(ipaddress.ip_network(cidr), traffic, origin)


def test_what_was_said_holds_until_something_else_is_said() -> None:
    """A kind that says nothing, or was not asked, keeps its word; what it says next takes its place."""
    first = keep(Kept({}), [Reading("a", (fact("10.1.0.0/16"),)), Reading("b", (fact("10.2.0.0/16"),))])
    silent = keep(first, [Reading("a")])
    assert silent.all == first.all
    assert silent.stale == {"a"}
    then = keep(silent, [Reading("a", (fact("10.3.0.0/16"),))])
    assert [str(one.network) for one in then.all] == ["10.2.0.0/16", "10.3.0.0/16"]
    assert not then.stale


def test_a_part_that_cannot_be_read_holds_beside_the_rest() -> None:
    """Where a kind has a fault, what it said before is joined by what it says now."""
    first = keep(Kept({}), [Reading("a", (fact("10.1.0.0/16"), fact("fd00::/48")))])
    then = keep(first, [Reading("a", (fact("10.1.0.0/16", origin="anew"),), ("half a file",))])
    assert then.all == (fact("10.1.0.0/16", origin="anew"), fact("fd00::/48"))
    assert then.stale == {"a"}


def test_of_equal_facts_the_first_kind_is_named() -> None:
    """A network in one class is there once, in another class once more."""
    found = keep(Kept({}), [Reading("a", (fact("10.1.0.0/16", origin="a"),)), Reading("b", (fact("10.1.0.0/16"),))])
    assert found.all == (fact("10.1.0.0/16", origin="a"),)
    both = keep(found, [Reading("b", (fact("10.1.0.0/16", "service"),))])
    assert {one.traffic for one in both.all} == {"pod", "service"}


@pytest.mark.parametrize(
    ("name", "plugin"),
    [
        ("flannel.1", "flannel"),
        ("flannel-v6.1", "flannel"),
        ("flannel-wg", "flannel"),
        ("flannel.ipip", "flannel"),
        ("cilium_host", "Cilium"),
        ("vxlan.calico", "Calico"),
        ("wireguard.cali", "Calico"),
        ("tunl0", "Calico"),
        ("eth0", ""),
        ("flannel", ""),
        ("xcilium_host", ""),
        ("antrea-gw0", ""),
        ("ovn-k8s-mp0", ""),
        ("cali1234567890a", ""),
    ],
)
def test_interfaces_that_lead_to_pods_are_told_by_name(name: str, plugin: str) -> None:
    """Only interfaces that a plugin makes for other nodes' pods count, and none that Services are routed into, too."""
    assert plugin_of(name) == plugin


def test_neighbours_are_joined() -> None:
    """A full set of node ranges is one network; the joined ones have the same addresses."""
    nets = [ipaddress.ip_network(f"10.244.{n}.0/24") for n in range(LIMIT)]
    assert joined_up([*nets, ipaddress.ip_network("fd00::/64")]) == (
        ipaddress.ip_network("10.244.0.0/16"),
        ipaddress.ip_network("fd00::/64"),
    )


class Lab:
    """A node's root, and a follower of it."""

    def __init__(self, folder: Path, providers: tuple[str, ...] = ("flannel", "rules", "cloud")) -> None:
        self.root = folder
        (folder / "etc").mkdir()
        self.told: queue.SimpleQueue[tuple[Prefix, ...]] = queue.SimpleQueue()
        self.rules: list[Prefix] = []
        self.legacy: list[Prefix] = []
        self.asked: list[str] = []
        self.ranges = ClusterRanges(providers, (self._rules, self._legacy), root=str(folder), proc=str(folder / "proc"))

    def _rules(self) -> list[Prefix]:
        self.asked.append("rules")
        return self.rules

    def _legacy(self) -> list[Prefix]:
        self.asked.append("legacy")
        return self.legacy

    def flannel(self, network: str) -> None:
        """Write subnet.env as flannel does: aside, then renamed."""
        folder = self.root / "run/flannel"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".subnet.env").write_text(f"FLANNEL_NETWORK={network}\n")
        (folder / ".subnet.env").rename(folder / "subnet.env")

    def start(self) -> tuple[Prefix, ...]:
        """Start the follower."""
        return self.ranges.start(self.told.put)


def test_a_file_that_comes_later_is_told(tmp_path: Path) -> None:
    """What is there at the start is returned; a file whose folder was not there yet is told when it is written."""
    lab = Lab(tmp_path)
    assert lab.start() == ()
    try:
        lab.flannel("10.244.0.0/16")
        assert lab.told.get(timeout=30) == (fact("10.244.0.0/16", origin=FLANNEL),)
        lab.flannel("10.245.0.0/16")
        assert lab.told.get(timeout=30) == (fact("10.245.0.0/16", origin=FLANNEL),)
    finally:
        lab.ranges.stop()


def test_a_file_that_vanishes_changes_nothing(tmp_path: Path) -> None:
    """After its file is gone, or has only nonsense, a range is still there beside what else is told."""
    lab = Lab(tmp_path)
    lab.flannel("10.244.0.0/16")
    assert lab.start() == (fact("10.244.0.0/16", origin=FLANNEL),)
    try:
        lab.flannel("0.0.0.0/0")
        (tmp_path / "run/flannel/subnet.env").unlink()
        lab.ranges.learn([fact("10.0.0.0/8", "cluster")])
        assert lab.told.get(timeout=30) == (fact("10.0.0.0/8", "cluster"), fact("10.244.0.0/16", origin=FLANNEL))
    finally:
        lab.ranges.stop()
    assert lab.told.empty()


def test_legacy_rules_are_read_only_where_nothing_else_names_pods(tmp_path: Path) -> None:
    """A legacy table is looked into while no pod range is known, and not at every look; its word holds then."""
    lab = Lab(tmp_path)
    lab.legacy = [fact("10.244.0.0/16", origin="legacy")]
    assert lab.ranges.read()[0] == (fact("10.244.0.0/16", origin="legacy"),)
    assert lab.asked == ["rules", "legacy"]
    lab.ranges.read()
    assert lab.asked == ["rules", "legacy", "rules"]


def test_rules_that_name_pods_spare_the_legacy_tables(tmp_path: Path) -> None:
    """Where nftables names the pods' range, no legacy table is copied."""
    lab = Lab(tmp_path)
    lab.rules = [fact("10.244.0.0/16"), fact("0.0.0.0/1")]
    found, faults = lab.ranges.read()
    assert found == (fact("10.244.0.0/16"),)
    assert faults == ("0.0.0.0/1 is wider than /8, which says nothing about a cluster (found in a test)",)
    assert lab.asked == ["rules"]


def test_rules_that_cannot_be_read_are_a_fault(tmp_path: Path) -> None:
    """A kernel that refuses is named, and everything else is found nevertheless."""

    def refuse() -> list[Prefix]:
        raise DatapathError("Operation not permitted")

    (tmp_path / "run/flannel").mkdir(parents=True)
    (tmp_path / "run/flannel/subnet.env").write_text("FLANNEL_NETWORK=10.244.0.0/16\n")
    ranges = ClusterRanges(("flannel", "rules"), (refuse, list), root=str(tmp_path), proc=str(tmp_path))
    found, faults = ranges.read()
    assert [str(one.network) for one in found] == ["10.244.0.0/16"]
    assert faults == ("rules cannot be read: Operation not permitted",)


def test_what_is_not_asked_for_is_not_looked_at(tmp_path: Path) -> None:
    """Without providers nothing is found, and a cloud's word is not taken."""
    lab = Lab(tmp_path, ())
    lab.flannel("10.244.0.0/16")
    lab.ranges.learn([fact("10.0.0.0/8", "cluster")])
    assert lab.ranges.read() == ((), ())
    assert lab.asked == []
