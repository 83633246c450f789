"""Cluster ranges in real routes and in real rules as kube-proxy writes them, in namespaces that each test makes."""

from __future__ import annotations

import ipaddress
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import Netns

from netacct.identity.cluster import Reading
from netacct.identity.cluster_processes import Programs
from netacct.identity.cluster_ranges import ClusterRanges
from netacct.identity.cluster_routes import LIMIT, Routes
from netacct.kernel import kube_rules
from netacct.policy import Prefix

pytestmark = pytest.mark.kernel

SERVICE_CHAIN = "KUBE-SVC-NPX46M4PTMTKRN6Y"

IPTABLES = """*nat
:KUBE-SERVICES - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-SVC-TCOU7JCQXEZGVUNU - [0:0]
:KUBE-SVC-NPX46M4PTMTKRN6Y - [0:0]
:KUBE-SEP-QWERTYUIOPASDFGH - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A KUBE-MARK-MASQ -j MARK --or-mark 0x4000
-A KUBE-SERVICES -m comment --comment "kube-system/kube-dns:dns cluster IP" -m udp -p udp -d {dns} --dport 53 \
-j KUBE-SVC-TCOU7JCQXEZGVUNU
-A KUBE-SERVICES -m comment --comment "default/kubernetes:https cluster IP" -m tcp -p tcp -d {api} --dport 443 \
-j KUBE-SVC-NPX46M4PTMTKRN6Y
-A KUBE-SVC-TCOU7JCQXEZGVUNU -m comment --comment "kube-system/kube-dns:dns cluster IP" -m udp -p udp -d {dns} \
--dport 53 ! -s {pods} -j KUBE-MARK-MASQ
{local}-A KUBE-SVC-NPX46M4PTMTKRN6Y -m comment --comment "default/kubernetes:https -> {node}:6443" \
-j KUBE-SEP-QWERTYUIOPASDFGH
-A KUBE-SEP-QWERTYUIOPASDFGH -m comment --comment "default/kubernetes:https" -s {node} -j KUBE-MARK-MASQ
-A KUBE-SEP-QWERTYUIOPASDFGH -m comment --comment "default/kubernetes:https" -m tcp -p tcp -j DNAT \
--to-destination {to}
COMMIT
"""
"""What kube-proxy 1.37 restores (pkg/proxy/iptables/proxier.go), for two Services."""

LOCAL = """-A KUBE-SVC-NPX46M4PTMTKRN6Y -m comment --comment "default/kubernetes:https cluster IP" -m tcp -p tcp \
-d {api} --dport 443 ! -s {pods} -j KUBE-MARK-MASQ
"""
"""The rule that kube-proxy writes only where it knows which sources are local."""

ADDRESSES = {
    4: {"dns": "10.96.0.10", "api": "10.96.0.1", "node": "192.168.50.1", "to": "192.168.50.1:6443"},
    6: {"dns": "fd00:10:96::a", "api": "fd00:10:96::1", "node": "fd00:50::1", "to": "[fd00:50::1]:6443"},
}

NFTABLES = """table {ip} kube-proxy {{
    set cluster-ips {{ type {type}; comment "Active ClusterIPs"; elements = {{ {api} }}; }}
    map service-ips {{ type {type} . inet_proto . inet_service : verdict; }}
    chain mark-for-masquerade {{ meta mark set meta mark or 0x4000; }}
    chain services {{
        {masquerade}
        {ip} daddr . meta l4proto . th dport vmap @service-ips
    }}
    chain service-NPX46M4P-default/kubernetes/tcp/https {{
        {older}
    }}
    chain cluster-ips-check {{
        {ip} daddr @cluster-ips reject comment "Reject traffic to invalid ports of ClusterIPs"
        {ip} daddr {{ {services} }} drop comment "Drop traffic to unallocated ClusterIPs"
    }}
    chain nat-prerouting {{ type nat hook prerouting priority dstnat; jump services; }}
    chain filter-forward {{ type filter hook forward priority 0; ct state new jump cluster-ips-check; }}
}}
"""
"""What matters of kube-proxy's tables in mode nftables (pkg/proxy/nftables/proxier.go)."""

FAMILY = {
    4: {"ip": "ip", "type": "ipv4_addr", "api": "10.96.0.1"},
    6: {"ip": "ip6", "type": "ipv6_addr", "api": "fd00:10:96::1"},
}


@pytest.fixture
def netns() -> Iterator[Netns]:
    """A network namespace, with an interface eth0 that leads to a router."""
    made = Netns()
    made.sh(
        "ip link set lo up",
        "sysctl -qw net.ipv6.conf.all.accept_dad=0 net.ipv6.conf.default.accept_dad=0",
        "ip link add eth0 type veth peer name router",
        "ip link set eth0 up",
        "ip link set router up",
    )
    yield made
    made.close()


def restore(netns: Netns, backend: str, pods4: str, pods6: str) -> None:
    """Restore both families' rules by iptables-legacy or iptables-nft; "" for a family: kube-proxy knows no range."""
    for number, tool, pods in ((4, "iptables", pods4), (6, "ip6tables", pods6)):
        local = LOCAL.format(pods=pods, **ADDRESSES[number]) if pods else ""
        elsewhere = "172.31.0.0/16" if number == 4 else "fdff::/64"  # of another Service, and never looked at
        text = IPTABLES.format(pods=elsewhere, local=local, **ADDRESSES[number])
        command = [shutil.which(f"{tool}-{backend}-restore") or f"{tool}-{backend}-restore"]
        netns.run(lambda text=text, command=command: subprocess.run(command, input=text, text=True, check=True))  # type: ignore[misc]  # bound at once


def load(netns: Netns, number: int, masquerade: str, older: str, services: str) -> None:
    """Load kube-proxy's nftables table of a family."""
    text = NFTABLES.format(masquerade=masquerade, older=older, services=services, **FAMILY[number])
    netns.run(lambda: subprocess.run(["nft", "-f", "-"], input=text, text=True, check=True))


def said(facts: list[Prefix]) -> set[tuple[str, str]]:
    """Network and class of each."""
    return {(str(fact.network), fact.traffic) for fact in facts}


@pytest.mark.parametrize(
    ("pods4", "pods6"),
    [("10.244.0.0/16", "fd00:10:244::/48"), ("10.4.0.0/14", "fd00:10:244::/47"), ("10.244.1.0/25", "fd00::1:0/113")],
)
@pytest.mark.parametrize("backend", ["legacy", "nft"])
def test_kube_proxys_iptables_rules_name_the_pods(netns: Netns, backend: str, pods4: str, pods6: str) -> None:
    """The rule of `default/kubernetes` names the range, in either backend and family; no other Service's is read."""
    restore(netns, backend, pods4, pods6)
    found = netns.run(lambda: [*kube_rules.read(), *kube_rules.read_legacy()])
    assert said(found) == {(pods4, "pod"), (pods6, "pod")}
    tables = {"iptables nat", "ip6tables nat"} if backend == "legacy" else {"nftables ip nat", "nftables ip6 nat"}
    assert {fact.origin for fact in found} == {
        f"found in kube-proxy's rules ({table} {SERVICE_CHAIN})" for table in tables
    }


@pytest.mark.parametrize("backend", ["legacy", "nft"])
def test_a_kube_proxy_that_knows_no_range_names_none(netns: Netns, backend: str) -> None:
    """Without a cluster CIDR there is no such rule; sources of endpoints are no range."""
    restore(netns, backend, "", "")
    assert netns.run(lambda: [*kube_rules.read(), *kube_rules.read_legacy()]) == []


def test_looking_makes_no_table(netns: Netns) -> None:
    """Without any rules nothing is found, and no legacy table has come into being."""
    assert netns.run(lambda: [*kube_rules.read(), *kube_rules.read_legacy()]) == []
    assert netns.run(lambda: Path("/proc/thread-self/net/ip_tables_names").read_text()) == ""
    assert netns.sh("nft list tables") == ""


def test_kube_proxys_nftables_name_pods_and_services(netns: Netns) -> None:
    """The masquerade rule names the pods' range, the drop rule those of Services: one CIDR, or several."""
    load(
        netns,
        4,
        "ip daddr @cluster-ips ip saddr != 10.244.0.0/16 jump mark-for-masquerade",
        "",
        "10.96.0.0/16, 10.100.0.0/20",
    )
    load(
        netns,
        6,
        "ip6 daddr @cluster-ips ip6 saddr != fd00:10:244::/47 jump mark-for-masquerade",
        "",
        "fd00:10:96::/112",
    )
    assert said(netns.run(kube_rules.read)) == {
        ("10.244.0.0/16", "pod"),
        ("fd00:10:244::/47", "pod"),
        ("10.96.0.0/16", "service"),
        ("10.100.0.0/20", "service"),
        ("fd00:10:96::/112", "service"),
    }


def test_older_nftables_rules_are_in_the_services_chain(netns: Netns) -> None:
    """Where the masquerade rule is in each Service's own chain, that of `default/kubernetes` is read."""
    rule = "ip daddr 10.96.0.1 tcp dport 443 ip saddr != 10.244.0.0/16 jump mark-for-masquerade"
    load(netns, 4, "", rule, "10.96.0.0/12")
    assert said(netns.run(kube_rules.read)) == {("10.244.0.0/16", "pod"), ("10.96.0.0/12", "service")}


def test_rules_by_interface_name_no_range(netns: Netns) -> None:
    """A kube-proxy that tells local sources by interface (EKS, AKS) names no range of pods."""
    load(netns, 4, 'ip daddr @cluster-ips iifname != "eni*" jump mark-for-masquerade', "", "10.96.0.0/16")
    assert said(netns.run(kube_rules.read)) == {("10.96.0.0/16", "service")}


def readings(netns: Netns, routes: Routes | None = None) -> dict[str, Reading]:
    """What routing says, by kind."""
    look = (routes or Routes()).look
    return {reading.kind: reading for reading in netns.run(look)}


def test_the_subnet_of_the_default_route_is_where_nodes_are(netns: Netns) -> None:
    """Both families' networks of the interface with the default route; of no other interface, and no link-local one."""
    netns.sh(
        "ip addr add 192.168.50.11/24 dev eth0",
        "ip addr add 192.168.50.99/32 dev eth0",
        "ip -6 addr add fd00:50::11/64 dev eth0",
        "ip link add other type bridge",
        "ip link set other up",
        "ip addr add 172.20.0.1/16 dev other",
    )
    assert readings(netns)["subnets"] == Reading("subnets")
    netns.sh("ip route add default via 192.168.50.1", "ip -6 route add default via fd00:50::1")
    origin = "connected subnet of eth0, which has the default route"
    found = readings(netns)["subnets"]
    assert {(str(fact.network), fact.traffic, fact.origin) for fact in found.facts} == {
        ("192.168.50.0/24", "node", origin),
        ("fd00:50::/64", "node", origin),
    }
    assert found.faults == ()


def test_of_a_clouds_subnets_only_that_of_the_default_route_is_nodes(netns: Netns) -> None:
    """On Google's machines the address is a /32, and the cloud names its subnet; a second interface's is no node's."""
    netns.sh(
        "ip addr add 10.128.0.3/32 dev eth0",
        "ip route add 10.128.0.1 dev eth0",
        "ip route add default via 10.128.0.1",
    )
    ranges = ClusterRanges(("routes", "cloud"), (list, list))
    told = [Prefix(ipaddress.ip_network(cidr), "node", "cloud") for cidr in ("10.128.0.0/20", "10.200.0.0/24")]
    ranges.learn(told)
    found, faults = netns.run(ranges.read)
    assert {(str(fact.network), fact.traffic) for fact in found} == {
        ("10.128.0.0/20", "node"),
        ("10.200.0.0/24", "cluster"),
    }
    assert faults == ()


def test_a_tunnel_to_the_world_is_no_subnet_of_nodes(netns: Netns) -> None:
    """Where the default route leads into a device without neighbours, such as a VPN's, nothing is said of nodes."""
    netns.sh(
        "ip addr add 192.168.50.11/24 dev eth0",
        "ip tuntap add mode tun name vpn",
        "ip link set vpn up",
        "ip addr add 10.9.0.1/24 dev vpn",
        "ip route add default dev vpn",
    )
    assert readings(netns)["subnets"].facts == ()


def test_a_blackhole_is_no_way_out(netns: Netns) -> None:
    """A default route that throws away leads to no interface."""
    netns.sh(
        "ip addr add 192.168.50.11/24 dev eth0", "ip route add blackhole default", "ip -6 route add unreachable default"
    )
    assert readings(netns)["subnets"].facts == ()


def test_routes_into_flannels_tunnel_are_pods(netns: Netns) -> None:
    """Other nodes' ranges behind flannel.1 are pods, neighbours joined; a static route by eth0 says nothing."""
    netns.sh(
        "ip addr add 192.168.50.11/24 dev eth0",
        "ip link add flannel.1 type vxlan id 1 dstport 8472 local 192.168.50.11",
        "ip link set flannel.1 up",
        *(f"ip route add 10.244.{n}.0/24 via 10.244.{n}.0 dev flannel.1 onlink" for n in (2, 3, 7)),
        "ip route add 10.99.0.0/16 via 192.168.50.12",
        "ip -6 route add fd00:10:244:2::/64 dev flannel.1",
    )
    found = readings(netns)["routes"]
    assert {(str(fact.network), fact.traffic) for fact in found.facts} == {
        ("10.244.2.0/23", "pod"),
        ("10.244.7.0/24", "pod"),
        ("fd00:10:244:2::/64", "pod"),
    }
    assert {fact.origin for fact in found.facts} == {"routed into flannel.1, which is flannel's"}


def test_a_node_that_leaves_takes_no_range_back(netns: Netns) -> None:
    """What was a pod range stays one while the agent runs, though its node and its route are gone."""
    netns.sh(
        "ip link add cilium_host type bridge", "ip link set cilium_host up", "ip route add 10.0.1.0/24 dev cilium_host"
    )
    routes = Routes()
    before = readings(netns, routes)["routes"]
    netns.sh("ip route del 10.0.1.0/24", "ip route add 10.0.9.0/24 dev cilium_host")
    after = readings(netns, routes)["routes"]
    assert [str(fact.network) for fact in before.facts] == ["10.0.1.0/24"]
    assert [str(fact.network) for fact in after.facts] == ["10.0.1.0/24", "10.0.9.0/24"]


def test_of_tunl0_only_calicos_routes_count(netns: Netns) -> None:
    """Every kernel with ipip has a tunl0; routes of bird and of Felix into it are pods', an operator's are not."""
    netns.sh(
        "ip link show tunl0 >/dev/null 2>&1 || ip link add tunl0 type bridge",
        "ip link set tunl0 up",
        "ip route add 10.48.1.0/26 dev tunl0 proto bird",
        "ip route add 10.48.2.0/26 dev tunl0 proto 80",
        "ip route add 10.77.0.0/16 dev tunl0",
    )
    found = readings(netns)["routes"]
    assert {str(fact.network) for fact in found.facts} == {"10.48.1.0/26", "10.48.2.0/26"}


def test_too_many_ranges_are_left_out(netns: Netns) -> None:
    """More networks than fit are not taken one by one, and that is told in words that stay the same."""
    netns.sh("ip link add vxlan.calico type bridge", "ip link set vxlan.calico up")
    lines = "".join(f"route add 10.{n >> 7}.{n % 128 * 2}.0/24 dev vxlan.calico\n" for n in range(LIMIT + 1))
    netns.run(lambda: subprocess.run(["ip", "-batch", "-"], input=lines, text=True, check=True))
    assert readings(netns)["routes"] == Reading(
        "routes", (), (f"more than {LIMIT} networks are routed into vxlan.calico, which are left out",)
    )


@pytest.mark.parametrize("here", [True, False])
def test_only_programs_of_this_namespace_are_seen(netns: Netns, tmp_path: Path, here: bool) -> None:
    """A real process called kube-proxy is found in its own network namespace, and not in another one."""
    program = tmp_path / "kube-proxy"
    program.symlink_to(sys.executable)
    command = [str(program), "-c", "input()", "--cluster-cidr=10.244.0.0/16"]
    started = netns.run(lambda: subprocess.Popen(command, stdin=subprocess.PIPE))
    try:
        other = netns if here else Netns()
        found = other.run(lambda: [one for one in Programs().look() if one.pid == started.pid])
        assert [one.arguments[-1] for one in found] == (["--cluster-cidr=10.244.0.0/16"] if here else [])
    finally:
        started.communicate(b"\n")
