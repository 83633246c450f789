"""Late owners and labels in a real agent: real packets before anybody told whose they are, and what is shown after."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from agentlab import AgentLab, agent_lab, datagrams, until
from support import POD, Node

from netacct.demo import exposition
from netacct.model import Family

pytestmark = pytest.mark.kernel

FAMILIES: tuple[Family, Family] = (4, 6)
UID = "3f0c2b1e-0000-4000-8000-000000000001"


def cni_result() -> str:
    """A file as libcni leaves it for a pod: names and addresses, and neither owner nor labels."""
    arguments = [["K8S_POD_NAMESPACE", "team-a"], ["K8S_POD_NAME", "train-0"], ["K8S_POD_UID", UID]]
    ips = [{"address": f"{POD[4]}/24"}, {"address": f"{POD[6]}/64"}]
    return json.dumps(
        {
            "kind": "cniCacheV1",
            "containerId": "box",
            "ifName": "eth0",
            "networkName": "pods",
            "cniArgs": arguments,
            "result": {"cniVersion": "1.0.0", "ips": ips},
        }
    )


def tell_owner(lab: AgentLab) -> None:
    """Another source tells owner and label of the same pod."""
    pod = {"namespace": "team-a", "name": "train-0", "uid": UID, "ips": list(POD.values())}
    known = {"owner": {"kind": "Job", "name": "train"}, "labels": {"experiment": "scaling-laws"}}
    lab.write("pods.yaml", json.dumps({"pods": [{**pod, **known}]}))


def drive(node: Node, packets: int) -> int:
    """Send from the pod to the internet in both families; returns the bytes."""
    return sum(datagrams(node, "pod", "internet", packets, family) for family in FAMILIES)


def sent(lab: AgentLab, level: str) -> Counter[tuple[str, ...]]:
    """The bytes that went to the internet, by the values of the level's own labels."""
    found: Counter[tuple[str, ...]] = Counter()
    for name, labels, value in exposition.samples(lab.page()):
        if name == f"netacct_{level}_transmit_bytes_total" and labels["traffic"] == "internet":
            found[tuple(text for key, text in sorted(labels.items()) if key != "traffic")] += int(value)
    return +found


@pytest.mark.parametrize("datapath", ["iptables", "nftables"])
@pytest.mark.parametrize("restart", [False, True], ids=["alive", "killed"])
def test_bytes_before_the_owner_is_known_are_the_workloads(
    node: Node, tmp_path: Path, datapath: str, restart: bool
) -> None:
    """What a pod that only CNI knew has sent is its workload's and its label's once both are told, also over a kill."""
    (tmp_path / "results").mkdir()
    with agent_lab(node, tmp_path) as lab:
        lab.pods({})
        lab.configure(
            datapath=datapath,
            identity={
                "sources": ["file", "cni"],
                "cni": {"directories": [str(tmp_path / "results")]},
                "file": {"path": str(tmp_path / "pods.yaml")},
            },
            metrics={"zero_first": "0s", "by_label": "experiment", "labels": ["experiment"]},
        )
        lab.start()
        lab.write("results/pods-box-eth0", cni_result())
        until(lambda: "train-0" in lab.command("pods").stdout)
        early = drive(node, 11)
        until(lambda: sent(lab, "pod") == {("team-a", "train-0"): early})
        assert sent(lab, "workload") == sent(lab, "label") == {}
        if restart:
            lab.kill()
            early += drive(node, 5)
            lab.start()
        tell_owner(lab)
        until(lambda: "Job/train" in lab.command("pods").stdout)
        all_bytes = early + drive(node, 7)
        until(lambda: sent(lab, "workload") == {("team-a", "train", "Job"): all_bytes})
        assert sent(lab, "label") == {("scaling-laws", "team-a"): all_bytes}
        assert sent(lab, "namespace") == {("team-a",): all_bytes}
        assert 'label_experiment="scaling-laws"' in next(
            line for line in lab.page().splitlines() if line.startswith("netacct_pod_info{")
        )
        assert "Traceback" not in lab.log
