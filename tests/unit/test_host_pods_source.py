"""The source `cgroup` follows directories that stand for a kubelet's cgroups, with real inotify."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from netacct.identity.host_pods import HostPods, addresses_only, level, tree_root
from netacct.identity.source import Replace, SourceEvent, Update
from netacct.model import UNBOUNDED, WHOLE, Observation, Pod, cgroup_key, pack, unpack

UID = "3f0c1d2e-0000-4000-8000-00000000000a"
SLICE = UID.replace("-", "_")
PROXY, OTHER = Pod("kube-system", "proxy", UID), Pod("kube-system", "other", "7e11")


def said(pod: Pod, *, present: bool = True) -> Observation:
    """What a source says of a hostNetwork pod."""
    return Observation("file", WHOLE, pod, "", UNBOUNDED, 1.0, present)


class Follower:
    """A running source, and what it said."""

    def __init__(self, root: Path, poll: float = 3600.0) -> None:
        self.events: queue.Queue[SourceEvent] = queue.Queue()
        self.source = HostPods(str(root), poll)
        self.source.start(self.events.put)

    def next(self) -> dict[str, str]:
        """The cgroup of each pod, by the next event; each has the number of its directory."""
        event = self.events.get(timeout=60)
        assert isinstance(event, Replace)
        return {seen.pod.name: seen.sandbox for seen in event.observations}


@pytest.fixture
def follower(tmp_path: Path) -> Iterator[Follower]:
    """A source that follows an empty tree, and has said so."""
    made = Follower(tmp_path)
    assert made.next() == {}
    yield made
    made.source.stop()


@pytest.mark.parametrize(
    "path",
    [
        f"kubepods/pod{UID}",
        f"kubepods/burstable/pod{UID}",
        f"kubepods/besteffort/pod{UID}",
        f"kubepods.slice/kubepods-pod{SLICE}.slice",
        f"kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{SLICE}.slice",
        f"kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{SLICE}.slice",
        f"kube.slice/kube-kubepods.slice/kube-kubepods-burstable.slice/kube-kubepods-burstable-pod{SLICE}.slice",
    ],
)
def test_both_drivers_names_are_known(tmp_path: Path, path: str) -> None:
    """A pod is found by its uid in the names of either cgroup driver, also below a kubelet's own cgroup."""
    (tmp_path / path / "container").mkdir(parents=True)
    (tmp_path / "system.slice" / f"pod{UID}").mkdir(parents=True)
    event = HostPods(str(tmp_path)).once([Replace("file", (said(PROXY), said(OTHER)), 1.0)])
    (seen,) = event.observations
    key = cgroup_key((tmp_path / path).stat().st_ino)
    assert (seen.source, seen.pod, seen.sandbox, seen.ip) == ("cgroup", PROXY, f"/{path}", key)
    assert level(seen.sandbox) == path.count("/") + 1


@pytest.mark.parametrize("order", [("kubelet", "cri"), ("cri", "kubelet")])
def test_an_owner_that_one_source_tells_is_told(tmp_path: Path, order: tuple[str, str]) -> None:
    """Where several sources name a pod, the one that does not know its owner hides none, whoever spoke last."""
    (tmp_path / "kubepods" / f"pod{UID}").mkdir(parents=True)
    owned = replace(PROXY, workload_kind="DaemonSet", workload="kube-proxy")
    words = {"kubelet": replace(said(owned), source="kubelet"), "cri": replace(said(PROXY), source="cri")}
    event = HostPods(str(tmp_path)).once([Replace(name, (words[name],), 1.0) for name in order])
    assert [seen.pod for seen in event.observations] == [owned]


def test_a_pod_is_told_when_both_its_name_and_its_cgroup_are_known(follower: Follower, tmp_path: Path) -> None:
    """Whichever comes first, the second one tells; a pod without hostNetwork is none of this source's."""
    follower.source.learn(Update("file", (said(PROXY),)))
    (tmp_path / "kubepods" / "burstable" / f"pod{UID}").mkdir(parents=True)
    assert follower.next() == {"proxy": f"/kubepods/burstable/pod{UID}"}
    (tmp_path / "kubepods" / "pod7e11").mkdir()
    follower.source.learn(Update("file", (Observation("file", pack("10.0.0.1"), OTHER, "", UNBOUNDED, 1.0),)))
    follower.source.learn(Update("file", (said(OTHER),)))
    assert follower.next() == {"proxy": f"/kubepods/burstable/pod{UID}", "other": "/kubepods/pod7e11"}


@pytest.mark.parametrize("event", [Replace("file", (), 2.0), Update("file", (said(PROXY, present=False),))])
def test_a_pod_lasts_as_long_as_its_cgroup(follower: Follower, tmp_path: Path, event: SourceEvent) -> None:
    """A pod that its source names no more stays until its cgroup is gone."""
    cgroup = tmp_path / "kubepods" / "besteffort" / f"pod{UID}"
    cgroup.mkdir(parents=True)
    follower.source.learn(Update("file", (said(PROXY),)))
    assert list(follower.next()) == ["proxy"]
    follower.source.learn(event)
    assert follower.events.empty()
    cgroup.rmdir()
    assert follower.next() == {}


def test_a_kubelets_own_cgroup_may_come_late(tmp_path: Path) -> None:
    """Cgroups below one that nobody could expect are found when everything is looked at again."""
    follower = Follower(tmp_path, poll=0.1)
    assert follower.next() == {}
    follower.source.learn(Update("file", (said(PROXY),)))
    (tmp_path / "kubelet" / "kubepods" / f"pod{UID}").mkdir(parents=True)
    assert follower.next() == {"proxy": f"/kubelet/kubepods/pod{UID}"}
    follower.source.stop()


def test_without_a_tree_the_source_is_down() -> None:
    """Where no whole v2 tree is mounted, nothing is said and health says why."""
    source = HostPods("")
    events: queue.Queue[SourceEvent] = queue.Queue()
    source.start(events.put)
    source.learn(Replace("file", (said(PROXY),), 1.0))
    event = events.get(timeout=60)
    source.stop()
    assert isinstance(event, Replace)
    assert event.observations == ()
    assert not source.healthy().up
    assert "cgroup v2" in source.healthy().reason


def test_only_a_whole_tree_will_do(tmp_path: Path) -> None:
    """The mount of a part of the v2 tree, or of a v1 hierarchy, is not taken for the tree."""
    mounts = tmp_path / "mountinfo"
    wrong = (
        "31 23 0:28 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n32 23 0:29 /../.. /part rw - cgroup2 cgroup rw\n"
    )
    mounts.write_text(wrong)
    assert tree_root(str(mounts)) == ""
    mounts.write_text(wrong + r"33 23 0:29 / /sys/fs/my\040cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw" + "\n")
    assert tree_root(str(mounts)) == "/sys/fs/my cgroup"


def test_others_do_not_hear_of_host_pods() -> None:
    """What sources say of hostNetwork pods is taken out of what goes on to the lease book."""
    address = Observation("file", pack("10.0.0.1"), OTHER, "", UNBOUNDED, 1.0)
    assert addresses_only(Replace("file", (said(PROXY), address), 1.0)) == Replace("file", (address,), 1.0)


def test_a_cgroup_has_a_text_form() -> None:
    """A cgroup's key is shown as its number."""
    assert unpack(cgroup_key(4711)) == "cgroup:4711"
