"""The sources of Azure's and AWS' state files read the documented forms, and speak only where nobody knows better."""

from __future__ import annotations

import json
import os
import queue
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from netacct import clock
from netacct.identity.aws_cni import AwsCniSource
from netacct.identity.aws_cni import decode as decode_checkpoint
from netacct.identity.azure_cni import AzureCniSource, decode_endpoints, decode_state
from netacct.identity.leases import LeaseBook
from netacct.identity.source import Health, Replace, SourceEvent, Update
from netacct.identity.state_file import StateFileSource
from netacct.model import UNBOUNDED, Observation, Pod, pack, unpack

LATENCY = 30.0
"""Seconds that a test waits for what should come at once."""

PATIENCE = 0.1
"""Of most sources here, in seconds."""

SANDBOX = "ee86fb8be61987b83e1da1338b09fc0a83dcd12f9754455e668b16dc98f20f48"


def endpoint(name: str, *ips: str, sandbox: str = SANDBOX) -> dict[str, Any]:
    """A pod in the state of Azure's plugin, as version 1.4.54 writes it."""
    return {
        "Id": f"{sandbox[:8]}-eth0",
        "SandboxKey": "",
        "IfName": "azvc440f4556932",
        "HostIfName": "azvc440f455693",
        "MacAddress": "umCZaqGD",
        "InfraVnetIP": {"IP": "", "Mask": None},
        "IPAddresses": [{"IP": ip, "Mask": "//8AAA=="} for ip in ips],
        "Gateways": ["0.0.0.0"],  # noqa: S104 -- what the plugin writes, nothing is bound to it
        "NetworkNameSpace": "/var/run/netns/cni-1770aa7f-262a-c2ad-1c19-0a376d016a78",
        "ContainerID": sandbox,
        "PODName": name,
        "PODNameSpace": "team-a",
    }


def state(*endpoints: dict[str, Any]) -> dict[str, Any]:
    """The state of Azure's plugin."""
    network = {"Id": "azure", "Mode": "transparent", "Subnets": [{"Prefix": {"IP": "10.224.0.0", "Mask": "//8AAA=="}}]}
    network["Endpoints"] = {f"{each['ContainerID'][:8]}-{at}": each for at, each in enumerate(endpoints)}  # type: ignore[assignment]  # JSON
    interface = {"Name": "eth0", "Networks": {"azure": network}}
    return {"Network": {"Version": "v1.4.54", "TimeStamp": "2026-11-29", "ExternalInterfaces": {"eth0": interface}}}


def served(name: str, **interfaces: dict[str, Any]) -> dict[str, Any]:
    """The state of CNS with one pod."""
    return {"Endpoints": {SANDBOX: {"PodName": name, "PodNamespace": "team-a", "IfnameToIPMap": interfaces}}}


def allocation(name: str, ip: str, made: int, sandbox: str = SANDBOX) -> dict[str, Any]:
    """A pod in the checkpoint of AWS."""
    return {
        "networkName": "aws-cni",
        "containerID": sandbox,
        "ifName": "eth0",
        "ipv6" if ":" in ip else "ipv4": ip,
        "allocationTimestamp": made,
        "metadata": {"k8sPodNamespace": "team-a", "k8sPodName": name, "interfacesCount": 1},
    }


def checkpoint(*allocations: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint of AWS."""
    return {"version": "vpc-cni-ipam/1", "allocations": list(allocations)}


def net(ip: str) -> dict[str, str]:
    """Go's net.IPNet in JSON."""
    return {"IP": ip, "Mask": "//8AAA=="}


def test_the_state_of_azures_plugin() -> None:
    """Each endpoint of each network is a pod with its addresses and its sandbox."""
    found = list(decode_state(state(endpoint("nginx", "10.224.0.24", "fd00::24"), endpoint("b", "10.224.0.25"))))

    assert [(unpack(each.ip), each.name, each.sandbox, each.made) for each in found] == [
        ("10.224.0.24", "nginx", SANDBOX, None),
        ("fd00::24", "nginx", SANDBOX, None),
        ("10.224.0.25", "b", SANDBOX, None),
    ]


def test_the_state_of_azures_address_service() -> None:
    """Each endpoint's interface has addresses of both families; interfaces that pass the node by do not count."""
    document = served(
        "nginx",
        eth0={"IPv4": [net("10.240.0.8")], "IPv6": [net("fd00::8")], "HostVethName": "azv1", "NICType": "InfraNIC"},
        eth1={"IPv4": [net("10.9.0.8")], "IPv6": None, "NICType": "FrontendNIC"},
    )

    assert [unpack(each.ip) for each in decode_endpoints(document)] == ["10.240.0.8", "fd00::8"]
    assert [each.sandbox for each in decode_endpoints(served("a", eth0={"IPv4": [net("10.1.1.1")]}))] == [SANDBOX]


def test_the_checkpoint_of_aws() -> None:
    """Each allocation is a pod with one address and the time when it got it."""
    document = checkpoint(allocation("a", "10.0.1.5", 1_796_000_000_500_000_000), allocation("b", "fd00::5", 0))

    assert [(unpack(each.ip), each.name, each.sandbox, each.made) for each in decode_checkpoint(document)] == [
        ("10.0.1.5", "a", SANDBOX, 1_796_000_000.5),
        ("fd00::5", "b", SANDBOX, None),
    ]


@pytest.mark.parametrize("made", [-5, 10**400, 1 << 63, 1.5, "5", None, [5]])
def test_a_time_that_is_none(made: Any) -> None:
    """A pod whose time is no number of nanoseconds is a pod without a time."""
    assert [each.made for each in decode_checkpoint(checkpoint(allocation("a", "10.0.1.5", made)))] == [None]


@pytest.mark.parametrize(
    ("decode", "document", "words"),
    [
        (decode_state, {"IPAM": {}}, "has no Network"),
        (decode_state, state(endpoint("a", "10.0.0.300")), "has '10.0.0.300' for an address"),
        (decode_endpoints, {"ContainerNetworkService": {}}, "has no Endpoints"),
        (decode_checkpoint, {"version": "vpc-cni-ipam/2"}, "has the version 'vpc-cni-ipam/2'"),
    ],
)
def test_another_form_is_refused(decode: Callable[..., Iterator[Any]], document: Any, words: str) -> None:
    """A document of another form, or of a later version, is not guessed at."""
    with pytest.raises(ValueError, match=words.replace("'", ".")):
        list(decode(document))


@pytest.mark.parametrize(
    "document", [{"Network": None}, {"Network": {"ExternalInterfaces": None}}, state(), state(endpoint("", "10.0.0.1"))]
)
def test_a_node_without_pods(document: Any) -> None:
    """Go's empty maps are null, a network may have no endpoint, and an endpoint no pod."""
    assert list(decode_state(document)) == []


class Following:
    """A running source on files of a directory, and what it said."""

    def __init__(self, directory: Path, patience: float = PATIENCE) -> None:
        self.path = directory / "azure-vnet.json"
        self.events: queue.Queue[SourceEvent] = queue.Queue()
        self.source: StateFileSource = AzureCniSource(str(self.path), str(directory / "cns.json"), patience)

    def write(self, *endpoints: dict[str, Any]) -> None:
        """The plugin writes its state, by a file that it renames."""
        new = self.path.with_suffix(".tmp")
        new.write_text(json.dumps(state(*endpoints)))
        new.rename(self.path)

    def start(self) -> None:
        """Start it."""
        self.source.start(self.events.put)

    def next(self) -> SourceEvent:
        """The next event."""
        return self.events.get(timeout=LATENCY)

    def health(self, reached: Callable[[Health], bool]) -> Health:
        """The health, once it is as expected."""
        end = time.monotonic() + LATENCY
        while not reached(self.source.healthy()) and time.monotonic() < end:
            time.sleep(0.005)
        return self.source.healthy()

    def settle(self) -> list[SourceEvent]:
        """All events until nothing more can come."""
        time.sleep(PATIENCE * 2)
        return [self.events.get_nowait() for _ in range(self.events.qsize())]


@pytest.fixture
def following(tmp_path: Path) -> Iterator[Following]:
    """A source that has yet to start, on a state with one pod."""
    running = Following(tmp_path)
    running.write(endpoint("nginx", "10.224.0.24"))
    yield running
    running.source.stop()


def told(event: SourceEvent) -> list[tuple[str, str, bool]]:
    """Whose which address is, and whether it is."""
    return [(seen.pod.name, unpack(seen.ip), seen.present) for seen in event.observations]


def word(ip: str, *, present: bool = True, created: float = 5.0) -> Observation:
    """What a source that knows uids says."""
    return Observation("cni", pack(ip), Pod("team-a", "nginx", "uid-1"), SANDBOX, created, clock.now(), present=present)


def test_alone_it_tells_all_after_a_while(following: Following) -> None:
    """Where nobody else speaks, all pods are told at once when others had the time, without a uid."""
    following.start()
    event = following.next()

    assert isinstance(event, Replace)
    assert told(event) == [("nginx", "10.224.0.24", True)]
    seen = event.observations[0]
    assert (seen.source, seen.pod, seen.sandbox) == ("azure-cni", Pod("team-a", "nginx", ""), SANDBOX)
    assert seen.created == UNBOUNDED
    assert following.source.healthy() == (True, "", True, None)


def test_where_somebody_vouches_it_is_silent(following: Following) -> None:
    """An address that another source vouches for is none of its business, also after that one says gone."""
    following.source.learn(Replace("cni", (word("10.224.0.24"),), clock.now()))
    following.start()
    first = following.next()
    following.source.learn(Update("cni", (word("10.224.0.24", present=False),)))

    assert told(first) == []
    assert following.settle() == []


def test_an_echo_is_nobodys_word(following: Following) -> None:
    """The source `veth` repeats what it hears, also from here: its word does not silence whom it has it from."""
    following.start()
    hint = following.next().observations[0]
    following.source.learn(Update("veth", (replace(hint, source="veth"),)))

    assert following.settle() == []


def test_somebody_who_comes_late_is_believed(following: Following) -> None:
    """When a source that knows the uid speaks at last, the hint is taken back, and the lease is the known pod's."""
    book = LeaseBook(["cni", "azure-cni"])
    following.start()
    first = following.next()
    assert isinstance(first, Replace)
    book.replace(first.source, first.observations, first.seen_at)
    book.commit(clock.now())

    late = Update("cni", (word("10.224.0.24"),))
    book.observe(late.observations)
    following.source.learn(late)
    book.observe(following.next().observations)
    book.commit(clock.now())

    assert [(lease.pod.uid, lease.sources) for lease in book.open_leases()] == [("uid-1", frozenset({"cni"}))]


def test_pods_come_and_go(following: Following) -> None:
    """A new pod was made when the file was written in which it appeared; one that is away is gone."""
    following.start()
    following.next()
    before = clock.now() - 1.0
    following.write(endpoint("b", "10.224.0.30", sandbox="b" * 64))
    gone, new = following.next(), following.next()

    assert told(gone) == [("nginx", "10.224.0.24", False)]
    assert told(new) == [("b", "10.224.0.30", True)]
    assert before < new.observations[0].created <= clock.now()


def test_a_pod_that_nobody_else_saw_is_told_when_it_goes(tmp_path: Path) -> None:
    """A pod that lived for less than the others' time is told, and gone, in one event, and so gets a brief lease."""
    following = Following(tmp_path, patience=3600)
    following.write(endpoint("nginx", "10.224.0.24"), endpoint("short", "10.224.0.30", sandbox="c" * 64))
    following.start()
    following.write(endpoint("nginx", "10.224.0.24"))
    event = following.next()
    following.source.stop()
    book = LeaseBook(["azure-cni"])
    book.observe(event.observations)

    assert told(event) == [("short", "10.224.0.30", True), ("short", "10.224.0.30", False)]
    assert [change.lease.pod.name for change in book.commit(clock.now())] == ["short", "short"]
    assert book.open_leases() == ()


def test_half_a_file_takes_nothing_back(following: Following) -> None:
    """A file that is cut off, empty or of another form leaves what is known, and the reason says so while it is."""
    following.start()
    following.next()
    whole = following.path.read_text()

    for text, words in ((whole[:-30], "not JSON, or cut off"), ("", "is empty"), ("[]", "is no object")):
        following.path.write_text(text)
        assert words in following.health(lambda health, words=words: words in health.reason).reason  # type: ignore[misc]  # a default is no type error
    following.path.write_text(whole)

    assert following.health(lambda health: health.up).reason == ""
    assert following.settle() == []


def test_what_is_no_file_keeps_nobody_waiting(following: Following) -> None:
    """A pipe or a directory in the file's place is named, and neither start nor end waits for it."""
    following.path.unlink()
    os.mkfifo(following.path)
    following.start()
    pipe = following.source.healthy().reason
    following.path.unlink()
    following.path.mkdir()

    directory = following.health(lambda health: "directory" in health.reason).reason

    assert pipe == f"{following.path} cannot be read: it is no regular file"
    assert directory == f"{following.path} cannot be read: Is a directory"


def test_where_there_is_no_file_it_is_absent(following: Following) -> None:
    """A node of another kind has none: no trouble; a file that comes later is found."""
    following.path.unlink()
    following.start()
    assert following.source.healthy()[:3] == (False, following.source.healthy().reason, False)
    assert told(following.next()) == []

    following.write(endpoint("nginx", "10.224.0.24"))

    assert told(following.next()) == [("nginx", "10.224.0.24", True)]
    assert following.source.healthy().present


def test_locks_are_nobodys_business(following: Following) -> None:
    """The files are only read: beside them nothing is made."""
    following.start()
    following.next()

    assert [path.name for path in following.path.parent.iterdir()] == ["azure-vnet.json"]


def test_aws_has_the_time_of_each(tmp_path: Path) -> None:
    """A pod of AWS was made when it got its address, and no later than now, whatever the file says."""
    path = tmp_path / "ipam.json"
    now = time.time_ns()
    allocations = [allocation("a", "10.0.1.5", now - 1000 * 10**9), allocation("b", "10.0.1.6", now + 10**13, "d" * 64)]
    path.write_text(json.dumps(checkpoint(*allocations)))
    events: queue.Queue[SourceEvent] = queue.Queue()
    source = AwsCniSource(str(path), PATIENCE)
    source.start(events.put)
    try:
        made = [seen.created for seen in events.get(timeout=LATENCY).observations]
    finally:
        source.stop()

    assert made[0] == pytest.approx(clock.from_wall(now / 1e9 - 1000.0), abs=60.0)
    assert made[0] < made[1] <= clock.now()
