"""The demo's own rules of what is counted where."""

from __future__ import annotations

import ipaddress

import pytest

from netacct.demo import expect, flows
from netacct.demo.expect import Series, host_series, pod_series
from netacct.demo.flows import Burst, Datagrams
from netacct.demo.peers import Count, Flight
from netacct.demo.traffic import Tally
from netacct.demo.world import ADDRESSES, FAMILIES, PODS, Family

NODE = frozenset({"192.168.50.1", "10.244.1.1", "fd00:50::1", "fd00:10:244:1::1", "fe80::aa:bb01"})
TALLY = Tally(Count(1000, 10), Count(900, 9), Count(200, 2), Count(100, 1))


def booked(client: str, to: str, server: str) -> dict[Series, int]:
    """What an exchange with TALLY's sizes adds, in bytes."""
    flow = Datagrams(client, to, server, 20000, Burst(1, 1), Burst(1, 1))
    return {series: count.bytes for series, count in expect.expected_of_datagrams(flow, 4, TALLY)}


@pytest.mark.parametrize(
    ("address", "traffic"),
    [
        ("10.244.1.77", "pod"),
        ("10.244.1.1", "node"),
        ("127.0.0.1", "node"),
        ("192.168.50.9", "node"),
        ("10.96.0.10", "service"),
        ("10.1.2.3", "private"),
        ("172.20.9.5", "storage"),
        ("172.20.8.5", "private"),
        ("203.0.113.10", "internet"),
        ("fd00:10:244:9::1", "pod"),
        ("fe80::1", "private"),
        ("ff02::16", "private"),
        ("2001:db8::1", "internet"),
    ],
)
def test_class(address: str, traffic: str) -> None:
    """The node's own addresses come first, then the longest prefix decides, and the rest is internet."""
    assert expect.class_of(ipaddress.ip_address(address)) == traffic


def test_between_pods_each_end_gets_what_its_own_socket_counted() -> None:
    """A packet that is lost on the way counts as sent and not as received."""
    assert booked("train-0", "eval-0", "eval-0") == {
        pod_series("train-0", "transmit", "pod"): 1000,
        pod_series("eval-0", "receive", "pod"): 900,
        pod_series("eval-0", "transmit", "pod"): 200,
        pod_series("train-0", "receive", "pod"): 100,
    }


def test_service_asked_by_a_pod_is_booked_as_its_backend() -> None:
    """A pod's packet to a ClusterIP counts by the pod that gets it."""
    assert pod_series("train-0", "transmit", "pod") in booked("train-0", "service-web", "web-0")


def test_service_asked_by_the_node_is_booked_as_service() -> None:
    """The node's own packet is counted before its destination is rewritten, the answer by who sent it."""
    found = booked("node", "service-web", "web-0")
    assert (found[host_series("transmit", "service")], found[host_series("receive", "pod")]) == (1000, 100)


def test_host_port_through_loopback_is_booked_at_the_pod_only() -> None:
    """What the node sends itself by lo is not the host's, but the pod's answer reaches it by the pod's link."""
    assert booked("node-loopback", "node-loopback", "web-0") == {
        pod_series("web-0", "receive", "node"): 900,
        pod_series("web-0", "transmit", "node"): 200,
        host_series("receive", "pod"): 100,
    }


def test_forwarded_for_others_is_booked_to_nobody() -> None:
    """Traffic of neither a pod of the node nor the node itself appears nowhere."""
    assert booked("internet", "node", "remote") == {}


@pytest.mark.parametrize(
    ("actor", "flight", "series"),
    [
        # neighbour discovery of a pod, from its own address to the node's group
        (
            "train-0",
            Flight(True, False, "fd00:10:244:1::10", "ff02::1:ffaa:bb01"),
            {pod_series("train-0", "transmit", "private"), host_series("receive", "pod")},
        ),
        # MLD of a pod: the node does not listen, and the pod's link-local address is nobody's
        ("train-0", Flight(True, False, "fe80::5", "ff02::16"), set()),
        # router solicitation of a pod, from its link-local address: the host's end only
        ("train-0", Flight(True, False, "fe80::5", "ff02::2"), {host_series("receive", "private")}),
        # MLD of the node, seen at a pod's end
        ("train-0", Flight(False, False, "fe80::aa:bb01", "ff02::16"), {host_series("transmit", "private")}),
        # the same group, asked behind a router that is not the node
        ("remote", Flight(True, False, "fd00:10:244:2::20", "ff02::1:ffaa:bb01"), set()),
        # what encapsulates pods' packets is the host's
        ("other", Flight(False, True, "192.168.50.1", "192.168.50.2"), {host_series("transmit", "tunnel")}),
        ("other", Flight(True, True, "192.168.50.2", "192.168.50.1"), {host_series("receive", "tunnel")}),
        # a masqueraded pod looks like the node, but this internet host only ever meets pods
        ("internet", Flight(False, False, "192.168.50.1", "203.0.113.10"), set()),
        ("internet", Flight(True, False, "203.0.113.20", "192.168.50.1"), {host_series("receive", "internet")}),
        # the answer of a ClusterIP comes from its backend
        ("eval-0", Flight(False, False, "10.96.0.10", "10.244.1.12"), {pod_series("eval-0", "receive", "pod")}),
    ],
)
def test_flight(actor: str, flight: Flight, series: set[Series]) -> None:
    """Packets that kernels make are booked by what the node's hooks see of them."""
    found = dict(expect.expected_of_flight(actor, flight, Count(72, 1), NODE))
    assert found == dict.fromkeys(series, Count(72, 1))


def test_total_adds_the_levels_above_the_pod() -> None:
    """Pods of one workload and namespace add up there, and a series of nothing does not exist."""
    parts = [
        (pod_series("train-0", "receive", "pod"), Count(10, 1)),
        (pod_series("train-1", "receive", "pod"), Count(5, 1)),
        (pod_series("web-0", "receive", "node"), Count(0, 0)),
    ]
    assert expect.total(parts) == {
        Series("pod", "team-a", "train-0", "receive", "pod"): Count(10, 1),
        Series("pod", "team-a", "train-1", "receive", "pod"): Count(5, 1),
        Series("workload", "team-a", "Job/train", "receive", "pod"): Count(15, 2),
        Series("namespace", "team-a", "", "receive", "pod"): Count(15, 2),
    }


def test_growth_names_a_series_that_shrank() -> None:
    """A total that went down is a difference like any other."""
    series = host_series("receive", "node")
    assert expect.grown({series: Count(10, 1)}, {}) == {series: Count(-10, -1)}


@pytest.mark.parametrize("family", FAMILIES)
def test_conversations_differ(family: Family) -> None:
    """No two exchanges of a family share a port or the bytes of a burst, so that no two mistakes cancel out."""
    exchanges = flows.datagrams(family)
    assert len({flow.port for flow in exchanges}) == len(exchanges)
    sums = [burst.number * burst.size for flow in exchanges for burst in (flow.requests, flow.replies)]
    assert len(set(sums)) >= len(sums) * 0.9


@pytest.mark.parametrize("family", FAMILIES)
def test_conversations_name_places_that_exist(family: Family) -> None:
    """Everybody who talks has an address, and nobody talks to a pod that has died in an earlier family's turn."""
    exchanges = (*flows.datagrams(family), *flows.heir_datagrams(family))
    places = {place for flow in exchanges for place in (flow.client, flow.to, flow.server)}
    assert places <= set(ADDRESSES[family])
    assert ("train-1" in places) == (family == 4)
    assert len(places & set(PODS)) == 5  # four, and the heir of this turn
