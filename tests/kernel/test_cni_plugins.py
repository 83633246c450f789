"""The source `cni` and real pods: real plugins, real libcni, real network namespaces, and an agent that counts them."""

from __future__ import annotations

import json
import os
import queue
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import agentlab
import cnilab
import pytest
import support
from cnilab import GATEWAY, RANGES, CniNode, CniPod
from support import PEER

from netacct import agent, clock
from netacct.identity import ranges_cni
from netacct.identity.cni import CniSource
from netacct.identity.source import SourceEvent, Update
from netacct.model import Family, Observation, unpack

pytestmark = pytest.mark.kernel

BOTH: tuple[Family, Family] = (4, 6)


@pytest.fixture(params=["ptp", "bridge"])
def cni(request: pytest.FixtureRequest, netns: support.Netns, tmp_path: Path) -> Iterator[CniNode]:
    """A node whose pods one of the plugins makes."""
    with cnilab.cni_node(netns, tmp_path / "cni", request.param) as made:
        yield made


def said(event: SourceEvent) -> set[tuple[str, str, str, str, str, bool]]:
    """What an event says of each address."""
    return {
        (unpack(seen.ip), seen.pod.namespace, seen.pod.name, seen.pod.uid, seen.sandbox, seen.present)
        for seen in event.observations
    }


def expected(pod: CniPod, *, present: bool) -> set[tuple[str, str, str, str, str, bool]]:
    """What shall be said of a pod, by the addresses that its interface has."""
    ips = [ip for several in cnilab.addresses(pod).values() for ip in several]
    assert len(ips) == 2
    return {(ip, pod.namespace, pod.name, pod.uid, f"sandbox-{pod.uid}", present) for ip in ips}


def test_each_add_and_del_is_seen(cni: CniNode) -> None:
    """Several pods come and go, and of each the source says, by the end of ADD and of DEL, what its interface has."""
    events: queue.Queue[SourceEvent] = queue.Queue()
    source = CniSource([str(cni.results)], rescan=3600.0)
    source.start(events.put)
    try:
        assert said(events.get(timeout=support.PATIENCE)) == set()  # nothing yet, not even the directory
        pods = []
        for name in ("train-0", "train-1", "train-2"):
            before = clock.now()
            pods.append(cni.add("team-a", name))
            came = events.get(timeout=support.PATIENCE)
            assert isinstance(came, Update)
            assert said(came) == expected(pods[-1], present=True)
            assert all(before - 0.1 <= seen.created <= clock.now() for seen in came.observations)
        for pod in reversed(pods):
            gone = expected(pod, present=False)
            cni.delete(pod)
            assert said(events.get(timeout=support.PATIENCE)) == gone
        assert events.empty()
        assert list(cni.results.iterdir()) == []
    finally:
        source.stop()


def test_what_a_reboot_left_behind_is_ignored(cni: CniNode) -> None:
    """Files that lie there from before the boot say nothing, beside one of this boot that does."""
    old = cni.add("team-a", "train-0")
    before = time.time() - clock.now() - 60
    for path in cni.results.iterdir():
        os.utime(path, (before, before))
    new = cni.add("team-a", "train-1")
    found: tuple[Observation, ...] = CniSource([str(cni.results)]).read()
    assert {seen.pod.name for seen in found} == {"train-1"}
    assert {unpack(seen.ip) for seen in found} == set(new.ips.values())
    assert len(list(cni.results.iterdir())) == 2
    cni.delete(old)


def test_the_ranges_are_those_of_the_configuration(cni: CniNode) -> None:
    """What the real plugins were configured with is what the provider of local ranges finds."""
    found = ranges_cni.read([str(cni.configuration)])
    assert [str(network) for network in found.ranges] == [RANGES[4], RANGES[6]]
    assert found.faults == {}


@pytest.mark.parametrize("sources", [["cni"], ["file", "cni", "veth"]], ids=["cni", "all"])
def test_real_pods_are_counted_exactly(cni: CniNode, node: support.Node, tmp_path: Path, sources: list[str]) -> None:
    """An agent that knows pods and ranges by CNI alone books each byte to who had the address, also a second owner."""
    with agentlab.agent_lab(node, tmp_path) as lab:
        lab.pods({})
        lab.configure(
            local_ranges=[],
            ranges={"providers": ["cni"], "cni": {"directories": [str(cni.configuration)]}},
            identity={
                "sources": sources,
                "cni": {"directories": [str(cni.results)]},
                "file": {"path": str(tmp_path / "pods.yaml")},
            },
        )
        lab.start()
        first, second = cni.add("team-a", "train-0"), cni.add("team-b", "eval-0")
        sent: dict[tuple[str, str], int] = {}
        got: dict[tuple[str, str], int] = {}
        drive(node, first, sent, got, 11)
        drive(node, second, sent, got, 5)
        # on a busy machine an agent may take longer than a pod lives, or than the next one takes to come
        agentlab.until(partial(shows, lab, {"train-0", "eval-0"}))
        addresses = [f"{first.ips[4]}/24", f"{first.ips[6]}/64"]
        cni.delete(first)
        agentlab.until(partial(shows, lab, {"eval-0"}))
        heir = cni.add("team-b", "eval-1", addresses)
        assert heir.ips == first.ips
        drive(node, heir, sent, got, 7)
        agentlab.until(partial(shows, lab, {"eval-0", "eval-1"}))
        time.sleep(agent.SHARED_SECONDS)  # a scrape may be answered from a reading that is so old
        page = lab.page()
        assert internet(agentlab.totals(page, "pod", "transmit")) == sent
        assert internet(agentlab.totals(page, "pod", "receive")) == got
        assert internet(agentlab.totals(page, "unattributed", "transmit")) == {}
        to_gateway = node.send(4, (heir.netns, heir.ips[4]), (node.netns, GATEWAY[4]), 9, 100)
        time.sleep(agent.SHARED_SECONDS)
        assert lab.totals()["eval-1", "node"] == to_gateway.bytes
        assert "Traceback" not in lab.log


def test_sources_and_ranges_change_while_the_agent_runs(
    netns: support.Netns, node: support.Node, tmp_path: Path
) -> None:
    """A network that is configured later is counted from then on, and a source that a reload removes says no more."""
    with cnilab.cni_node(netns, tmp_path / "cni") as cni, agentlab.agent_lab(node, tmp_path) as lab:
        conflist = cni.configuration / "10-pods.conflist"
        aside = conflist.rename(tmp_path / "aside")
        lab.pods({})
        lab.configure(
            local_ranges=[],
            ranges={"cni": {"directories": [str(cni.configuration)]}},
            identity={"sources": ["file"], "file": {"path": str(tmp_path / "pods.yaml")}, "late_binding": "0s"},
        )
        lab.start()
        aside.rename(conflist)
        agentlab.until(lambda: all(RANGES[family] in support.table(family) for family in BOTH))
        pod = cni.add("team-a", "train-0")
        sent: dict[tuple[str, str], int] = {}
        drive(node, pod, sent, {}, 3)
        agentlab.until(lambda: internet(lab.totals("unattributed")) == {("", "internet"): sent["train-0", "internet"]})
        for sources, known in ((["cni"], {"train-0"}), (["file"], set())):
            lab.configure(
                identity={
                    "sources": sources,
                    "cni": {"directories": [str(cni.results)]},
                    "file": {"path": str(tmp_path / "pods.yaml")},
                }
            )
            lab.reload()
            agentlab.until(partial(shows, lab, known))


def shows(lab: agentlab.AgentLab, pods: set[str]) -> bool:
    """Whether exactly these pods hold an address now."""
    done = lab.command("pods", "-o", "json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return {entry["pod"] for entry in found} == pods


def drive(
    node: support.Node, pod: CniPod, sent: dict[tuple[str, str], int], got: dict[tuple[str, str], int], packets: int
) -> None:
    """Datagrams of both families between a pod and the internet, added to what was sent and got."""
    for family in BOTH:
        there = node.send(family, (pod.netns, pod.ips[family]), (node.peer, PEER[family]), packets, 300)
        back = node.send(family, (node.peer, PEER[family]), (pod.netns, pod.ips[family]), packets + 1, 200)
        key = (pod.name, "internet")
        sent[key] = sent.get(key, 0) + there.bytes
        got[key] = got.get(key, 0) + back.bytes


def internet(totals: dict[tuple[str, str], int]) -> dict[tuple[str, str], int]:
    """The totals of class internet: what else there is, the kernels said to each other (neighbour discovery)."""
    return {key: octets for key, octets in totals.items() if key[1] == "internet"}
