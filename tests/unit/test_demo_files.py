"""The demo's texts: the files it writes for the agent, the page it reads, and what it shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from netacct import config, policy_file
from netacct.demo import exposition, files, peers, report, session
from netacct.demo.expect import Series
from netacct.demo.netns import DemoError
from netacct.demo.peers import Count, Flight
from netacct.demo.stage import Row
from netacct.demo.world import FIRST_PODS
from netacct.identity import pods_file

HOST = Series("host", "", "", "receive", "node")
POD = Series("pod", "team-a", "train-0", "transmit", "pod")
NAMESPACE = Series("namespace", "team-a", "", "transmit", "pod")


def test_the_agent_accepts_the_files(tmp_path: Path) -> None:
    """Configuration, policy and pods are valid for the agent's own readers, and stay in the demo's folder."""
    (tmp_path / "netacct.yaml").write_text(files.config(tmp_path, "iptables", cni=False))
    (tmp_path / "policy.yaml").write_text(files.policy())
    (tmp_path / "pods.yaml").write_text(files.pods(FIRST_PODS))
    effective = config.load(str(tmp_path / "netacct.yaml"))
    assert effective.metrics.zero_first == 0
    assert {Path(effective.state_dir), Path(effective.accounts_dir)} == {tmp_path / "state", tmp_path / "accounts"}
    assert "storage" in {known.name for known in policy_file.load(effective.policy).classes}
    observations = pods_file.parse((tmp_path / "pods.yaml").read_bytes(), effective.identity.file.path, 0.0)
    assert len(observations) == 2 * len(FIRST_PODS)


def test_page_is_read_into_totals() -> None:
    """Bytes and packets of every level are found by their labels; other metrics and zeros are left out."""
    page = (
        "# TYPE netacct_pod_transmit_bytes_total counter\n"
        'netacct_pod_transmit_bytes_total{namespace="team-a",pod="train-0",traffic="pod"} 1500.0\n'
        'netacct_pod_transmit_packets_total{namespace="team-a",pod="train-0",traffic="pod"} 2\n'
        'netacct_host_receive_bytes_total{traffic="node"} 7e+01\n'
        'netacct_host_receive_bytes_total{traffic="pod"} 0\n'
        'netacct_workload_receive_bytes_total{namespace="a",workload_kind="Job",workload="x\\"y",traffic="pod"} 1\n'
        "netacct_ambiguous_bytes_total 5\n"
    )
    assert exposition.totals(page) == {
        POD: Count(1500, 2),
        HOST: Count(70, 0),
        Series("workload", "a", 'Job/x"y', "receive", "pod"): Count(1, 0),
    }


def test_pods_are_read_from_their_info() -> None:
    """A pod is known as soon as its info is there, whether it has traffic or not."""
    page = 'netacct_pod_info{namespace="a",pod="b",uid="c"} 1\nnetacct_pod_info{pod="d",workload="e"} 1\n'
    assert exposition.pods(page) == {("b", ""), ("d", "e")}


def test_listing_of_nft_is_read() -> None:
    """Elements of the peers' sets become flights, with addresses in their shortest form."""
    element = {"val": {"concat": ["fd00:0::1", "ff02::16"]}, "counter": {"packets": 2, "bytes": 144}}
    listing = {"nftables": [{"metainfo": {}}, {"set": {"name": "outouter6", "elem": [{"elem": element}]}}]}
    found = dict(peers.parse(json.dumps(listing)))
    assert found == {Flight(leaving=True, outer=True, source="fd00::1", destination="ff02::16"): Count(144, 2)}


def test_nothing_is_not_exact() -> None:
    """A run that compared nothing has shown nothing."""
    assert not report.exact([])


def test_packets_count_for_exactness() -> None:
    """Equal bytes in another number of packets are a difference."""
    assert report.exact([Row(4, POD, Count(10, 1), Count(10, 1))])
    assert not report.exact([Row(4, POD, Count(10, 1), Count(10, 2))])
    assert report.exact([Row(4, HOST, Count(10, 1), Count(10, 0))])  # no packets are exported for the host


def test_document_has_pods_and_the_host() -> None:
    """The JSON form has exactly the promised keys; sums over pods are there only when they differ."""
    same = [Row(6, HOST, Count(5, 1), Count(5, 1)), Row(6, NAMESPACE, Count(1, 1), Count(1, 1))]
    assert report.document(same) == {
        "exact": True,
        "series": [
            {
                "namespace": "",
                "pod": "",
                "direction": "receive",
                "traffic": "node",
                "family": "ipv6",
                "sent_bytes": 5,
                "counted_bytes": 5,
            }
        ],
    }
    differing = report.document([Row(4, NAMESPACE, Count(1, 1), Count(2, 1))])
    assert (differing["exact"], len(report.shown([Row(4, NAMESPACE, Count(1, 1), Count(2, 1))]))) == (False, 1)


def test_unattributed_traffic_is_a_difference() -> None:
    """A series that nobody expected shows up with nothing sent."""
    row = Row(4, Series("unattributed", "", "", "receive", "pod"), Count(0, 0), Count(99, 1))
    assert report.cells([row]) == [
        ("ipv4", "-", "unattributed", "receive", "pod", "0", "99", "99", "-", "-"),
    ]
    assert "1 of them differ" in report.verdict([row])


def test_missing_tool_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that is not there is named together with its package."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setitem(session.TOOLS, "no-such-program", "no-such-package")
    with pytest.raises(DemoError, match=r"no-such-program \(Debian package no-such-package\)"):
        session.require_tools()
