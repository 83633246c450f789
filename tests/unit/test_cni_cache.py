"""libcni's cache files are decoded, in each form that their result can have, and nothing else is taken for one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netacct.identity import cni_cache
from netacct.identity.cni_cache import Attachment, decode
from netacct.model import Observation, Pod, pack

ARGUMENTS = [
    ["IgnoreUnknown", "1"],
    ["K8S_POD_NAMESPACE", "team-a"],
    ["K8S_POD_NAME", "train-0"],
    ["K8S_POD_INFRA_CONTAINER_ID", "4f5e"],
    ["K8S_POD_UID", "3f0c6a52-1d3e-4b7e-9a43-1f0d5c1f2b11"],
]
POD = Pod("team-a", "train-0", "3f0c6a52-1d3e-4b7e-9a43-1f0d5c1f2b11")
RESULT_1_0 = {
    "cniVersion": "1.0.0",
    "dns": {},
    "interfaces": [{"name": "veth1", "mac": "aa:bb:cc:dd:ee:ff"}, {"name": "eth0", "sandbox": "/run/netns/x"}],
    "ips": [
        {"address": "10.244.1.10/24", "gateway": "10.244.1.1", "interface": 1},
        {"address": "fd00:10:244:1::a/64", "gateway": "fd00:10:244:1::1", "interface": 1},
    ],
    "routes": [{"dst": "0.0.0.0/0"}],
}
BOTH = (pack("10.244.1.10"), pack("fd00:10:244:1::a"))


def cached(result: Any = RESULT_1_0, **fields: Any) -> bytes:
    """A cache file as containerd has it written."""
    whole = {
        "kind": "cniCacheV1",
        "containerId": "4f5e",
        "config": "e30=",
        "ifName": "eth0",
        "networkName": "pods",
        "netns": "/run/netns/cni-1",
        "cniArgs": ARGUMENTS,
        "capabilityArgs": {"portMappings": [], "io.kubernetes.cri.pod-annotations": {"a": "b"}},
        "result": result,
        **fields,
    }
    return json.dumps({key: value for key, value in whole.items() if value is not None}).encode()


@pytest.mark.parametrize(
    "result",
    [
        RESULT_1_0,
        RESULT_1_0 | {"cniVersion": "1.1.0"},
        {
            "cniVersion": "0.3.1",
            "ips": [
                {"version": "4", "address": "10.244.1.10/24"},
                {"version": "6", "address": "fd00:10:244:1::a/64"},
            ],
        },
        {
            "cniVersion": "0.2.0",
            "ip4": {"ip": "10.244.1.10/24", "gateway": "10.244.1.1"},
            "ip6": {"ip": "fd00:10:244:1::a/64"},
        },
    ],
    ids=["1.0", "1.1", "0.3.1", "0.2"],
)
def test_each_version_of_a_result_gives_the_addresses(result: object) -> None:
    """Addresses are found at the places at which every version of the specification puts them."""
    assert decode(cached(result)) == Attachment(POD, "4f5e", "/run/netns/cni-1", BOTH)


def test_observations_carry_times_and_sandbox() -> None:
    """Each address becomes an observation of its own with the times that were given."""
    found = decode(cached())
    assert found is not None
    assert found.observations(3.0, 4.0) == tuple(Observation("cni", ip, POD, "4f5e", 3.0, 4.0) for ip in BOTH)


def test_a_runtime_that_gives_no_uid_and_no_sandbox() -> None:
    """Without uid it stays empty, and without an infra container's id the container's is the sandbox."""
    found = decode(cached(cniArgs=ARGUMENTS[1:3]))
    assert found is not None
    assert (found.pod.uid, found.sandbox) == ("", "4f5e")


@pytest.mark.parametrize(
    "data",
    [
        cached(cniArgs=None),
        cached(cniArgs=[["IgnoreUnknown", "1"]]),
        cached(cniArgs="K8S_POD_NAME=x"),
        cached(ifName="lo"),
        json.dumps(RESULT_1_0).encode(),
    ],
    ids=["podman", "no-names", "not-pairs", "loopback", "bare-result"],
)
def test_a_file_of_no_pod_says_nothing(data: bytes) -> None:
    """A valid file that names no pod, or is about its loopback, is no error and no attachment."""
    assert decode(data) is None


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "empty"),
        (cached()[:-1], "cut off"),
        (b"\xff\xfe\x00", "cut off"),
        (b"[" * 100_000, "cut off"),
        (b"[]", "not an object"),
        (b"{}", "kind"),
        (cached(kind="cniCacheV2"), "cniCacheV2"),
        (cached(result=None), "result"),
        (cached({"ips": {"address": "10.0.0.1/24"}}), "list of ips"),
        (cached({"ips": ["10.0.0.1/24"]}), "entry of ips"),
        (cached({"ips": [{"address": 7}]}), "not a string"),
        (cached({"ips": [{"address": "10.0.0.256/24"}]}), "no address"),
        (cached({"ip4": "10.0.0.1/24"}), "ip4"),
        (cached(cniArgs=[["K8S_POD_NAMESPACE", "a\nb"], ["K8S_POD_NAME", "x"]]), "Kubernetes"),
        (cached(cniArgs=[*ARGUMENTS[:3], ["K8S_POD_UID", "a b"]]), "uid"),
        (cached(cniArgs=ARGUMENTS[:3], containerId=None), "sandbox"),
    ],
)
def test_garbage_is_refused_with_a_reason(data: bytes, why: str) -> None:
    """What is no whole cache file is a ValueError that says what is wrong with it."""
    with pytest.raises(ValueError, match=why):
        decode(data)


def test_addresses_that_no_pod_can_have_are_left_out() -> None:
    """Loopback, link-local and multicast addresses in a result are not the pod's."""
    ips = [{"address": text} for text in ("127.0.0.2/8", "fe80::1/64", "224.0.0.1/4", "10.0.0.1/24", "10.0.0.1/24")]
    found = decode(cached({"ips": ips}))
    assert found is not None
    assert found.addresses == (pack("10.0.0.1"),)


@given(st.integers(0, len(cached()) - 1), st.binary(max_size=4))
def test_a_damaged_file_never_raises_anything_else(place: int, patch: bytes) -> None:
    """A file with bytes replaced at any place is decoded or refused, and no other exception comes out."""
    data = cached()
    try:
        found = decode(data[:place] + patch + data[place + len(patch) :])
    except ValueError:
        return
    assert found is None or isinstance(found, Attachment)


def test_loopback_files_are_known_by_name() -> None:
    """A file of a pod's `lo` is recognised without being read."""
    assert cni_cache.is_loopback("cni-loopback-4f5e-lo")
    assert not cni_cache.is_loopback("pods-4f5e-eth0")
