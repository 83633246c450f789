"""What can stand in a packet's way: nothing, what Kubernetes leaves, netacct in its forms, and the naive design."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import bench_product
from bench_lane import GATEWAY, NODE, Lane
from bench_product import Setup

LOCAL_24, LOCAL_20 = "10.244.1.0/24", "10.244.0.0/20"

# The rule makes the kernel track connections; nothing jumps to its chain, so no packet meets it.
KUBERNETES = """*filter
:KUBE-FORWARD - [0:0]
-A KUBE-FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
COMMIT
*nat
COMMIT
*mangle
COMMIT
"""

EMPTY_MANGLE = "*mangle\nCOMMIT\n"

POLICY = """classes:
  pod: {{cidrs: [10.244.0.0/16]}}
  node: {{cidrs: [192.168.50.0/24]}}
  service: {{cidrs: [10.96.0.0/12]}}
  private: {{builtin: private}}
{more}default: internet
marks: {{mask: 0x0000001f, values: {{pod: 1, node: 2, service: 3, private: 4, internet: 5}}}}
"""


@dataclass(frozen=True, slots=True)
class Variant:
    """How a node is dressed.

    tables: iptables-restore text, loaded first.
    setup:  what netacct is told to count; None for a node without it.
    host:   whether netacct's rules for the host's own packets stay.
    local:  the CIDR of the addresses that live on the node.
    """

    name: str
    tables: str = ""
    setup: Setup | None = None
    host: bool = True
    local: str = LOCAL_24

    def dress(self) -> Lane:
        """A lane with the variant on its node."""
        lane = Lane([self.local])
        if self.tables:
            lane.node.run("iptables-legacy-restore", text=self.tables)
        if self.setup:
            bench_product.install(lane.node, self.setup)
            if not self.host:
                _unhook_host(lane)
        return lane


def make_variants(
    folder: Path, cidrs: Sequence[ipaddress.IPv4Network], more: Sequence[ipaddress.IPv4Network]
) -> dict[str, Variant]:
    """All variants by name; policies go to `folder`. `cidrs` are those of class `cloud`, `more` those for nftables."""
    few = write_policy(folder / "few.yaml")
    many, most = write_policy(folder / "many.yaml", cidrs), write_policy(folder / "most.yaml", more)
    plain = _setup(few)
    marked = Setup(few, plain.local, plain.own, marks=True)
    nft = replace(plain, datapath="nftables")
    variants = (
        Variant("bare"),
        Variant("empty mangle table", EMPTY_MANGLE),
        Variant("netacct", "", plain),
        Variant("netacct, marks", "", marked),
        Variant("netacct, pods only", "", plain, host=False),
        Variant("kubernetes", KUBERNETES),
        Variant("kubernetes + netacct", KUBERNETES, plain),
        Variant("kubernetes + netacct, marks", KUBERNETES, marked),
        Variant("netacct, 4,096 addresses", "", _setup(few, LOCAL_20), local=LOCAL_20),
        Variant("bare, 4,096 addresses", local=LOCAL_20),
        Variant(f"netacct, {len(cidrs):,} CIDRs", "", _setup(many)),
        Variant("netacct, nftables", "", nft),
        Variant("netacct, nftables, marks", "", replace(marked, datapath="nftables")),
        Variant("netacct, nftables, host pods", "", replace(nft, host_pods=True)),
        Variant("kubernetes + netacct, nftables", KUBERNETES, nft),
        Variant(
            "netacct, nftables, 4,096 addresses",
            "",
            replace(nft, local=[LOCAL_20]),
            local=LOCAL_20,
        ),
        Variant(f"netacct, nftables, {len(more):,} CIDRs", "", replace(nft, policy=most)),
        Variant("naive, 110 pods", naive(110)),
        Variant("naive, 250 pods", naive(250)),
    )
    return {variant.name: variant for variant in variants}


def write_policy(path: Path, cidrs: Sequence[ipaddress.IPv4Network] = ()) -> Path:
    """Write the policy of the bench, with a class `cloud` of these CIDRs where there are any; returns its path."""
    listing = ", ".join(map(str, cidrs))
    path.write_text(POLICY.format(more=f"  cloud: {{cidrs: [{listing}]}}\n" if cidrs else ""))
    return path


def naive(pods: int) -> str:
    """The naive design: four rules for each pod, which count it in and out, inside and outside of the cluster."""
    first = ipaddress.ip_address("10.244.1.2")
    lines = ["*mangle"]
    for address in (first + i for i in range(pods)):
        lines += [
            f"-A FORWARD -s {address} -d 10.0.0.0/8",
            f"-A FORWARD -s {address} ! -d 10.0.0.0/8",
            f"-A FORWARD -d {address} -s 10.0.0.0/8",
            f"-A FORWARD -d {address} ! -s 10.0.0.0/8",
        ]
    return "\n".join([*lines, "COMMIT", ""])


def _setup(policy: Path, local: str = LOCAL_24) -> Setup:
    return Setup(policy, [local], [NODE, GATEWAY])


def _unhook_host(lane: Lane) -> None:
    """Take away netacct's jumps for the host's own packets, as if it counted pods alone."""
    removed = 0
    for hook in ("INPUT", "OUTPUT"):
        for line in lane.node.run("iptables-legacy", "-t", "mangle", "-S", hook).splitlines():
            if line.startswith("-A ") and f"-s {LOCAL_24} " not in line:
                lane.node.run("iptables-legacy", "-t", "mangle", "-D", *line.split()[1:])
                removed += 1
    if not removed:
        raise RuntimeError("netacct has no rules for the host that could be taken away: nothing to compare")
