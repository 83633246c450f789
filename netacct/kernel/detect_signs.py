"""Signs of platforms where netfilter on the host is blind or forbidden. Looks at names of interfaces and a few files.

* Cilium with BPF host routing takes packets of pods from interface to interface in eBPF; with `legacy` routing they
  pass netfilter. Its agent writes which one is in force to its state directory: EnableHostLegacyRouting in
  agent-runtime-config.json (pkg/option/config.go), ENABLE_HOST_ROUTING in globals/node_config.h
  (pkg/datapath/linux/config/config.go). Azure CNI powered by Cilium, and GKE's Dataplane V2, are Cilium too.
* Azure's iptables blocker, which comes with eBPF host routing on AKS, refuses rules by an LSM program; it pins its
  links below /sys/fs/bpf/block-iptables (Azure/azure-container-networking, bpf-prog/azure-block-iptables).
* OVN-Kubernetes forwards pods' packets in Open vSwitch (br-int); the host sees those only that go through its
  management port ovn-k8s-mp0.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

_CILIUM = ("cilium_host", "cilium_net")
_OVN_PORT, _OVN_BRIDGE = "ovn-k8s-mp0", "br-int"
_CILIUM_STATE = ("run/cilium/state", "var/run/cilium/state")
_LEGACY = re.compile(r'"EnableHostLegacyRouting"\s*:\s*(true|false)')
_DEFINED = re.compile(r"^#define ENABLE_HOST_ROUTING\b", re.MULTILINE)
_BLOCKER = "sys/fs/bpf/block-iptables"
_BLOCKS = ("iptables_legacy_block", "iptables_nftables_block")


def obstacles(links: Collection[str] | None = None, root: Path = Path("/")) -> tuple[str, ...]:
    """Why host netfilter would see little here or is forbidden, one sentence for each reason.

    Args:
        links: the names of interfaces; None for those of this thread's network namespace.
        root: where /run, /var and /sys begin.
    """
    names = [name for _, name in socket.if_nameindex()] if links is None else links
    return tuple(found for check in (_blocker(root), _cilium(names, root), _ovn(names)) for found in check)


def _blocker(root: Path) -> Iterator[str]:
    # os.path: where it may not look (root of a user namespace), Path.exists raises
    if pinned := [name for name in _BLOCKS if os.path.exists(root / _BLOCKER / name)]:  # noqa: PTH110
        yield f"Azure's iptables blocker forbids rules (/{_BLOCKER}/{pinned[0]} is there)"


def _cilium(links: Collection[str], root: Path) -> Iterator[str]:
    found = [name for name in _CILIUM if name in links]
    if not found:
        return
    routing = _host_routing(root)
    if routing is None:
        yield (
            f"Cilium is here (interface {found[0]}), and neither {' nor '.join(f'/{one}' for one in _CILIUM_STATE)} "
            "tells whether it routes in eBPF past netfilter"
        )
    elif routing:
        yield f"Cilium routes packets of pods in eBPF, past netfilter (interface {found[0]}; {routing})"


def _host_routing(root: Path) -> str | None:
    """Where it says that Cilium routes in eBPF; "" where it says that it does not, None where nothing tells."""
    for state in _CILIUM_STATE:
        if (said := _LEGACY.search(_text(root / state / "agent-runtime-config.json"))) is not None:
            return "" if said[1] == "true" else f"EnableHostLegacyRouting is false in /{state}"
        if header := _text(root / state / "globals/node_config.h"):
            return f"ENABLE_HOST_ROUTING is set in /{state}" if _DEFINED.search(header) else ""
    return None


def _ovn(links: Iterable[str]) -> Iterator[str]:
    names = sorted(links)
    port = next((name for name in names if name.startswith(_OVN_PORT)), "")
    if port and _OVN_BRIDGE in names:
        yield f"OVN-Kubernetes forwards packets of pods in Open vSwitch (interfaces {port}, {_OVN_BRIDGE})"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
