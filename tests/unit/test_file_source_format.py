"""The format of pods.yaml."""

from __future__ import annotations

import json
import math

import pytest

from netacct.errors import ConfigError
from netacct.identity.pods_file import parse
from netacct.model import Observation, Pod, pack, unpack


def read(text: str) -> tuple[Observation, ...]:
    """The observations of a file that was read at 5.0."""
    return parse(text.encode(), "pods.yaml", 5.0)


FULL = """
pods:
  - {namespace: team-a, name: train-0, uid: 3f0c, ips: [10.244.1.10, "fd00:10:244:1::10"], phase: Running,
     labels: {experiment: scaling-laws, b: 2}, owner: {kind: Job, name: train}}
  - {namespace: team-b, name: web, ips: [10.244.2.0/30]}
"""


def test_a_whole_entry() -> None:
    """Each address of an entry becomes one observation with everything that the entry says of its pod."""
    pod = Pod("team-a", "train-0", "3f0c", "Job", "train", (("b", "2"), ("experiment", "scaling-laws")))
    assert read(FULL)[:2] == tuple(
        Observation("file", pack(ip), pod, "", -math.inf, 5.0) for ip in ("10.244.1.10", "fd00:10:244:1::10")
    )


def test_a_cidr_stands_for_each_of_its_addresses() -> None:
    """The first and the last address of a CIDR count, and a missing uid follows from namespace and name."""
    found = read(FULL)[2:]
    assert [unpack(o.ip) for o in found] == ["10.244.2.0", "10.244.2.1", "10.244.2.2", "10.244.2.3"]
    assert {o.pod for o in found} == {Pod("team-b", "web", "file:team-b/web")}
    assert {o.sandbox for o in found} == {""}  # the file knows of none


def test_json_is_the_same() -> None:
    """The same content as JSON gives the same observations."""
    pods = [{"namespace": "team-b", "name": "web", "ips": ["10.244.2.0/30"]}]
    assert read(json.dumps({"pods": pods})) == read(FULL)[2:]


def test_a_finished_pod_owns_nothing() -> None:
    """Succeeded and Failed pods are observed as absent, so another entry may have their name and address."""
    found = read(
        "pods:\n"
        "- {namespace: a, name: x, uid: u1, ips: [10.0.0.1], phase: Succeeded}\n"
        "- {namespace: a, name: x, uid: u2, ips: [10.0.0.1], phase: Pending}\n"
        "- {namespace: a, name: y, ips: [10.0.0.1], phase: Failed}\n"
    )
    assert [(o.pod.uid, o.present) for o in found] == [("u1", False), ("u2", True), ("file:a/y", False)]


def test_an_empty_list_is_explicit() -> None:
    """`pods: []` is an empty list, but a file without a list, as one that is half written, is an error."""
    assert read("pods: []") == ()
    for text in ("", "# nothing yet\n", "pods:\n"):
        with pytest.raises(ConfigError, match=r"pods.yaml:1: has no list pods"):
            read(text)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("{namespace: a}", r"pods.yaml:2: pods\[0\]: has no name"),
        ("{name: a}", r"pods\[0\]: has no namespace"),
        ("{namespace: a, name: b, ip: [10.0.0.1]}", r"pods.yaml:2: pods\[0\].ip: unknown key, did you mean 'ips'\?"),
        ("{namespace: 'a b', name: b}", r"pods\[0\].namespace: 'a b' is not a valid value"),
        ("{namespace: __other__, name: b}", r"namespace: '__other__' is not a valid value"),
        ("{namespace: a, name: b, uid: 'x y'}", r"uid: 'x y' is not a valid value"),
        (
            "{namespace: a, name: b, phase: running}",
            r"phase: 'running' is not a valid value \(allowed: Pending, Running",
        ),
        ("{namespace: a, name: b, ips: 10.0.0.1}", "'10.0.0.1' where a list is expected"),
        (
            "{namespace: a, name: b, ips: [10.0.0.1/24]}",
            r"ips\[0\]: '10.0.0.1/24' has host bits set \(allowed: 10.0.0.0/24",
        ),
        ("{namespace: a, name: b, ips: [10.0.0.0/19]}", r"10.0.0.0/19 has 8192 addresses \(allowed: up to 4096\)"),
        ("{namespace: a, name: b, ips: [10.0.0.1, 10.0.0.0/30]}", r"10.0.0.1 is also in pods\[0\].ips\[0\] in line 2"),
        ("{namespace: a, name: b, ips: [127.0.0.1]}", "127.0.0.1/32 holds loopback"),
        ("{namespace: a, name: b, ips: [255.255.255.255]}", "255.255.255.255/32 holds the broadcast"),
        ("{namespace: a, name: b, ips: ['fe80::1']}", "holds link-local"),
        ("{namespace: a, name: b, ips: ['::ffff:10.0.0.1']}", "IPv4 address in IPv6 form"),
        ("{namespace: a, name: b, labels: {'a b': c}}", "labels.a b: is no label key"),
        ('{namespace: a, name: b, labels: {a: "x\\ny"}}', r"labels.a: 'x\\ny' is not a valid value"),
        ("{namespace: a, name: b, owner: {kind: Job}}", r"owner: has no name"),
        ("{namespace: a, name: b, owner: Job}", "owner: 'Job' where a mapping is expected"),
        ("just-a-name", r"pods\[0\]: 'just-a-name' where a mapping is expected"),
    ],
)
def test_each_mistake_is_named(entry: str, message: str) -> None:
    """A mistake names file, line and key, and what is allowed."""
    with pytest.raises(ConfigError, match=message):
        read(f"pods:\n- {entry}\n")


def test_an_address_of_two_pods_names_both_lines() -> None:
    """Two living entries with the same address, also through a CIDR, are an error with both places."""
    text = "pods:\n- {namespace: a, name: x, ips: [10.0.0.0/24]}\n- {namespace: a, name: y, ips: [10.0.0.7]}\n"
    with pytest.raises(
        ConfigError, match=r"pods.yaml:3: pods\[1\].ips\[0\]: 10.0.0.7 is also in pods\[0\].ips\[0\] in line 2"
    ):
        read(text)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ("{namespace: a, name: x, uid: other}", r"pods.yaml:3: pods\[1\]: the pod a/x is also pods\[0\] in line 2"),
        ("{namespace: a, name: y, uid: u}", r"pods\[1\]: the uid u is also pods\[0\] in line 2"),
    ],
)
def test_a_pod_has_one_entry(second: str, message: str) -> None:
    """Two living entries with the same name or the same uid are an error with both places."""
    with pytest.raises(ConfigError, match=message):
        read(f"pods:\n- {{namespace: a, name: x, uid: u}}\n- {second}\n")


def test_the_whole_file_is_bounded() -> None:
    """A file that stands for more addresses than the limit is refused, whatever each entry stands for."""
    entries = "".join(f"- {{namespace: a, name: x{i}, ips: [10.{i}.0.0/20]}}\n" for i in range(17))
    with pytest.raises(ConfigError, match="more than 65536 addresses"):
        read("pods:\n" + entries)


def test_four_thousand_entries_are_read() -> None:
    """4,096 entries with labels and owner are one observation each."""
    entries = "".join(
        f"- {{namespace: team-a, name: p{i}, ips: [10.0.{i >> 8}.{i & 255}], labels: {{a: b}},"
        f" owner: {{kind: Job, name: x}}}}\n"
        for i in range(4096)
    )
    assert len({seen.ip for seen in read("pods:\n" + entries)}) == 4096


def test_a_host_network_pod_has_no_address() -> None:
    """An entry with hostNetwork is one observation, which says that the pod has the node's own addresses."""
    found = read(
        "pods:\n"
        "- {namespace: a, name: x, uid: 3f0c-1, hostNetwork: true}\n"
        "- {namespace: a, name: y, uid: 3f0c-2, hostNetwork: true, phase: Succeeded}\n"
        "- {namespace: a, name: z, uid: 3f0c-3, hostNetwork: false, ips: [10.0.0.1]}\n"
    )
    assert [(o.pod.name, o.ip, o.present) for o in found] == [
        ("x", b"", True),
        ("y", b"", False),
        ("z", pack("10.0.0.1"), True),
    ]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("{namespace: a, name: x, uid: 3f0c, hostNetwork: true, ips: [10.0.0.1]}", "no address of its own"),
        ("{namespace: a, name: x, hostNetwork: true}", "has no uid"),
        ("{namespace: a, name: x, uid: tenant-1, hostNetwork: true}", "not a valid value"),
        ("{namespace: a, name: x, uid: 3f0c, hostNetwork: maybe}", "not a boolean"),
    ],
)
def test_a_host_network_pod_is_found_by_its_uid_alone(entry: str, message: str) -> None:
    """With hostNetwork, an entry needs the uid that the kubelet puts into the cgroup's name, and no addresses."""
    with pytest.raises(ConfigError, match=message):
        read(f"pods:\n- {entry}\n")
