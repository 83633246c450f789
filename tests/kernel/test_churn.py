"""A thousand pods over 64 addresses, made and ended by the real CNI plugins while a real agent follows: whose bytes?

Nothing here depends on who is quicker. A pod sends once the agent knows it, and the agent has read before the pod is
ended: so no byte lies in an interval of two tenures, however late the agent is. What a reading cannot tell is the other
test: there no agent runs while addresses change hands, and all that the next one guesses must be counted as such.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import agentlab
import cnilab
import pytest
import support
from cnilab import CniNode, CniPod
from support import HEADERS, PEER, PORT

from netacct import control
from netacct.accounting.accounts_read import read_directory
from netacct.demo import exposition
from netacct.model import Direction, Family

pytestmark = pytest.mark.kernel

PODS, ADDRESSES, BATCH = 1000, 64, 40
"""How many pods there are in all, at most at a time, and how many are made (and ended) at once."""

HANDS = 8
"""How many of them at the same time, as a runtime does."""

FAMILIES: tuple[Family, Family] = (4, 6)
DATAPATHS = ("iptables", "nftables")

Sums = Counter[tuple[str, Direction]]
"""Bytes by name and direction."""


class Traffic:
    """Datagrams between pods and an internet host, and what they must be counted as.

    One is on its way at a time, so none is dropped, and each was counted when it has arrived.
    """

    def __init__(self, node: support.Node) -> None:
        self.pods: Sums = Counter()
        self.namespaces: Sums = Counter()
        self._peers = {family: node.peer.socket(family, PEER[family]) for family in FAMILIES}
        for peer in self._peers.values():
            peer.settimeout(support.PATIENCE)

    def close(self) -> None:
        """Let the sockets go."""
        for peer in self._peers.values():
            peer.close()

    def drive(self, pod: CniPod, family: Family, sizes: list[int], answers: list[int]) -> None:
        """Datagrams of these sizes to the internet, and some back."""
        peer = self._peers[family]
        with pod.netns.socket(family, pod.ips[family], 0) as own:
            own.settimeout(support.PATIENCE)
            for size in sizes:
                own.sendto(bytes(size), (PEER[family], PORT))
                peer.recv(size + 1)
            for size in answers:
                peer.sendto(bytes(size), (pod.ips[family], own.getsockname()[1]))
                own.recv(size + 1)
        for direction, several in ((Direction.TRANSMIT, sizes), (Direction.RECEIVE, answers)):
            octets = sum(several) + len(several) * HEADERS[family]
            self.pods[pod.name, direction] += octets
            self.namespaces[pod.namespace, direction] += octets

    def of(self, number: int, pod: CniPod) -> None:
        """What the pod of this number has to say: no two the same."""
        sizes = [100 + number, *[64] * (number % 4)]
        self.drive(pod, 4, sizes, [80 + number] * (number % 2))
        if number % 3 == 0:
            self.drive(pod, 6, [900 + number % 300], [70 + number])


@contextlib.contextmanager
def churn_lab(node: support.Node, folder: Path, datapath: str) -> Iterator[tuple[agentlab.AgentLab, CniNode, Traffic]]:
    """A node with few addresses, and an agent that knows of pods by CNI alone."""
    with cnilab.cni_node(node.netns, folder / "cni", room=ADDRESSES) as cni, agentlab.agent_lab(node, folder) as lab:
        lab.configure(
            datapath=datapath,
            local_ranges=[],
            ranges={"providers": ["cni"], "cni": {"directories": [str(cni.configuration)]}},
            identity={"sources": ["cni"], "cni": {"directories": [str(cni.results)]}},
            metrics={"zero_first": "0s", "max_pod_series": 2 * PODS, "retention": "1h"},
        )
        lab.start()
        traffic = Traffic(node)
        try:
            yield lab, cni, traffic
        finally:
            traffic.close()


def known(lab: agentlab.AgentLab) -> dict[str, set[str]]:
    """The addresses of each pod that the agent knows, after a reading that is booked."""
    pods: list[dict[str, Any]] = control.ask(lab.folder / "state", "pods")
    return {pod["pod"]: set(pod["addresses"]) for pod in pods}


def knows(lab: agentlab.AgentLab, pods: list[CniPod]) -> bool:
    """Whether the agent knows these pods and all of their addresses."""
    found = known(lab)
    return all(found.get(pod.name) == set(pod.ips.values()) for pod in pods)


def internet(page: str, level: str, label: str) -> Sums:
    """Bytes from and to the internet by the value of a label: what kernels say to each other is of other classes."""
    found: Sums = Counter()
    for direction in Direction:
        for name, labels, value in exposition.samples(page):
            if name == f"netacct_{level}_{direction}_bytes_total" and labels["traffic"] == "internet" and value:
                found[labels.get(label, ""), direction] += int(value)
    return found


def accounted(lab: agentlab.AgentLab) -> Sums:
    """The same by pod, as accounts say."""
    found: Sums = Counter()
    for record in read_directory(lab.folder / "accounts", lambda event, **_: pytest.fail(event)):
        for (direction, traffic), count in record.counts.items():
            if traffic == "internet" and count.bytes:
                found[record.pod, direction] += count.bytes
    return found


@pytest.mark.timeout(600)  # 50 s on two idle cores, most of it the plugins'
@pytest.mark.parametrize("datapath", DATAPATHS)
def test_every_byte_of_a_thousand_pods_is_on_the_right_one(node: support.Node, tmp_path: Path, datapath: str) -> None:
    """Pods that pass few addresses on at once each have exactly their bytes, in accounts and in series."""
    alive: deque[CniPod] = deque()
    used: Counter[str] = Counter()
    with churn_lab(node, tmp_path, datapath) as (lab, cni, traffic), ThreadPoolExecutor(HANDS) as hands:
        made = 0
        while made < PODS:
            if len(alive) + BATCH > ADDRESSES:
                list(hands.map(cni.delete, [alive.popleft() for _ in range(len(alive) + BATCH - ADDRESSES)]))
            numbers = range(made, made + BATCH)
            came = list(hands.map(lambda number: cni.add(f"team-{number % 7}", f"pod-{number}"), numbers))
            agentlab.until(lambda pods=came: knows(lab, pods))  # type: ignore[misc]  # mypy knows no such lambda
            for number, pod in zip(numbers, came, strict=True):
                traffic.of(number, pod)
                used.update(pod.ips.values())
            assert knows(lab, came)  # which reads, before any of them ends
            alive += came
            made += BATCH
        list(hands.map(cni.delete, list(alive)))
        agentlab.until(lambda: not known(lab))
        page = lab.page()
        assert len(used) == 2 * ADDRESSES
        assert min(used.values()) > PODS // ADDRESSES // 2
        assert internet(page, "pod", "pod") == traffic.pods
        assert internet(page, "namespace", "namespace") == traffic.namespaces
        assert internet(page, "unattributed", "") == Counter()
        assert accounted(lab) == traffic.pods
        assert "Traceback" not in lab.log


@pytest.mark.parametrize("datapath", DATAPATHS)
def test_what_an_agent_that_was_down_cannot_tell_is_ambiguous(
    node: support.Node, tmp_path: Path, datapath: str
) -> None:
    """Addresses that change hands unseen: the sum is exact, who held one longer has the bytes, and they are counted."""
    with churn_lab(node, tmp_path, datapath) as (lab, cni, traffic):
        old = [cni.add("team-a", f"old-{number}") for number in range(8)]
        agentlab.until(lambda: knows(lab, old))
        for number, pod in enumerate(old):
            traffic.of(number, pod)
        begin = time.monotonic()
        lab.stop()
        heirs: list[CniPod] = []
        for pod in old:
            addresses = [f"{pod.ips[4]}/24", f"{pod.ips[6]}/64"]
            cni.delete(pod)
            heirs.append(cni.add("team-b", pod.name.replace("old", "heir"), addresses))
        before = traffic.pods.copy()
        for number, pod in enumerate(heirs):
            traffic.of(100 + number, pod)
        guessed = sum((traffic.pods - before).values())
        time.sleep(
            time.monotonic() - begin + 1
        )  # so that each heir has its address for longer than it was the old one's
        lab.start()
        agentlab.until(lambda: knows(lab, heirs))
        page = lab.page()
        assert internet(page, "pod", "pod") == traffic.pods
        assert (lab.metric("netacct_ambiguous_bytes_total") or 0) >= guessed
