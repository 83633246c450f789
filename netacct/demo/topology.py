"""Builds the demo's network: one node under test, everybody around it, and the node's NAT as Kubernetes sets it up."""

from __future__ import annotations

import json
from collections.abc import Callable
from textwrap import dedent

from netacct.demo import peers
from netacct.demo.cni import Cni
from netacct.demo.netns import Namespace
from netacct.demo.world import (
    ADDRESSES,
    FAMILIES,
    FIRST_PODS,
    HEIRS,
    HOST_PORTS,
    LOCAL_RANGES,
    NODE_PORTS,
    NODE_PORTS_REMOTE,
    PEERS,
    PODS,
    VXLAN_PORT,
    Family,
)

_QUIET = {
    # duplicate address detection and router solicitation come at moments that nobody chose
    "ipv6/conf/{}/accept_dad": 0,
    "ipv6/conf/{}/router_solicitations": 0,
    "ipv6/conf/{}/accept_ra": 0,
    "ipv6/conf/{}/mldv2_unsolicited_report_interval": 100,
    "ipv6/conf/{}/disable_ipv6": 0,
    "ipv4/conf/{}/rp_filter": 0,
    "ipv4/conf/{}/send_redirects": 0,
}
_FORWARDING = {"ipv4/ip_forward": 1, "ipv6/conf/all/forwarding": 1, "ipv6/conf/default/forwarding": 1}

_WIRE = """\
    link add br0 type bridge mcast_snooping 0 stp_state 0 forward_delay 0
    link set br0 up
"""
_NODE = """\
    addr add 192.168.50.1/24 dev eth0
    addr add fd00:50::1/64 dev eth0 nodad
    link set eth0 up
    route add default via 192.168.50.254
    route add default via fd00:50::fe
    route add 10.244.2.0/24 via 192.168.50.2
    route add fd00:10:244:2::/64 via fd00:50::2
    link add vx4 type vxlan id 41 local 192.168.50.1 remote 192.168.50.2 dstport {vxlan} dev eth0
    addr add 10.244.1.254/32 dev vx4
    link set vx4 up
    route add 10.244.3.0/24 via 10.244.3.254 dev vx4 onlink
    link add vx6 type vxlan id 61 local fd00:50::1 remote fd00:50::2 dstport {vxlan} dev eth0
    addr add fd00:10:244:1::254/128 dev vx6 nodad
    link set vx6 up
    route add fd00:10:244:3::/64 via fd00:10:244:3::fe dev vx6 onlink
"""
_OTHER = """\
    addr add 192.168.50.2/24 dev eth0
    addr add fd00:50::2/64 dev eth0 nodad
    link set eth0 up
    addr add 10.244.2.1/24 dev to-remote
    addr add fd00:10:244:2::1/64 dev to-remote nodad
    link set to-remote up
    route add 10.244.3.20 dev to-remote
    route add fd00:10:244:3::20 dev to-remote
    route add default via 192.168.50.254
    route add default via fd00:50::fe
    route add 10.244.1.0/24 via 192.168.50.1
    route add fd00:10:244:1::/64 via fd00:50::1
    link add vx4 type vxlan id 41 local 192.168.50.2 remote 192.168.50.1 dstport {vxlan} dev eth0
    addr add 10.244.3.254/32 dev vx4
    link set vx4 up
    route add 10.244.1.0/24 via 10.244.1.254 dev vx4 onlink table 100
    link add vx6 type vxlan id 61 local fd00:50::2 remote fd00:50::1 dstport {vxlan} dev eth0
    addr add fd00:10:244:3::fe/128 dev vx6 nodad
    link set vx6 up
    route add fd00:10:244:1::254 dev vx6
    route add fd00:10:244:1::/64 via fd00:10:244:1::254 dev vx6 onlink table 100
"""
_REMOTE = """\
    addr add 10.244.2.20/24 dev eth0
    addr add fd00:10:244:2::20/64 dev eth0 nodad
    addr add 10.244.3.20/32 dev eth0
    addr add fd00:10:244:3::20/128 dev eth0 nodad
    link set eth0 up
    route add default via 10.244.2.1
    route add default via fd00:10:244:2::1
"""
_GATEWAY = """\
    addr add 192.168.50.254/24 dev eth0
    addr add fd00:50::fe/64 dev eth0 nodad
    link set eth0 up
    addr add 172.20.0.1/24 dev to-private
    addr add fd12:3456::1/64 dev to-private nodad
    link set to-private up
    route add 172.20.9.5 dev to-private
    route add fd12:3456:9::5 dev to-private
    addr add 203.0.113.1/24 dev to-internet
    addr add 2001:db8::1/64 dev to-internet nodad
    link set to-internet up
    route add 10.244.1.0/24 via 192.168.50.1
    route add fd00:10:244:1::/64 via fd00:50::1
"""
_PRIVATE = """\
    addr add 172.20.0.5/24 dev eth0
    addr add fd12:3456::5/64 dev eth0 nodad
    addr add 172.20.9.5/32 dev eth0
    addr add fd12:3456:9::5/128 dev eth0 nodad
    link set eth0 up
    route add default via 172.20.0.1
    route add default via fd12:3456::1
"""
_INTERNET = """\
    addr add 203.0.113.10/24 dev eth0
    addr add 203.0.113.20/24 dev eth0
    addr add 2001:db8::10/64 dev eth0 nodad
    addr add 2001:db8::20/64 dev eth0 nodad
    link set eth0 up
    route add default via 203.0.113.1
    route add default via 2001:db8::1
"""

_PLANS = {"node": _NODE, "other": _OTHER, "remote": _REMOTE, "gateway": _GATEWAY, "private": _PRIVATE}
_PLANS["internet"] = _INTERNET

# What kube-proxy and an ip-masq-agent would install: services and node ports by DNAT, with the masquerade mark where
# the answer would otherwise find another way back; pods leave for the internet with the node's own address.
_NAT = """\
    *nat
    :SERVICES - [0:0]
    -A PREROUTING -j SERVICES
    -A OUTPUT -j SERVICES
    -A SERVICES -d {service_web} ! -s {local} -j MARK --or-mark 0x4000
    -A SERVICES -d {service_web} -s {web} -j MARK --or-mark 0x4000
    -A SERVICES -d {service_web} -j DNAT --to-destination {web}
    -A SERVICES -d {service_remote} ! -s {local} -j MARK --or-mark 0x4000
    -A SERVICES -d {service_remote} -j DNAT --to-destination {remote}
    -A SERVICES -d {node} -p udp --dport {ports_remote} -j MARK --or-mark 0x4000
    -A SERVICES -d {node} -p udp --dport {ports_remote} -j DNAT --to-destination {remote}
    -A SERVICES -d {node} -p udp --dport {ports} -j MARK --or-mark 0x4000
    -A SERVICES -d {node} -p udp --dport {ports} -j DNAT --to-destination {web}
    -A SERVICES -d {loopback} -p udp --dport {host_ports} -j DNAT --to-destination {web}
    -A POSTROUTING -s {loopback} ! -o lo -j MASQUERADE
    -A POSTROUTING -m mark --mark 0x4000/0x4000 -j MASQUERADE --random-fully
    {local_exits}
    -A POSTROUTING -s {local} -o eth0 -j MASQUERADE
    COMMIT
"""
_NOT_MASQUERADED: dict[Family, tuple[str, ...]] = {
    4: ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"),
    6: ("fc00::/7", "fe80::/10", "ff00::/8"),
}


def nat_rules(family: Family) -> str:
    """The node's nat table, as input of iptables-legacy-restore or ip6tables-legacy-restore."""
    at = ADDRESSES[family]
    exits = [f"-A POSTROUTING -s {LOCAL_RANGES[family]} -d {cidr} -j RETURN" for cidr in _NOT_MASQUERADED[family]]
    return dedent(_NAT).format(
        service_web=at["service-web"],
        service_remote=at["service-remote"],
        web=at["web-0"],
        remote=at["remote"],
        node=at["node"],
        loopback=at["node-loopback"],
        local=LOCAL_RANGES[family],
        ports="{}:{}".format(*NODE_PORTS),
        ports_remote="{}:{}".format(*NODE_PORTS_REMOTE),
        host_ports="{}:{}".format(*HOST_PORTS),
        local_exits="\n".join(exits),
    )


class Topology:
    """All namespaces of one run, by actor. Close it, and everything in them is gone."""

    def __init__(self) -> None:
        self.spaces: dict[str, Namespace] = {}
        self._cni: Cni | None = None

    def build(self, cni: Callable[[Namespace], Cni] | None = None) -> None:
        """Make namespaces, links, addresses, routes, the node's NAT and the peers' counters.

        Args:
            cni: makes what gives pods of this node their interfaces; without it, they get plain veth pairs.

        Raises:
            DemoError: a command failed; says which.
            PermissionRefusedError: this process may not make network namespaces.
        """
        everyone = ("wire", "node", *PEERS, *FIRST_PODS, *(heir for _, heir in HEIRS.values()))
        for name in everyone:
            self._make(name)
        self._link_all()
        for name in PEERS:
            peers.install(self.spaces[name], witness=name == "other")
        for name, plan in _PLANS.items():
            _batch(self.spaces[name], dedent(plan).format(vxlan=VXLAN_PORT))
        for family in FAMILIES:  # answers of the remote pod's second address go back through the overlay
            rule = ["rule", "add", "from", ADDRESSES[family]["remote-overlay"], "table", "100"]
            self.spaces["other"].run(["ip", f"-{family}", *rule])
        node = self.spaces["node"]
        node.run(["iptables-legacy-restore", "-w"], nat_rules(4))
        node.run(["ip6tables-legacy-restore", "-w"], nat_rules(6))
        self._cni = cni(node) if cni else None
        for pod in PODS:
            peers.install(self.spaces[pod], witness=True)
            if self._cni is None:
                self._connect(pod)
        for pod in FIRST_PODS:
            self.give_addresses(pod)

    def give_addresses(self, pod: str) -> None:
        """Put a pod's addresses on its interface, its default routes behind them, and the node's routes to it."""
        if self._cni:
            self._cni.add(pod, self.spaces[pod])
            return
        v4, v6 = ADDRESSES[4][pod], ADDRESSES[6][pod]
        bridge4, bridge6 = ADDRESSES[4]["node-bridge"], ADDRESSES[6]["node-bridge"]
        _batch(
            self.spaces[pod],
            f"addr add {v4}/32 dev eth0\naddr add {v6}/128 dev eth0 nodad\n"
            f"route add {bridge4} dev eth0\nroute add default via {bridge4} dev eth0\n"
            f"route add {bridge6} dev eth0\nroute add default via {bridge6} dev eth0\n",
        )
        _batch(self.spaces["node"], f"route replace {v4} dev v-{pod}\nroute replace {v6} dev v-{pod}\n")

    def unplug(self, pod: str) -> None:
        """A pod dies: its link is taken away, with its addresses."""
        if self._cni:
            self._cni.delete(pod, self.spaces[pod])
        else:
            self.spaces["node"].run(["ip", "link", "del", f"v-{pod}"])

    def bury(self, pod: str) -> None:
        """The namespace of a pod that died goes away, and what was counted in it."""
        self.spaces.pop(pod).close()

    def node_addresses(self) -> frozenset[str]:
        """Every address that the node has right now, link-local ones included, as `ip` spells them."""
        links = json.loads(self.spaces["node"].run(["ip", "-j", "addr", "show"]))
        return frozenset(str(entry["local"]) for link in links for entry in link["addr_info"])

    def close(self) -> None:
        """Let all namespaces go."""
        for space in self.spaces.values():
            space.close()
        self.spaces.clear()

    def _make(self, name: str) -> None:
        space = self.spaces[name] = Namespace(name)
        for key, value in _QUIET.items():
            for scope in ("all", "default"):
                space.sysctl(key.format(scope), value)
        space.run(["ip", "link", "set", "lo", "up"])
        if name in ("node", "other", "gateway"):
            _set(space, _FORWARDING)
        if name == "node":
            space.sysctl("ipv4/conf/all/route_localnet", 1)  # 127.0.0.1:hostPort, as the portmap plugin wants it
        if name == "wire":
            _set(space, {"ipv6/conf/all/disable_ipv6": 1, "ipv6/conf/default/disable_ipv6": 1})

    def _link_all(self) -> None:
        """The cables: node, other node and gateway meet on one bridge; the rest hangs off other node and gateway."""
        ports = "".join(
            f"link add p-{name} type veth peer name eth0 netns {self.spaces[name].path}\n"
            f"link set p-{name} master br0 up\n"
            for name in ("node", "other", "gateway")
        )
        _batch(self.spaces["wire"], dedent(_WIRE) + ports)
        for near, far in (("other", "remote"), ("gateway", "private"), ("gateway", "internet")):
            _batch(self.spaces[near], f"link add to-{far} type veth peer name eth0 netns {self.spaces[far].path}\n")

    def _connect(self, pod: str) -> None:
        """A pod's cable, without its address. The pod's end comes up first, so that it sees the node's first packet."""
        node, space = self.spaces["node"], self.spaces[pod]
        _batch(node, f"link add v-{pod} type veth peer name eth0 netns {space.path}\n")
        _batch(space, "link set eth0 up\n")
        _batch(
            node,
            f"addr add {ADDRESSES[4]['node-bridge']}/32 dev v-{pod}\n"
            f"addr add {ADDRESSES[6]['node-bridge']}/128 dev v-{pod} nodad\n"
            f"link set v-{pod} up\n",
        )


def _batch(space: Namespace, lines: str) -> None:
    space.run(["ip", "-batch", "-"], lines)


def _set(space: Namespace, values: dict[str, int]) -> None:
    for key, value in values.items():
        space.sysctl(key, value)
