"""Local ranges are what a node's own CNI configuration may give to its pods."""

from __future__ import annotations

import json
import os
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from netacct.identity import cni_cache
from netacct.identity.ranges_cni import CniRanges, read
from netacct.model import Network

PATIENCE = 60.0
"""Seconds for what must come."""

HOST_LOCAL = {"type": "host-local", "ranges": [[{"subnet": "10.244.1.0/24"}], [{"subnet": "fd00:10:244:1::/64"}]]}


def conflist(ipam: Any, plugin: str = "ptp") -> dict[str, Any]:
    """A network with one plugin and its IPAM, and a chained one."""
    return {"cniVersion": "1.0.0", "name": "pods", "plugins": [{"type": plugin, "ipam": ipam}, {"type": "portmap"}]}


def found(directory: Path, *configs: Any) -> list[str]:
    """The ranges that are read when these files are there, in this order."""
    for number, config in enumerate(configs):
        text = config if isinstance(config, str) else json.dumps(config)
        (directory / f"{number:02}.conflist").write_text(text)
    return texts(read([str(directory)]).ranges)


def texts(ranges: tuple[Network, ...]) -> list[str]:
    """Ranges as text."""
    return [str(network) for network in ranges]


@pytest.mark.parametrize(
    ("ipam", "ranges"),
    [
        (HOST_LOCAL, ["10.244.1.0/24", "fd00:10:244:1::/64"]),
        ({"type": "host-local", "subnet": "10.244.1.0/24"}, ["10.244.1.0/24"]),
        ({"type": "host-local", "subnet": "10.244.1.7/24"}, ["10.244.1.0/24"]),
        (
            {"type": "host-local", "ranges": [[{"subnet": "10.1.0.0/24"}, {"subnet": "10.2.0.0/24"}]]},
            ["10.1.0.0/24", "10.2.0.0/24"],
        ),
        (
            {"type": "host-local", "subnet": "10.0.0.0/16", "rangeStart": "10.0.0.64", "rangeEnd": "10.0.0.96"},
            ["10.0.0.64/27", "10.0.0.96/32"],
        ),
        ({"type": "host-local", "subnet": "10.0.0.0/24", "rangeStart": "10.0.0.128"}, ["10.0.0.128/25"]),
        ({"type": "host-local", "subnet": "usePodCidr"}, []),
        ({"type": "calico-ipam"}, []),
        ({}, []),
    ],
    ids=["ranges", "subnet", "host-bits", "a-group-of-two", "part", "half", "placeholder", "calico", "none"],
)
def test_each_form_of_host_local(tmp_path: Path, ipam: Any, ranges: list[str]) -> None:
    """Every form in which host-local takes its ranges is read, and other IPAMs say nothing."""
    assert found(tmp_path, conflist(ipam)) == ranges


def test_a_single_plugin_and_a_delegate(tmp_path: Path) -> None:
    """A `.conf` of one plugin is a network, too, and so is one that a meta plugin carries inside."""
    (tmp_path / "10.conf").write_text(json.dumps({"type": "bridge", "ipam": HOST_LOCAL}))
    assert texts(read([str(tmp_path)]).ranges) == ["10.244.1.0/24", "fd00:10:244:1::/64"]
    (tmp_path / "00.conf").write_text(
        json.dumps({"type": "multus", "delegates": [conflist({"type": "host-local", "subnet": "10.9.0.0/24"})]})
    )
    assert texts(read([str(tmp_path)]).ranges) == ["10.9.0.0/24"]


def test_only_the_first_network_counts(tmp_path: Path) -> None:
    """Networks behind the first one, which runtimes never use for pods, give no range, nor do other files."""
    (tmp_path / "00-note.txt").write_text(json.dumps(conflist({"type": "host-local", "subnet": "10.8.0.0/24"})))
    (tmp_path / "00-sub.conf").mkdir()
    podman = conflist({"type": "host-local", "subnet": "10.88.0.0/16"}, "bridge")
    assert found(tmp_path, conflist({"type": "calico-ipam"}, "calico"), podman) == []


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("{", "not JSON"),
        ("[]", "no network configuration"),
        ("{}", "no network configuration"),
        ("[" * 100_000, "not JSON"),
        (conflist({"type": "host-local", "subnet": "10.0.0.0/33"}), "no range"),
        (conflist({"type": "host-local", "subnet": "fd00::%eth0/64"}), "no range"),
        (conflist({"type": "host-local", "subnet": "10.0.0.0/24", "rangeEnd": "10.0.1.0"}), "no range"),
        (conflist({"type": "host-local", "subnet": "10.0.0.0/24", "rangeStart": "fd00::1"}), "no range"),
        (conflist({"type": "host-local", "ranges": [{"subnet": "10.0.0.0/24"}]}), "list of lists"),
        (conflist({"type": "host-local", "ranges": [["10.0.0.0/24"]]}), "not an object"),
        (conflist({"type": "host-local", "ranges": [[{"subnet": "10.9.0.0/24"}, {"subnet": "127.0.0.0/8"}]]}), "127"),
    ],
)
def test_a_file_with_an_error_is_passed_over(tmp_path: Path, bad: Any, why: str) -> None:
    """A bad file gives nothing at all, the next network counts in its place, and the fault says what is wrong."""
    assert found(tmp_path, bad, conflist(HOST_LOCAL)) == ["10.244.1.0/24", "fd00:10:244:1::/64"]
    faults = read([str(tmp_path)]).faults
    assert list(faults) == [str(tmp_path / "00.conflist")]
    assert why in next(iter(faults.values()))


def test_what_is_no_file_keeps_nobody_waiting(tmp_path: Path) -> None:
    """A pipe among the configuration, and paths of flannel's that lead to none or to a pipe, are faults."""
    os.mkfifo(tmp_path / "00.conf")
    for number, path in enumerate((str(tmp_path / "00.conf"), str(tmp_path), "/run/\0")):
        (tmp_path / f"1{number}.conf").write_text(json.dumps({"type": "flannel", "subnetFile": path}))

    assert {Path(path).name: why for path, why in read([str(tmp_path)]).faults.items()} == {
        "00.conf": "cannot be read: it is no regular file",
        "10.conf": "cannot be read: it is no regular file",
        "11.conf": "cannot be read: Is a directory",
        "12.conf": "'/run/\\x00' is no path",
    }


def test_several_directories_are_joined(tmp_path: Path) -> None:
    """Each directory gives its first network, one by two names counts once, and a missing one is no fault."""
    one, two, link = tmp_path / "one", tmp_path / "two", tmp_path / "link"
    one.mkdir()
    two.mkdir()
    link.symlink_to(one)
    (one / "10.conf").write_text(json.dumps({"type": "x", "ipam": {"type": "host-local", "subnet": "10.1.0.0/24"}}))
    (two / "10.conf").write_text(json.dumps({"type": "x", "ipam": {"type": "host-local", "subnet": "10.2.0.0/24"}}))
    (one / "00.conf").write_text("{")
    ranges = read([str(path) for path in (one, link, two, tmp_path / "missing")])
    assert texts(ranges.ranges) == ["10.1.0.0/24", "10.2.0.0/24"]
    assert list(ranges.faults) == [str(one / "00.conf")]


def test_flannel_says_it_in_a_file_of_its_own(tmp_path: Path) -> None:
    """Where flannel is the network, the node's subnets are those that flanneld wrote."""
    subnets = tmp_path / "subnet.env"
    network = {"name": "cbr0", "plugins": [{"type": "flannel", "subnetFile": str(subnets), "delegate": {}}]}
    assert found(tmp_path, network) == []
    subnets.write_text(
        "FLANNEL_NETWORK=10.42.0.0/16\nFLANNEL_SUBNET=10.42.3.1/24\nFLANNEL_IPV6_SUBNET=fd00:42:3::1/64\n"
        "FLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n"
    )
    assert found(tmp_path) == ["10.42.3.0/24", "fd00:42:3::/64"]


@pytest.fixture
def told() -> queue.Queue[tuple[Network, ...]]:
    """What a follower told."""
    return queue.Queue()


@pytest.fixture
def follower(tmp_path: Path, told: queue.Queue[tuple[Network, ...]]) -> Iterator[CniRanges]:
    """A follower of a directory that is not there yet."""
    made = CniRanges([str(tmp_path / "cni" / "net.d")], poll=3600.0)
    assert made.start(told.put) == ()
    yield made
    made.stop()


@pytest.mark.usefixtures("follower")
def test_the_configuration_is_followed(
    tmp_path: Path, told: queue.Queue[tuple[Network, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    """A network that appears, changes or goes is told once each; an error in it is logged once and changes nothing."""
    directory = tmp_path / "cni" / "net.d"
    directory.mkdir(parents=True)
    path, aside = directory / "10-pods.conflist", directory / "10-pods.new"

    def put(text: str) -> None:
        """Exchange the file as a whole: one that is being written has an error of its own."""
        aside.write_text(text)
        aside.rename(path)

    put(json.dumps(conflist(HOST_LOCAL)))
    assert texts(told.get(timeout=PATIENCE)) == ["10.244.1.0/24", "fd00:10:244:1::/64"]
    put(json.dumps(conflist({"type": "host-local", "subnet": "10.3.0.0/24"})))
    assert texts(told.get(timeout=PATIENCE)) == ["10.3.0.0/24"]
    put("{")
    log = ""
    while "not understood" not in log:
        log += capsys.readouterr().out
    put("{")
    with pytest.raises(queue.Empty):
        told.get(timeout=0.2)
    path.unlink()
    assert told.get(timeout=PATIENCE) == ()
    assert (log + capsys.readouterr().out).count("not understood") == 1


def test_the_known_directories_are_distinct() -> None:
    """No directory is looked at twice by the same name."""
    for table in (cni_cache.CONFIGURATION, cni_cache.DIRECTORIES):
        assert len(set(table)) == len(table)
