"""Agents that know local ranges by a metadata server or by routes alone, with traffic of known size."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import agentlab
import pytest
import support
from agentlab import AgentLab, datagrams
from metadata_server import Asked, Google, MetadataServer, Reply, google_interface, serving
from support import OTHER_POD, PEER, POD

from netacct.identity.veth import digest

pytestmark = pytest.mark.kernel

NOBODY = ("", "internet")


@pytest.fixture
def lab(node: support.Node, tmp_path: Path) -> Iterator[AgentLab]:
    """An agent without ranges of its own, whose pods file is empty, and which waits for no owner."""
    with agentlab.agent_lab(node, tmp_path) as made:
        made.pods({})
        identity = {"sources": ["file"], "file": {"path": str(tmp_path / "pods.yaml")}, "late_binding": "0s"}
        made.configure(local_ranges=[], identity=identity, cluster_ranges={"providers": []})
        yield made


def unowned(lab: AgentLab) -> int:
    """Bytes to the internet of local addresses that nobody owns."""
    return lab.totals("unattributed").get(NOBODY, 0)


def settled(lab: AgentLab, sent: int) -> bool:
    """Whether exactly so many bytes were booked to nobody."""
    return unowned(lab) == sent


def counts(lab: AgentLab, address: str) -> Callable[[], bool]:
    """Whether a local range holds exactly this address: then its packets are counted."""
    return lambda: (
        explained(lab, address).get("prefix") in (f"{address}/32", f"{address}/128") and address in installed()
    )


def explained(lab: AgentLab, address: str) -> dict[str, Any]:
    """What `rules explain` says."""
    found: dict[str, Any] = json.loads(lab.command("rules", "explain", address, "-o", "json").stdout)
    return found


def installed() -> str:
    """The rules and sets of now, as text."""
    return support.sh("iptables-legacy-save -t mangle; ip6tables-legacy-save -t mangle; ipset save")


@contextlib.contextmanager
def google(lab: AgentLab) -> Iterator[tuple[Google, MetadataServer]]:
    """A metadata server on the node, which knows one address of pods, and a running agent that asks it."""
    answers = Google(google_interface(f"{POD[4]}/32"))
    with serving(answers) as server:
        lab.configure(ranges={"providers": ["gce"], "metadata": {"url": server.url}})
        lab.start()
        try:
            yield answers, server
        finally:
            lab.kill()
            answers.stop()


def test_metadata_alone(node: support.Node, lab: AgentLab) -> None:
    """What the server names is counted from the first packet, also what it names later, and while it fails."""
    with google(lab) as (answers, server):
        sent = datagrams(node, "pod", packets=7)
        datagrams(node, "other", packets=3)  # nobody knows this address yet
        agentlab.until(partial(settled, lab, sent))
        assert explained(lab, POD[4])["named_by"] == "gce"
        answers.set(google_interface(f"{POD[4]}/32", f"{OTHER_POD[4]}/32"))
        agentlab.until(counts(lab, OTHER_POD[4]))
        sent += datagrams(node, "other", packets=5)
        agentlab.until(partial(settled, lab, sent))
        server.answer = lambda _: Reply("", 503)
        answers.stop()  # whoever waits is answered, and asks again
        agentlab.until(lambda: lab.metric("netacct_identity_source_up", source="gce-ranges") == 0)
        for _ in range(2):  # before and after a reload, which makes the provider anew
            sent += datagrams(node, "pod", packets=2) + datagrams(node, "other", packets=4)
            agentlab.until(partial(settled, lab, sent))
            lab.reload()
        assert "Traceback" not in lab.log


def test_a_restart_without_the_server(node: support.Node, lab: AgentLab) -> None:
    """An agent that starts while the server is silent gets ready, loses no byte that was counted, and stops."""
    with google(lab) as (answers, server):
        sent = datagrams(node, "pod", packets=7)
        agentlab.until(partial(settled, lab, sent))
        lab.kill()
        sent += datagrams(node, "pod", packets=2)  # while no agent runs

        def silent(_: Asked) -> Reply:
            """Say nothing for longer than anybody waits."""
            server.stopping.wait(600)
            return Reply("", 503)

        server.answer = silent
        lab.start()
        agentlab.until(partial(settled, lab, sent))
        lab.stop()
        server.answer = answers
        lab.start()
        agentlab.until(counts(lab, POD[4]))
        sent += datagrams(node, "pod", packets=3)
        agentlab.until(partial(settled, lab, sent))


def behind(netns: support.Netns, old: str, new: str, addresses: dict[int, str]) -> None:
    """Let a pod's interface have a CNI's name, with its host routes and neighbours."""
    netns.sh(f"ip link set {old} down && ip link set {old} name {new} && ip link set {new} up")
    index = old[1:]
    for address in addresses.values():
        netns.sh(
            f"ip route replace {address} dev {new}",
            f"ip neigh replace {address} lladdr 02:00:00:00:01:0{index} dev {new} nud permanent",
        )


def test_routes_alone(netns: support.Netns, node: support.Node, lab: AgentLab, tmp_path: Path) -> None:
    """With `auto` and nothing but Calico's routes each pod is counted, also one that comes later, and nobody else."""
    behind(netns, "v0", f"cali{digest('team-a', 'a-0')}", POD)
    lab.configure(ranges={"cni": {"directories": [str(tmp_path / "none")]}})
    lab.start()
    sent = datagrams(node, "pod", packets=7) + datagrams(node, "pod", packets=6, family=6)
    agentlab.until(partial(settled, lab, sent))
    behind(netns, "v1", f"cali{digest('team-b', 'b-0')}", OTHER_POD)
    agentlab.until(lambda: counts(lab, OTHER_POD[4])() and counts(lab, OTHER_POD[6])())
    sent += datagrams(node, "other", packets=5) + datagrams(node, "other", packets=4, family=6)
    agentlab.until(partial(settled, lab, sent))
    assert explained(lab, OTHER_POD[6])["named_by"] == "rtnetlink"
    assert "named_by" not in explained(lab, PEER[4])  # behind a veth of the node, which is no pod's
    lab.pods({"team-a/a-0": [POD[4]]})
    agentlab.until(lambda: explained(lab, POD[4])["named_by"] == "source file, rtnetlink")
    agentlab.until(lambda: "a-0" in lab.command("pods").stdout)  # the agent too, which takes what is late for nobody's
    mine = datagrams(node, "pod", packets=8)
    agentlab.until(lambda: lab.totals().get(("a-0", "internet")) == mine)
    assert unowned(lab) == sent
    assert "Traceback" not in lab.log
