"""Cluster ranges in files and command lines as flannel, Kubernetes' programs and CNI plugins write them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from netacct.identity import cluster_cni, cluster_flannel, cluster_kubernetes
from netacct.identity.cluster import Reading
from netacct.identity.cluster_files import Files
from netacct.identity.cluster_processes import Programs

ALL = ("flannel", "cni", "kubernetes")

SUBNET_ENV = """FLANNEL_NETWORK=10.244.0.0/16
FLANNEL_SUBNET=10.244.1.1/24
FLANNEL_IPV6_NETWORK=fd00:10:244::/56
FLANNEL_IPV6_SUBNET=fd00:10:244:1::1/64
FLANNEL_MTU=1450
FLANNEL_IPMASQ=true
"""

NET_CONF = """{
\t"Network": "10.42.0.0/16",
\t"EnableIPv6": false,
\t"EnableIPv4": true,
\t"IPv6Network": "::/0",
\t"Backend": {
\t"Type": "vxlan"
}
}
"""

KUBE_PROXY = """apiVersion: kubeproxy.config.k8s.io/v1alpha1
bindAddress: 0.0.0.0
bindAddressHardFail: false
clientConnection:
  acceptContentTypes: ""
  burst: 0
  contentType: ""
  kubeconfig: /var/lib/kube-proxy/kubeconfig.conf
  qps: 0
clusterCIDR: 10.244.0.0/16,fd00:10:244::/48
configSyncPeriod: 0s
conntrack:
  maxPerCore: null
  min: null
detectLocal:
  bridgeInterface: ""
  interfaceNamePrefix: ""
detectLocalMode: ""
enableProfiling: false
hostnameOverride: ""
kind: KubeProxyConfiguration
mode: ""
"""

KUBELET = """apiVersion: kubelet.config.k8s.io/v1beta1
authentication:
  anonymous:
    enabled: false
cgroupDriver: systemd
clusterDNS:
- 10.96.0.10
- fd00:10:96::a
clusterDomain: cluster.local
kind: KubeletConfiguration
staticPodPath: /etc/kubernetes/manifests
"""

EKS_KUBE_PROXY = KUBE_PROXY.replace("clusterCIDR: 10.244.0.0/16,fd00:10:244::/48", 'clusterCIDR: ""')

K3S = """write-kubeconfig-mode: "0644"
cluster-cidr: 10.42.0.0/16,2001:cafe:42::/56
service-cidr:
  - 10.43.0.0/16
  - 2001:cafe:43::/112
"""

CALICO = {
    "name": "k8s-pod-network",
    "cniVersion": "0.3.1",
    "plugins": [
        {
            "type": "calico",
            "datastore_type": "kubernetes",
            "ipam": {
                "type": "calico-ipam",
                "ipv4_pools": ["10.48.0.0/14", "default-ipv4-ippool"],
                "assign_ipv4": "true",
            },
        },
        {"type": "portmap", "snat": True, "capabilities": {"portMappings": True}},
    ],
}

KINDNET = {
    "cniVersion": "0.3.1",
    "name": "kindnet",
    "plugins": [
        {
            "type": "ptp",
            "ipMasq": False,
            "ipam": {
                "type": "host-local",
                "dataDir": "/run/cni-ipam-state",
                "routes": [{"dst": "0.0.0.0/0"}],
                "ranges": [[{"subnet": "10.244.0.0/24"}]],
            },
            "mtu": 1500,
        },
        {"type": "portmap", "capabilities": {"portMappings": True}},
    ],
}

AZURE = {
    "cniVersion": "0.3.0",
    "name": "azure",
    "plugins": [
        {
            "type": "azure-vnet",
            "mode": "transparent",
            "ipsToRouteViaHost": ["169.254.20.10"],
            "ipam": {"type": "azure-vnet-ipam"},
        },
        {"type": "portmap", "capabilities": {"portMappings": True}, "snat": True},
    ],
}


class Node:
    """A node's files below a folder, and its processes below another, which looks like /proc."""

    def __init__(self, folder: Path) -> None:
        self.root, self.proc = folder / "root", folder / "proc"
        self.write("/etc/hostname", "node-1")
        (self.proc / "thread-self/net").mkdir(parents=True)
        (self.proc / "thread-self/net/dev").touch()

    def write(self, path: str, text: str) -> Path:
        """A file of the node's."""
        file = Path(f"{self.root}{path}")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def runs(self, pid: int, *arguments: str, cgroup: str = "0::/system.slice", here: bool = True) -> Path:
        """A process, with the name that the kernel cuts off; `here`: in this network namespace."""
        folder = self.proc / str(pid)
        (folder / "net").mkdir(parents=True)
        (folder / "comm").write_text(Path(arguments[0]).name[:15] + "\n")
        (folder / "cmdline").write_bytes(b"".join(argument.encode() + b"\0" for argument in arguments))
        (folder / "cgroup").write_text(cgroup + "\n")
        if here:
            os.link(self.proc / "thread-self/net/dev", folder / "net/dev")
        else:
            (folder / "net/dev").touch()
        return folder

    def look(self, *providers: str) -> dict[str, Reading]:
        """What the providers (all, where none is named) find now, by kind."""
        files = Files(providers or ALL, root=str(self.root), proc=str(self.proc))
        return {reading.kind: reading for reading in files.look()}


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """An empty node."""
    return Node(tmp_path)


def said(reading: Reading) -> dict[str, tuple[str, str]]:
    """Class and origin of each network."""
    return {str(fact.network): (fact.traffic, fact.origin) for fact in reading.facts}


def test_flannel_names_the_pods_of_both_families(node: Node) -> None:
    """The networks of subnet.env are the cluster's pods; the node's own subnet in it is not."""
    node.write("/run/flannel/subnet.env", SUBNET_ENV)
    assert said(node.look()["flannel"]) == {
        "10.244.0.0/16": ("pod", "found in /run/flannel/subnet.env (FLANNEL_NETWORK)"),
        "fd00:10:244::/56": ("pod", "found in /run/flannel/subnet.env (FLANNEL_IPV6_NETWORK)"),
    }


def test_flannel_takes_several_networks() -> None:
    """Several networks stand with commas between them."""
    facts, faults = cluster_flannel.parse_subnet_file("FLANNEL_NETWORK=10.5.0.0/16,10.6.0.0/16\n", "f")
    assert [str(fact.network) for fact in facts] == ["10.5.0.0/16", "10.6.0.0/16"]
    assert not faults


def test_k3s_flannel_says_which_family_it_means(node: Node) -> None:
    """Of net-conf.json only a family counts that is switched on: `::/0` stands for none."""
    node.write("/var/lib/rancher/k3s/agent/etc/flannel/net-conf.json", NET_CONF)
    path = "/var/lib/rancher/k3s/agent/etc/flannel/net-conf.json"
    assert said(node.look()["flannel"]) == {"10.42.0.0/16": ("pod", f"found in {path} (Network)")}
    assert node.look()["flannel"].faults == ()


def test_half_a_file_of_flannels_is_a_fault() -> None:
    """JSON that was cut off says nothing, and that it does."""
    facts, faults = cluster_flannel.parse_configuration(NET_CONF[:40], "/net-conf.json")
    assert not facts
    assert faults[0].startswith("/net-conf.json is not JSON: ")
    assert cluster_flannel.parse_configuration("[]", "/net-conf.json") == ([], ["/net-conf.json is not an object"])


def test_a_default_route_is_no_cluster_range() -> None:
    """What is wider than /8 or /16, or link-local, is refused with the reason."""
    for text, why in {
        "0.0.0.0/0": "0.0.0.0/0 is wider than /8, which says nothing about a cluster",
        "10.0.0.0/7": "10.0.0.0/7 is wider than /8, which says nothing about a cluster",
        "fc00::/7": "fc00::/7 is wider than /16, which says nothing about a cluster",
        "169.254.0.0/16": "169.254.0.0/16 is link-local, which no router forwards",
        "224.0.0.0/8": "224.0.0.0/8 holds multicast addresses, which are nobody's",
        "10.244.0.0/33": "'10.244.0.0/33' is no CIDR",
        "fd00::%eth0/64": "'fd00::%eth0/64' is no CIDR",
    }.items():
        facts, faults = cluster_flannel.parse_subnet_file(f"FLANNEL_NETWORK={text}", "f")
        assert (facts, faults) == ([], [f"{why} (found in f (FLANNEL_NETWORK))"])


def test_only_calico_names_pods_in_cni_configuration(node: Node) -> None:
    """Calico's pools that are CIDRs count; host-local's routes, Azure's and kindnet's configuration name no cluster."""
    node.write("/etc/cni/net.d/10-calico.conflist", json.dumps(CALICO))
    assert said(node.look()["CNI configuration"]) == {
        "10.48.0.0/14": ("pod", "found in /etc/cni/net.d/10-calico.conflist (ipv4_pools)")
    }
    for other in (KINDNET, AZURE, "no object"):
        assert cluster_cni.parse(json.dumps(other), "f") == ([], [])
    assert cluster_cni.parse("{", "f") == ([], [])


def test_only_the_network_that_counts_is_read(node: Node) -> None:
    """A configuration behind the first of its directory is no pod's, as for the local ranges."""
    node.write("/etc/cni/net.d/05-kindnet.conflist", json.dumps(KINDNET))
    node.write("/etc/cni/net.d/10-calico.conflist", json.dumps(CALICO))
    assert said(node.look()["CNI configuration"]) == {}


def test_command_lines_tell_pods_and_services(node: Node) -> None:
    """Flags of running programs count, with `=` or without, also of one whose name the kernel cuts off."""
    node.runs(7, "kube-proxy", "--cluster-cidr=10.4.0.0/14", "--v=2")
    node.runs(8, "/usr/bin/kube-controller-manager", "--cluster-cidr", "10.244.0.0/16", "--v", "2")
    node.runs(
        9, "kube-apiserver", "--service-cluster-ip-range=10.96.0.0/16,fd00:10:96::/112", "--cluster-cidr=10.9.0.0/16"
    )
    node.runs(10, "/usr/bin/kubelet", "--cluster-dns=10.96.0.10,169.254.20.10")
    found = node.look("kubernetes")
    assert said(found["kube-proxy"]) == {
        "10.4.0.0/14": ("pod", "found in the command line of kube-proxy (--cluster-cidr)")
    }
    where = "found in the command line of kube-controller-manager (--cluster-cidr)"
    assert said(found["kube-controller-manager"]) == {"10.244.0.0/16": ("pod", where)}
    assert {net: traffic for net, (traffic, _) in said(found["kube-apiserver"]).items()} == {
        "10.96.0.0/16": "service",
        "fd00:10:96::/112": "service",
    }
    assert list(said(found["kubelet"])) == ["10.96.0.10/32"]
    assert found["kubelet"].faults == ()


def test_programs_of_others_are_not_asked(node: Node) -> None:
    """A kube-proxy in another network namespace (kind, in a container) tells of another cluster; a shell of none."""
    node.runs(7, "kube-proxy", "--cluster-cidr=10.4.0.0/14", here=False)
    node.runs(8, "bash", "--cluster-cidr=10.5.0.0/16")
    user = node.runs(9, "kube-proxy", "--cluster-cidr=10.6.0.0/16")
    os.chown(user, 1000, 1000)
    assert said(node.look("kubernetes")["kube-proxy"]) == {}


def test_kube_proxy_in_a_pod_is_read_from_the_kubelets_volume(node: Node) -> None:
    """Where the container cannot be looked into, the kubelet's copy is read, and named as it is called in there."""
    uid = "0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0"
    cgroup = (
        f"0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{uid.replace('-', '_')}.slice/cri-x.scope"
    )
    node.runs(
        7,
        "/usr/local/bin/kube-proxy",
        "--config=/var/lib/kube-proxy/config.conf",
        "--hostname-override=n",
        cgroup=cgroup,
    )
    volume = f"/var/lib/kubelet/pods/{uid}/volumes/kubernetes.io~configmap/kube-proxy"
    node.write(f"{volume}/..2026_11_29/config.conf", KUBE_PROXY)
    Path(f"{node.root}{volume}/..data").symlink_to("..2026_11_29")
    Path(f"{node.root}{volume}/config.conf").symlink_to("..data/config.conf")
    origin = "found in /var/lib/kube-proxy/config.conf (clusterCIDR)"
    assert said(node.look("kubernetes")["kube-proxy"]) == {
        "10.244.0.0/16": ("pod", origin),
        "fd00:10:244::/48": ("pod", origin),
    }


def test_kube_proxy_of_the_hosts_names_the_hosts_file(node: Node) -> None:
    """A kube-proxy outside of any pod has its file where it says."""
    node.runs(7, "kube-proxy", "--config", "/etc/kubernetes/proxy.yaml")
    node.write("/etc/kubernetes/proxy.yaml", KUBE_PROXY)
    assert list(said(node.look("kubernetes")["kube-proxy"])) == ["10.244.0.0/16", "fd00:10:244::/48"]


def test_a_file_in_the_container_comes_first(node: Node) -> None:
    """Where the container can be looked into, its own file counts."""
    folder = node.runs(7, "kube-proxy", "--config=/p.conf")
    (folder / "root").mkdir()
    (folder / "root/p.conf").write_text("clusterCIDR: 10.7.0.0/16\n")
    node.write("/p.conf", "clusterCIDR: 10.8.0.0/16\n")
    assert list(said(node.look("kubernetes")["kube-proxy"])) == ["10.7.0.0/16"]


def test_an_empty_cluster_cidr_says_nothing(node: Node) -> None:
    """EKS leaves clusterCIDR empty, and null is as good."""
    node.write("/var/lib/kube-proxy-config/config", EKS_KUBE_PROXY)
    assert node.look("kubernetes")["kube-proxy"] == Reading("kube-proxy")
    assert cluster_kubernetes.parse_configuration("kube-proxy", b"clusterCIDR: null\n", "f") == ([], [])


def test_the_kubelets_dns_is_one_service_address_each(node: Node) -> None:
    """Each address of clusterDNS is a Service, and no range is made of them."""
    node.write("/var/lib/kubelet/config.yaml", KUBELET)
    assert said(node.look("kubernetes")["kubelet"]) == {
        "10.96.0.10/32": ("service", "found in /var/lib/kubelet/config.yaml (clusterDNS)"),
        "fd00:10:96::a/128": ("service", "found in /var/lib/kubelet/config.yaml (clusterDNS)"),
    }


def test_k3s_and_microk8s_keep_flags_in_files(node: Node) -> None:
    """k3s' config.yaml has names with commas or in lists; MicroK8s has a file of flags for each program."""
    node.write("/etc/rancher/k3s/config.yaml", K3S)
    node.write("/etc/rancher/rke2/config.yaml.d/10.yaml", "cluster-cidr: 10.50.0.0/16\n")
    node.write(
        "/var/snap/microk8s/current/args/kube-proxy", "--kubeconfig=${SNAP_DATA}/p\n--cluster-cidr=10.1.0.0/16\n"
    )
    found = node.look("kubernetes")
    assert {net: traffic for net, (traffic, _) in said(found["k3s"]).items()} == {
        "10.42.0.0/16": "pod",
        "2001:cafe:42::/56": "pod",
        "10.43.0.0/16": "service",
        "2001:cafe:43::/112": "service",
        "10.50.0.0/16": "pod",
    }
    assert list(said(found["kube-proxy"])) == ["10.1.0.0/16"]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (KUBE_PROXY.encode()[:40] + b"\n\tx", "is not valid YAML"),
        (b"clusterCIDR: {a: b}\n", "a mapping where a string is expected"),
        (b"- a\n", "where a mapping is expected"),
        (b"\xff\xfe", "is not UTF-8 text"),
    ],
)
def test_a_configuration_that_is_none_is_a_fault(data: bytes, why: str) -> None:
    """Anything but such a configuration says nothing, and why."""
    facts, faults = cluster_kubernetes.parse_configuration("kube-proxy", data, "/p.conf")
    assert not facts
    assert why in faults[0]


def test_a_pipe_is_not_waited_for(node: Node) -> None:
    """Something else in place of a file is told, and nothing is read from it."""
    folder = node.write("/run/flannel/x", "").parent
    os.mkfifo(folder / "subnet.env")
    assert node.look("flannel")["flannel"].faults == ("/run/flannel/subnet.env cannot be read: it is no regular file",)


def test_a_directory_in_a_files_place_is_a_fault_and_leaves_nothing_open(node: Node) -> None:
    """What a container runtime made of a missing file is looked at each minute, and no descriptor stays open."""
    (node.write("/run/flannel/x", "").parent / "subnet.env").mkdir()
    before = len(list(Path("/proc/self/fd").iterdir()))
    faults = [node.look("flannel")["flannel"].faults for _ in range(3)]
    assert faults == 3 * [("/run/flannel/subnet.env cannot be read: Is a directory",)]
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_node_without_anything_says_nothing(node: Node) -> None:
    """Missing files and programs are no fault."""
    assert all(not reading.facts and not reading.faults for reading in node.look().values())


def test_processes_are_looked_for_again_when_one_has_ended(node: Node) -> None:
    """A found program is not looked for anew while it runs; when it has ended, the next one is found."""
    first = node.runs(7, "kube-proxy", "--cluster-cidr=10.4.0.0/16")
    programs = Programs(str(node.proc))
    assert [one.pid for one in programs.look()] == [7]
    node.runs(8, "kubelet")
    assert [one.pid for one in programs.look()] == [7]
    (first / "comm").write_text("bash\n")
    assert [one.pid for one in programs.look()] == [8]


@pytest.mark.parametrize(("idle", "minutes"), [(0, 1), (1, 2), (3, 4), (120, 10)])
def test_programs_that_come_late_are_found(node: Node, idle: int, minutes: int) -> None:
    """An agent that starts before the kubelet finds kube-proxy within a minute; the longer there is none, the later."""
    now = [0.0]
    programs = Programs(str(node.proc), lambda: now[0])
    for minute in range(idle + 1):
        now[0] = 60.0 * minute
        assert not programs.look()
    node.runs(7, "kube-proxy", "--cluster-cidr=10.4.0.0/16")
    waited = 0
    while not programs.look():
        waited += 1
        now[0] += 60.0
    assert 0 < waited <= minutes


def test_the_same_flag_twice_means_the_last() -> None:
    """As Kubernetes' programs take it; a flag without a value, and words that are none, change nothing."""
    words = ["--v", "2", "--a=1", "x", "--a=2", "--alsologtostderr", "--b", "--c", "3", "4"]
    assert cluster_kubernetes.flags(words) == {"v": "2", "a": "2", "alsologtostderr": "", "b": "", "c": "3"}
