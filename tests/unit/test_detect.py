"""The choice of a datapath, on facts of the platforms that matter."""

from __future__ import annotations

import pytest

from netacct.errors import DatapathError, MissingFeatureError
from netacct.kernel.detect import DATAPATHS, IPTABLES, NFTABLES, Backend, Facts, choose, decide, require_sight

CANARY = ("KUBE-KUBELET-CANARY in legacy tables",)
NFT_CANARY = ("KUBE-IPTABLES-HINT in iptables-nft", "KUBE-KUBELET-CANARY in iptables-nft")
PROXY = ("KUBE-PROXY-CANARY in legacy tables",)
NO_LEGACY = {IPTABLES: "this kernel has no ip_tables, ip6_tables"}
NO_NFT = {NFTABLES: "this kernel has no nf_tables"}
NO_LIBRARY = {IPTABLES: "python-iptables does not load (libxtables, libip4tc, libip6tc?)"}

PLATFORMS = {
    "bare kernel": (Facts(), NFTABLES, "without a legacy table mangle"),
    "bare kernel where somebody once made a legacy mangle table": (Facts(mangle=True), IPTABLES, "hooks cost already"),
    "kubeadm on Debian 12: iptables-nft": (Facts(nftables=Backend(kubelet=NFT_CANARY)), NFTABLES, "KUBE-IPTABLES-HINT"),
    "AKS on Ubuntu, EKS on Amazon Linux 2: legacy": (
        Facts(iptables=Backend(kubelet=CANARY, proxy=PROXY), mangle=True),
        IPTABLES,
        "the kubelet keeps KUBE-KUBELET-CANARY in legacy tables",
    ),
    "B04: iptables-nft host on which something made an empty legacy table": (
        Facts(nftables=Backend(kubelet=NFT_CANARY), mangle=True),
        NFTABLES,
        "the kubelet keeps",
    ),
    "B72: a node switched to nft that still has all of its legacy rules": (
        Facts(iptables=Backend(kubelet=CANARY, rules=9000), nftables=Backend(kubelet=NFT_CANARY), mangle=True),
        NFTABLES,
        "the kubelet keeps",
    ),
    "B72: Docker in legacy tables beside a kubelet on nft": (
        Facts(iptables=Backend(rules=40), nftables=Backend(kubelet=NFT_CANARY, rules=3), mangle=True),
        NFTABLES,
        "the kubelet keeps",
    ),
    "B79: EL10, a kernel without legacy tables": (
        Facts(nftables=Backend(kubelet=NFT_CANARY), unusable=NO_LEGACY),
        NFTABLES,
        "iptables cannot be had: this kernel has no ip_tables",
    ),
    "a kernel without nf_tables": (Facts(unusable=NO_NFT), IPTABLES, "nftables cannot be had"),
    "legacy node on which python-iptables' libraries are missing": (
        Facts(iptables=Backend(kubelet=CANARY), mangle=True, unusable=NO_LIBRARY),
        NFTABLES,
        "python-iptables does not load",
    ),
    "kube-proxy in mode nftables, kubelet without hints": (
        Facts(nftables=Backend(proxy=("table ip kube-proxy",)), mangle=True),
        NFTABLES,
        "kube-proxy keeps table ip kube-proxy",
    ),
    "kube-proxy in legacy tables, kubelet in a container with nft": (
        Facts(iptables=Backend(proxy=PROXY), nftables=Backend(kubelet=NFT_CANARY)),
        NFTABLES,
        "the kubelet keeps",
    ),
    "kube-proxy alone, in legacy tables": (Facts(iptables=Backend(proxy=PROXY)), IPTABLES, "kube-proxy keeps"),
    "Kubernetes before 1.17, or Docker, in legacy tables": (
        Facts(iptables=Backend(rules=40), nftables=Backend(rules=2), mangle=True),
        IPTABLES,
        "40 rules in legacy tables and 2",
    ),
    "Docker with iptables-nft": (Facts(nftables=Backend(rules=40), mangle=True), NFTABLES, "40 rules in tables of ipt"),
    "as many rules in both": (Facts(iptables=Backend(rules=9), nftables=Backend(rules=9)), NFTABLES, "9 rules"),
    "ours in legacy tables, nothing else": (Facts(iptables=Backend(ours=True), mangle=True), IPTABLES, "is installed"),
    "ours in nftables, and a legacy mangle table came": (
        Facts(nftables=Backend(ours=True), mangle=True),
        NFTABLES,
        "is installed",
    ),
    "ours in nftables, and others' rules came in legacy tables": (
        Facts(iptables=Backend(rules=40), nftables=Backend(ours=True), mangle=True),
        NFTABLES,
        "is installed",
    ),
    "ours in nftables, and then the kubelet came, in legacy tables": (
        Facts(iptables=Backend(kubelet=CANARY), nftables=Backend(ours=True), mangle=True),
        IPTABLES,
        "the kubelet keeps",
    ),
    "ours in both": (Facts(iptables=Backend(ours=True), nftables=Backend(ours=True)), NFTABLES, "nobody has rules"),
}


@pytest.mark.parametrize("platform", PLATFORMS)
def test_each_platform_gets_its_datapath(platform: str) -> None:
    """On each of these platforms `auto` gives this datapath, with this reason, and the facts that it rests on."""
    facts, name, reason = PLATFORMS[platform]
    choice = choose(facts)
    assert (choice.name, choice.facts) == (name, facts)
    assert reason in choice.reason
    assert decide("auto", facts) == choice


@pytest.mark.parametrize("platform", PLATFORMS)
def test_what_was_chosen_is_chosen_again(platform: str) -> None:
    """Once it is installed, and the other gone, a choice is made again for the same facts: nothing flaps."""
    facts, name, _ = PLATFORMS[platform]
    mine = {one: Backend(*_but_ours(facts.backend(one), ours=one == name)) for one in DATAPATHS}
    after = Facts(mine[IPTABLES], mine[NFTABLES], facts.mangle or name == IPTABLES, facts.unusable)
    assert choose(after).name == name


def _but_ours(backend: Backend, *, ours: bool) -> tuple[tuple[str, ...], tuple[str, ...], bool, int]:
    return backend.kubelet, backend.proxy, ours, backend.rules


def test_where_neither_can_be_had_both_reasons_are_given() -> None:
    """Without legacy tables and without nf_tables the error names what each of the datapaths misses."""
    with pytest.raises(MissingFeatureError, match=r"iptables: .*no ip_tables.*nftables: .*no nf_tables"):
        choose(Facts(unusable=NO_LEGACY | NO_NFT))


@pytest.mark.parametrize("name", DATAPATHS)
def test_a_named_datapath_is_taken_against_all_signs(name: str) -> None:
    """What the configuration names is chosen, whatever the facts say, obstacles and missing modules included."""
    facts = Facts(unusable=NO_LEGACY | NO_NFT, obstacles=("Cilium routes past netfilter",))
    choice = decide(name, facts)
    assert (choice.name, choice.reason) == (name, "the configuration says so")
    require_sight(name, choice)


def test_auto_refuses_where_netfilter_is_blind() -> None:
    """With an obstacle `auto` refuses with the reason, and tells which setting installs rules nevertheless."""
    choice = choose(Facts(obstacles=("Cilium routes past netfilter", "OVN-Kubernetes too")))
    with pytest.raises(DatapathError, match=r"Cilium routes past netfilter; OVN.*datapath: nftables"):
        require_sight("auto", choice)


def test_without_obstacles_nothing_is_refused() -> None:
    """On a normal node `auto` is not refused."""
    chosen = choose(Facts())
    require_sight("auto", chosen)
    assert chosen == choose(Facts())


def test_any_hint_spares_the_counting_of_rules() -> None:
    """Facts are hinted with a chain of kubelet or kube-proxy in either backend, and with ours alone they are not."""
    assert Facts(iptables=Backend(proxy=PROXY)).hinted()
    assert Facts(nftables=Backend(kubelet=NFT_CANARY)).hinted()
    assert not Facts(iptables=Backend(ours=True), nftables=Backend(ours=True), mangle=True).hinted()
