"""Which series a flow belongs to, decided without the agent's code."""

from __future__ import annotations

import pytest
from clusterlab import plan
from clusterlab.classes import Series, Translations, differences, expected, since
from clusterlab.truth import Count, Flow, PodId

_NODE = Translations(
    frozenset({"192.168.50.11", "10.244.1.1"}), {"10.96.0.1": "node", "10.96.7.7": "pod"}, {30080: 7080}
)
_SERIES = Series("a", "p", "transmit", "pod")


@pytest.mark.parametrize(
    ("peer", "own_port", "peer_port", "traffic"),
    [
        ("10.244.2.9", 40000, 7000, "pod"),
        ("fd00:10:244:2::9", 40000, 7000, "pod"),
        ("10.244.1.1", 40000, 7000, "node"),
        ("192.168.50.11", 40000, 7100, "node"),
        ("192.168.50.11", 40000, 30080, "pod"),
        ("10.244.1.1", 7080, 40000, "pod"),
        ("192.168.50.12", 40000, 30080, "node"),
        ("10.96.0.1", 40000, 443, "node"),
        ("10.96.7.7", 40000, 7000, "pod"),
        ("10.96.8.8", 40000, 7000, "service"),
        ("ff02::1:ff00:1", 0, 0, "private"),
        (plan.INTERNET[4], 40000, 7100, "internet"),
        (plan.INTERNET[6], 40000, 7100, "internet"),
    ],
)
def test_the_class_of_a_flow(peer: str, own_port: int, peer_port: int, traffic: str) -> None:
    """The class is that of the real peer: behind ClusterIPs and this node's hostPorts, not behind those of others."""
    assert _NODE.traffic(Flow("transmit", peer, "udp", own_port, peer_port)) == traffic


def test_pods_of_one_name_are_one_series() -> None:
    """The flows of two pods that had one name, one after the other, are summed."""
    flow = Flow("transmit", "10.244.2.9", "udp", 40000, 7000)
    pods = {PodId("a", "p", uid): {flow: Count(100, 2)} for uid in ("1", "2")}
    assert expected(pods, _NODE) == {_SERIES: Count(200, 4)}


def test_a_series_on_one_side_only_is_a_difference() -> None:
    """A series that only the pods have, or only the agent, differs from nothing."""
    some = {_SERIES: Count(10, 1)}
    assert [(row.sent, row.counted) for row in differences("n", some, {})] == [(Count(10, 1), Count(0, 0))]
    assert [(row.sent, row.counted) for row in differences("n", {}, some)] == [(Count(0, 0), Count(10, 1))]
    assert differences("n", some, dict(some)) == []


def test_what_was_added_since() -> None:
    """What was there before is taken off; a series that began again counts whole."""
    other = _SERIES._replace(pod="q")
    before = {_SERIES: Count(10, 1), other: Count(10, 1)}
    assert since({_SERIES: Count(15, 2), other: Count(4, 1)}, before) == {_SERIES: Count(5, 1), other: Count(4, 1)}
    assert since(before, before) == {}
