"""Platforms on which host netfilter is blind or forbidden, told by interfaces and files as they leave them."""

from __future__ import annotations

from pathlib import Path

import pytest

from netacct.kernel import modules
from netacct.kernel.detect_signs import obstacles
from netacct.kernel.modules import NEEDED, Modules

CILIUM = ("lo", "eth0", "cilium_net", "cilium_host", "lxc1a2b3c4d5e6f")
STATE = "run/cilium/state"
RUNTIME = f"{STATE}/agent-runtime-config.json"
HEADER = f"{STATE}/globals/node_config.h"


def write(root: Path, name: str, text: str = "") -> None:
    """A file below the root."""
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    "text",
    [
        '{"EnableIPv4": true, "EnableHostLegacyRouting": false, "EnableIPMasqAgent": false}',
        '{\n  "UnsafeDaemonConfigOption": {\n    "EnableHostLegacyRouting": false\n  }\n}',
    ],
)
def test_cilium_with_bpf_host_routing_is_an_obstacle(tmp_path: Path, text: str) -> None:
    """Where Cilium's agent runs with BPF host routing the obstacle names interface and source, in both JSON forms."""
    write(tmp_path, RUNTIME, text)
    (found,) = obstacles(CILIUM, tmp_path)
    assert "past netfilter (interface cilium_host; EnableHostLegacyRouting is false in /run/cilium/state)" in found


def test_cilium_through_the_host_stack_is_none(tmp_path: Path) -> None:
    """With legacy host routing (beside kube-proxy, on AKS without eBPF host routing) nothing is refused."""
    write(tmp_path, RUNTIME, '{"EnableHostLegacyRouting": true}')
    write(tmp_path, HEADER, "#define ENABLE_HOST_ROUTING 1\n")
    assert obstacles(CILIUM, tmp_path) == ()


@pytest.mark.parametrize(
    ("text", "blind"), [("#define ENABLE_HOST_ROUTING 1\n", True), ("#define ENABLE_IPV4 1\n", False)]
)
def test_the_datapath_header_tells_where_the_configuration_does_not(tmp_path: Path, text: str, *, blind: bool) -> None:
    """An older Cilium is judged by the macro in node_config.h, below /var/run as well."""
    write(tmp_path, "var/" + HEADER, "/* node */\n" + text)
    assert bool(obstacles(CILIUM, tmp_path)) == blind


def test_cilium_of_which_nothing_is_known_is_an_obstacle(tmp_path: Path) -> None:
    """Where neither file can be read, that is said instead of guessed."""
    (found,) = obstacles(("lo", "cilium_net"), tmp_path)
    assert found.startswith("Cilium is here (interface cilium_net), and neither /run/cilium/state nor")


def test_files_of_cilium_without_its_interfaces_are_nothing(tmp_path: Path) -> None:
    """What an uninstalled Cilium left in /run is no obstacle."""
    write(tmp_path, RUNTIME, '{"EnableHostLegacyRouting": false}')
    assert obstacles(("lo", "eth0", "cni0"), tmp_path) == ()


@pytest.mark.parametrize("name", ["iptables_legacy_block", "iptables_nftables_block"])
def test_azures_iptables_blocker_is_an_obstacle(tmp_path: Path, name: str) -> None:
    """Where the LSM programs of AKS' eBPF host routing are pinned, rules are forbidden."""
    write(tmp_path, f"sys/fs/bpf/block-iptables/{name}")
    assert obstacles(("lo", "eth0"), tmp_path) == (
        f"Azure's iptables blocker forbids rules (/sys/fs/bpf/block-iptables/{name} is there)",
    )


def test_azures_event_map_alone_is_none(tmp_path: Path) -> None:
    """A blocker that was detached leaves its directory, perhaps its map, and forbids nothing."""
    write(tmp_path, "sys/fs/bpf/block-iptables/iptables_block_event_counter")
    assert obstacles(("lo", "eth0"), tmp_path) == ()


@pytest.mark.parametrize("port", ["ovn-k8s-mp0", "ovn-k8s-mp0_0"])
def test_ovn_kubernetes_is_an_obstacle(tmp_path: Path, port: str) -> None:
    """The management port of OVN-Kubernetes beside its integration bridge tells it, also the one of a DPU."""
    (found,) = obstacles(("lo", "br-ex", "ovs-system", port, "br-int", "genev_sys_6081"), tmp_path)
    assert found == f"OVN-Kubernetes forwards packets of pods in Open vSwitch (interfaces {port}, br-int)"


@pytest.mark.parametrize("links", [("lo", "br-int", "eth0"), ("lo", "eth0", "cni0", "flannel.1", "caliabc", "azv1")])
def test_other_nodes_have_no_obstacle(tmp_path: Path, links: tuple[str, ...]) -> None:
    """OpenStack's br-int alone, flannel, Calico and Azure's transparent CNI are none."""
    assert obstacles(links, tmp_path) == ()


def test_a_sleeping_module_is_told_from_a_built_in_one() -> None:
    """A module on disk that is not loaded sleeps; one that is active, built in, or not known of does not."""
    dep = modules.module_names("kernel/net/netfilter/nf_tables.ko.zst: kernel/lib/libcrc32c.ko.zst\n")
    assert Modules(installed=dep, builtin=frozenset()).sleeps("nf_tables")
    assert Modules(installed=frozenset(), builtin=frozenset()).sleeps("nf_tables")
    assert Modules(config={"IP_SET": "y"}).sleeps("nf_tables")
    assert not Modules(installed=dep, active=frozenset(("nf_tables",))).sleeps("nf_tables")
    assert not Modules(installed=frozenset(), builtin=dep).sleeps("nf_tables")
    assert not Modules(config={"NF_TABLES": "y"}).sleeps("nf_tables")
    assert not Modules().sleeps("nf_tables")


def test_a_kernel_that_lacks_something_is_told_by_its_files() -> None:
    """A module is lacking only where a list of modules, or the configuration, is there and does not have it."""
    for name in (*NEEDED["iptables"], *NEEDED["nftables"]):
        assert Modules(installed=frozenset(), builtin=frozenset()).lacks(name)
        assert not Modules(installed=frozenset((name,))).lacks(name)
        assert not Modules().lacks(name)
