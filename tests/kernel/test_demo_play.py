"""The demo's own arithmetic, held against counters at the node's hooks that are not netacct's."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Collection, Iterator

import pytest

from netacct.demo import expect
from netacct.demo.expect import Series, Totals
from netacct.demo.netns import Namespace
from netacct.demo.peers import NOTHING, Count
from netacct.demo.stage import Row, Stage
from netacct.demo.topology import Topology
from netacct.demo.world import ADDRESSES, FIRST_PODS, VXLAN_PORT, Family

pytestmark = pytest.mark.kernel

HOOKS = {"forward": "", "input": "iiftype loopback return", "output": "oiftype loopback return"}
HOOKS["postrouting"] = "oiftype loopback return"


def ruleset() -> str:
    """Counts by source and destination in each hook of the node, where the mangle table sits."""
    text = ""
    for hook, guard in HOOKS.items():
        for family in (4, 6):
            for kind in ("plain", "outer"):
                text += f"set {hook}{kind}{family} {{\ntype ipv{family}_addr . ipv{family}_addr\n"
                text += "flags dynamic\nsize 4096\n}\n"
        text += f"chain {hook} {{\ntype filter hook {hook} priority -149\n{guard}\n"
        text += f"udp dport {VXLAN_PORT} update @{hook}outer4 {{ ip saddr . ip daddr counter }}\n"
        text += f"udp dport {VXLAN_PORT} update @{hook}outer6 {{ ip6 saddr . ip6 daddr counter }}\n"
        text += f"udp dport {VXLAN_PORT} return\n"
        text += f"update @{hook}plain4 {{ ip saddr . ip daddr counter }}\n"
        text += f"update @{hook}plain6 {{ ip6 saddr . ip6 daddr counter }}\n}}\n"
    return f"table inet reference {{\n{text}}}\n"


class HookMeter:
    """Books what the node's hooks saw, read off the architecture's table line by line."""

    def __init__(self, node: Namespace) -> None:
        self._node = node
        self._pods: list[str] = list(FIRST_PODS)
        self._totals: Totals = {}
        self._last: dict[tuple[str, str, str], Count] = {}
        node.run(["nft", "-f", "-"], ruleset())

    def follow(self, pods: Collection[str]) -> None:
        """Book what came so far to those who had the addresses until now."""
        self.read()
        self._pods = list(pods)

    def read(self) -> Totals:
        """All totals so far."""
        for series, count in self._fresh():
            self._totals[series] = self._totals.get(series, NOTHING).plus(count)
        return expect.total(self._totals.items())

    def _fresh(self) -> Iterator[tuple[Series, Count]]:
        for item in json.loads(self._node.run(["nft", "-j", "list", "sets"]))["nftables"]:
            entry = item.get("set", {})
            for element in entry.get("elem", ()):
                source, destination = element["elem"]["val"]["concat"]
                now = Count(element["elem"]["counter"]["bytes"], element["elem"]["counter"]["packets"])
                key = (entry["name"], source, destination)
                count = now.minus(self._last.get(key, NOTHING))
                self._last[key] = now
                if count != NOTHING:
                    yield from self._book(entry["name"], source, destination, count)

    def _book(self, name: str, source: str, destination: str, count: Count) -> Iterator[tuple[Series, Count]]:
        sender, receiver = self._pod(source), self._pod(destination)
        to = expect.class_of(ipaddress.ip_address(destination))
        of = expect.class_of(ipaddress.ip_address(source))
        if "outer" in name:
            to = of = "tunnel"
        if name.startswith("forward") and sender:
            yield expect.pod_series(sender, "transmit", to), count
        if name.startswith("input"):
            if sender:
                own = not expect.is_group_or_link_local(ipaddress.ip_address(destination))
                yield expect.pod_series(sender, "transmit", "node" if own else to), count
            yield expect.host_series("receive", of), count
        if name.startswith("output") and not sender:
            yield expect.host_series("transmit", to), count
        if name.startswith("postrouting") and receiver:
            yield expect.pod_series(receiver, "receive", of), count

    def _pod(self, address: str) -> str:
        ip = ipaddress.ip_address(address)
        family: Family = 4 if ip.version == 4 else 6
        return next((pod for pod in self._pods if ipaddress.ip_address(ADDRESSES[family][pod]) == ip), "")


@pytest.fixture(scope="module")
def rows() -> Iterator[list[Row]]:
    """One play of the demo against the node's hooks."""
    topology = Topology()
    try:
        topology.build()
        yield Stage(topology, HookMeter(topology.spaces["node"])).play(print)
    finally:
        topology.close()


def test_every_series_agrees_with_the_hooks(rows: list[Row]) -> None:
    """What the peers sent, sorted by the demo's rules, is what counters at the node's own hooks saw."""
    assert [row for row in rows if not row.exact] == []


@pytest.mark.parametrize("family", [4, 6])
def test_every_class_is_driven(rows: list[Row], family: Family) -> None:
    """Pods and the host see each class that they can see, in both directions and both families."""
    seen = {(row.series.level, row.series.direction, row.series.traffic) for row in rows if row.family == family}
    of_pods = {"pod", "node", "private", "storage", "internet"}
    for direction in ("receive", "transmit"):
        assert {traffic for level, way, traffic in seen if (level, way) == ("pod", direction)} == of_pods
    assert {traffic for level, way, traffic in seen if (level, way) == ("host", "receive")} == {*of_pods, "tunnel"}
    sent = {traffic for level, way, traffic in seen if (level, way) == ("host", "transmit")}
    assert sent == {*of_pods, "tunnel", "service"}


@pytest.mark.parametrize(("family", "dead", "heir"), [(4, "train-1", "eval-1"), (6, "eval-0", "train-2")])
def test_both_tenants_of_an_address_have_traffic(rows: list[Row], family: Family, dead: str, heir: str) -> None:
    """The pod that died and the pod that got its address each have series of their own."""
    pods = {row.series.name for row in rows if row.family == family and row.series.level == "pod"}
    assert {dead, heir} <= pods
