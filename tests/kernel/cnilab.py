"""Pods made by the real CNI plugins, driven through libcni by the CNI project's own cnitool.

cnitool knows no other cache than /var/lib/cni, so it runs in a mount namespace of its own, in which a folder of the
test lies there: what it and the plugins write is seen by the test, and the machine's own /var/lib/cni by nobody.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import support
from support import Netns

from netacct.model import Family

PLUGINS = Path("/usr/lib/cni")
CNITOOL = Path(__file__).parents[2] / ".tools" / "bin" / "cnitool"
RANGES: dict[Family, str] = {4: "10.244.7.0/24", 6: "fd00:10:244:7::/64"}
GATEWAY: dict[Family, str] = {4: "10.244.7.1", 6: "fd00:10:244:7::1"}

_ENTER = 'mount -t tmpfs none /var/lib && mkdir /var/lib/cni && mount --bind "$0" /var/lib/cni && exec "$@"'


def require_tools() -> None:
    """Skip where the plugins or cnitool are missing, and say how to get them."""
    if not (PLUGINS / "ptp").exists():
        pytest.skip("no CNI plugins here (Debian package containernetworking-plugins)")
    if not CNITOOL.exists():
        pytest.skip("no cnitool here (tools/setup dev builds it with Go)")


@dataclass
class CniPod:
    """A pod that CNI gave its interface."""

    namespace: str
    name: str
    uid: str
    netns: Netns
    ips: dict[Family, str] = field(default_factory=dict)


class CniNode:
    """A node with a CNI configuration.

    Args:
        netns: the node.
        folder: an empty folder for configuration and state.
        plugin: ptp or bridge.
        room: how many addresses of each family there are for pods; 0 for all of the range.
    """

    def __init__(self, netns: Netns, folder: Path, plugin: str = "ptp", room: int = 0) -> None:
        require_tools()
        self.netns = netns
        self.configuration, self.state = folder / "net.d", folder / "state"
        self.configuration.mkdir()
        self.state.mkdir()
        self.pods: list[CniPod] = []
        ipam = {
            "type": "host-local",
            "ranges": [[_range(RANGES[family], room)] for family in (4, 6)],
            "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}],
        }
        first: dict[str, object] = {"type": plugin, "ipam": ipam, "capabilities": {"ips": True}}
        if plugin == "bridge":
            first |= {"bridge": "cni0", "isGateway": True}
        network = {"cniVersion": "1.0.0", "name": "pods", "plugins": [first]}
        (self.configuration / "10-pods.conflist").write_text(json.dumps(network))
        netns.sh("sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1 net.ipv6.conf.default.accept_dad=0")

    @property
    def results(self) -> Path:
        """The result cache of libcni."""
        return self.state / "results"

    def add(self, namespace: str, name: str, ips: Sequence[str] = ()) -> CniPod:
        """Make a pod; `ips` are addresses with prefix length that it shall have."""
        pod = CniPod(namespace, name, f"uid-{len(self.pods)}-{name}", Netns())
        self.pods.append(pod)
        pod.netns.sh("ip link set lo up", "sysctl -qw net.ipv6.conf.default.accept_dad=0")
        result = json.loads(self._cnitool("add", pod, ips))
        for entry in result["ips"]:
            address = str(entry["address"]).partition("/")[0]
            pod.ips[6 if ":" in address else 4] = address
        return pod

    def delete(self, pod: CniPod) -> None:
        """End a pod."""
        self._cnitool("del", pod, ())
        pod.netns.close()
        self.pods.remove(pod)

    def close(self) -> None:
        """Let the namespaces go."""
        for pod in self.pods:
            pod.netns.close()

    def _cnitool(self, verb: str, pod: CniPod, ips: Sequence[str]) -> str:
        arguments = {
            "IgnoreUnknown": "1",
            "K8S_POD_NAMESPACE": pod.namespace,
            "K8S_POD_NAME": pod.name,
            "K8S_POD_INFRA_CONTAINER_ID": f"sandbox-{pod.uid}",
            "K8S_POD_UID": pod.uid,
        }
        environ = os.environ | {
            "CNI_PATH": str(PLUGINS),
            "NETCONFPATH": str(self.configuration),
            "CNI_ARGS": ";".join(f"{key}={value}" for key, value in arguments.items()),
            "CAP_ARGS": json.dumps({"ips": list(ips)} if ips else {}),
            "PATH": os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin",
        }
        command = ["unshare", "--mount", "sh", "-c", _ENTER, str(self.state), str(CNITOOL), verb, "pods"]

        def run() -> subprocess.CompletedProcess[str]:
            assert support.in_private_namespace()
            return subprocess.run(
                [*command, pod.netns.path],
                env=environ,
                capture_output=True,
                text=True,
                check=False,
                timeout=2 * support.PATIENCE,
            )

        done = self.netns.run(run)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def _range(subnet: str, room: int) -> dict[str, str]:
    """A range of host-local; the first address is the gateway's."""
    network = ipaddress.ip_network(subnet)
    ends = {"rangeStart": str(network[2]), "rangeEnd": str(network[1 + room])} if room else {}
    return {"subnet": subnet, **ends}


def addresses(pod: CniPod) -> dict[Family, list[str]]:
    """The addresses that a pod's interface really has, by family."""
    (link,) = json.loads(pod.netns.sh("ip -j addr show dev eth0"))
    found: dict[Family, list[str]] = {4: [], 6: []}
    for entry in link["addr_info"]:
        if entry["scope"] == "global":
            found[4 if entry["family"] == "inet" else 6].append(entry["local"])
    return found


@contextlib.contextmanager
def cni_node(netns: Netns, folder: Path, plugin: str = "ptp", room: int = 0) -> Iterator[CniNode]:
    """A node for the length of a `with` block."""
    folder.mkdir()
    made = CniNode(netns, folder, plugin, room)
    try:
        yield made
    finally:
        made.close()
        shutil.rmtree(folder)
