"""The facts for the choice of a datapath, read from the real kernel; and what looking leaves there: nothing."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import support
from support import Netns, sh

from netacct import choosing, config
from netacct.config import Config
from netacct.errors import DatapathError, MissingFeatureError
from netacct.kernel import detect, detect_look, iptables, modules
from netacct.kernel.detect import IPTABLES, NFTABLES, OTHER, Backend, Facts
from netacct.kernel.netlink import Netlink, NetlinkError

pytestmark = pytest.mark.kernel

_NAMES = [Path("/proc/thread-self/net") / name for name in ("ip_tables_names", "ip6_tables_names")]


def legacy_tables() -> list[str]:
    """The legacy tables of this namespace."""
    return [name for path in _NAMES for name in path.read_text(encoding="ascii").split()]


def settings(folder: Path, text: str = "datapath: auto") -> Config:
    """A configuration."""
    (folder / "netacct.yaml").write_text(text, encoding="utf-8")
    return config.load(str(folder / "netacct.yaml"))


def test_a_clean_namespace_has_nothing_and_keeps_it(netns: Netns) -> None:
    """Looking finds nothing in an empty namespace, and makes no legacy table and no nftables table there."""
    assert detect_look.look() == Facts()
    assert not detect_look.ours(IPTABLES)
    assert not detect_look.ours(NFTABLES)
    assert legacy_tables() == []
    assert sh("nft list tables") == ""
    assert netns.run(legacy_tables) == []


@pytest.mark.parametrize("tool", ["iptables", "ip6tables"])
@pytest.mark.parametrize("chain", ["KUBE-IPTABLES-HINT", "KUBE-KUBELET-CANARY"])
def test_the_kubelets_chains_are_found_in_each_backend(netns: Netns, tool: str, chain: str) -> None:
    """A hint of either name in table mangle of either family decides for its backend, and nft's wins over legacy's."""
    assert netns
    sh(f"{tool}-legacy -t mangle -N {chain}")
    facts = detect_look.look()
    assert facts == Facts(iptables=Backend(kubelet=(f"{chain} in legacy tables",)), mangle=True)
    assert detect.choose(facts).name == IPTABLES
    sh(f"{tool}-nft -t mangle -N {chain}")
    facts = detect_look.look()
    assert facts.nftables == Backend(kubelet=(f"{chain} in iptables-nft",))
    assert detect.choose(facts).name == NFTABLES


def test_chains_of_other_tables_are_no_hints(netns: Netns) -> None:
    """A chain of the kubelet's name outside of table mangle, as people make for tests, decides nothing."""
    assert netns
    sh("iptables-legacy -t filter -N KUBE-KUBELET-CANARY", "iptables-nft -t nat -N KUBE-IPTABLES-HINT")
    sh("nft add table inet mangle", "nft add chain inet mangle KUBE-IPTABLES-HINT")
    assert not detect_look.look().hinted()


def test_a_native_expression_hides_nothing(netns: Netns) -> None:
    """Where a native rule in `ip mangle` makes iptables-nft-save show nothing, the kubelet's chain is found still."""
    assert netns
    sh(
        "iptables-nft -t mangle -N KUBE-KUBELET-CANARY",
        "nft add rule ip mangle KUBE-KUBELET-CANARY ct state new counter",
    )
    assert "KUBE" not in sh("iptables-nft-save -t mangle")
    assert detect.choose(detect_look.look()).name == NFTABLES


def test_kube_proxy_is_found_in_both_of_its_modes(netns: Netns) -> None:
    """kube-proxy tells by its canary in mode iptables, and by its own table in mode nftables."""
    assert netns
    sh("iptables-legacy -t mangle -N KUBE-PROXY-CANARY")
    assert detect_look.look().iptables.proxy == ("KUBE-PROXY-CANARY in legacy tables",)
    sh("nft add table ip kube-proxy", "nft add table ip6 kube-proxy")
    assert detect_look.look().nftables.proxy == ("table ip kube-proxy", "table ip6 kube-proxy")


def test_rules_of_others_are_counted_exactly(netns: Netns) -> None:
    """Rules are counted in all tables of both backends: without policies, ends of chains, native tables and ours."""
    assert netns
    sh(
        "iptables-legacy -N THEIRS",
        "iptables-legacy -N EMPTY",
        "iptables-legacy -A THEIRS -j ACCEPT",
        "iptables-legacy -A FORWARD -j THEIRS",
        "iptables-legacy -A FORWARD -p tcp -j REJECT",
        "ip6tables-legacy -t raw -A OUTPUT -j ACCEPT",
        "iptables-nft -N THEIRS",
        "iptables-nft -A FORWARD -j THEIRS",
        "ip6tables-nft -t nat -A POSTROUTING -j ACCEPT",
        "nft add table ip native",
        "nft 'add chain ip native c { type filter hook input priority 0; }'",
        "nft add rule ip native c accept",
    )
    facts = detect_look.look()
    assert (facts.iptables.rules, facts.nftables.rules) == (4, 2)
    for name in (IPTABLES, NFTABLES):
        datapath = choosing.open_datapath(name)
        datapath.install(support.plan())
        datapath.close()
    facts = detect_look.look()
    assert (facts.iptables.rules, facts.nftables.rules) == (4, 2)
    assert facts.iptables.ours
    assert facts.nftables.ours


@pytest.mark.parametrize("name", [IPTABLES, NFTABLES])
def test_what_is_installed_stays(netns: Netns, tmp_path: Path, name: str) -> None:
    """With no hint, `auto` opens the datapath that is installed, and without any the one that costs less there."""
    assert netns
    other = choosing.open_datapath(name)
    other.install(support.plan())
    other.close()
    choice, datapath = choosing.choose(settings(tmp_path))
    datapath.close()
    assert (choice.name, datapath.name) == (name, name)
    assert choosing.left_over(name) == []
    assert choosing.left_over(OTHER[name]) == [f"rules and counters of the datapath {name} are left over"]
    assert choosing.other_of(name)() is None


@pytest.mark.parametrize(
    "remains", ["ipset create nacc4-tx-internet hash:ip counters", "iptables-legacy -t mangle -N NETACCT-TX"]
)
def test_a_part_of_ours_is_ours(netns: Netns, remains: str) -> None:
    """A set or a chain alone, as a kill in the middle leaves it, is found as what the datapath left."""
    assert netns
    sh(remains)
    assert detect_look.ours(IPTABLES)


def test_names_like_ours_elsewhere_are_not_ours(netns: Netns) -> None:
    """Chains and sets that only begin as ours do, where we put none, are nobody's business: no removal would end."""
    assert netns
    sh("iptables-legacy -t filter -N NETACCT-TX", "ipset create nacc4-mine hash:ip", "nft add table inet netacct")
    assert not detect_look.ours(IPTABLES)
    assert not detect_look.ours(NFTABLES)


def test_a_missing_library_makes_auto_choose_nftables(
    netns: Netns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a legacy node without python-iptables' libraries `auto` takes nftables and says why; a name is refused."""
    assert netns
    sh("iptables-legacy -t mangle -N KUBE-KUBELET-CANARY")
    monkeypatch.setattr(iptables, "_load_iptc", _broken)
    choice, datapath = choosing.choose(settings(tmp_path))
    datapath.close()
    assert datapath.name == NFTABLES
    assert choice.reason == "iptables cannot be had: libxtables is missing"
    with pytest.raises(MissingFeatureError, match="libxtables"):
        choosing.choose(settings(tmp_path, "datapath: iptables"))


def _broken() -> None:
    raise MissingFeatureError("libxtables is missing")


def test_blind_platforms_are_refused_before_anything_is_installed(netns: Netns, tmp_path: Path) -> None:
    """On a node of OVN-Kubernetes `auto` refuses, a named datapath does not, nor does taking rules away."""
    netns.sh("ip link add br-int type bridge", "ip link add ovn-k8s-mp0 type bridge")
    with pytest.raises(DatapathError, match="Open vSwitch"):
        choosing.choose(settings(tmp_path))
    for text in ("datapath: nftables", "enabled: false"):
        choice, datapath = choosing.choose(settings(tmp_path, text))
        datapath.close()
        assert choice.facts.obstacles
    assert legacy_tables() == []


def test_a_hidden_module_tree_tells_nothing(tmp_path: Path) -> None:
    """Where a unit hides /lib/modules from a root without CAP_DAC_OVERRIDE, nothing is certain and nothing fails."""
    tree = tmp_path / "lib/modules"
    (tree / os.uname().release).mkdir(parents=True)
    tree.chmod(0)  # as ProtectKernelModules=yes shows it
    look = f"from pathlib import Path; from netacct.kernel import modules; print(modules.look(Path({str(tmp_path)!r})))"
    confined = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search", sys.executable, "-c", look]
    done = subprocess.run(confined, capture_output=True, text=True, check=False)
    assert "builtin=None, installed=None, config=None" in done.stdout, done.stderr


def test_a_kernel_without_ipset_counts_by_nftables(
    netns: Netns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where only asking tells that there is no ipset (a pod sees no /lib/modules), nftables is chosen, and works."""
    assert netns
    sh("iptables-legacy -t mangle -N KUBE-IPTABLES-HINT")
    dump = Netlink.dump

    def without_ipset(link: Netlink, kind: int, family: int, attributes: bytes) -> list[memoryview]:
        if kind >> 8 == 6:  # NFNL_SUBSYS_IPSET
            raise NetlinkError(errno.EINVAL)
        return dump(link, kind, family, attributes)

    monkeypatch.setattr(Netlink, "dump", without_ipset)
    monkeypatch.setattr(modules, "look", modules.Modules)
    assert not detect_look.ours(IPTABLES)
    choice, datapath = choosing.choose(settings(tmp_path))
    datapath.close()
    assert (choice.name, choice.reason) == (NFTABLES, "iptables cannot be had: this kernel has no ip_set")
    assert choosing.left_over(NFTABLES) == []


def test_without_the_right_to_read_legacy_tables_it_says_so(netns: Netns) -> None:
    """Where legacy tables exist, a process without CAP_NET_RAW cannot choose, and the error names the capability."""
    assert netns
    look = "from netacct.kernel import detect_look; print(detect_look.look().mangle)"
    confined = ["setpriv", "--bounding-set", "-net_raw", sys.executable, "-c", look]
    done = subprocess.run(confined, capture_output=True, text=True, check=False)
    assert done.stdout == "False\n", done.stderr
    sh("iptables-legacy -t mangle -S")
    done = subprocess.run(confined, capture_output=True, text=True, check=False)
    assert "PermissionRefusedError: reading the iptables table mangle needs CAP_NET_ADMIN, CAP_NET_RAW" in done.stderr


def test_who_is_not_root_may_not_know_which_tables_exist(netns: Netns) -> None:
    """Capabilities do not open the kernel's list of legacy tables (0440): the error of permission names it."""
    assert netns
    sh("iptables-legacy -t mangle -S")
    # asked twice, because what is imported late may lie where only root can read
    setup = "import os; from netacct.kernel import marks, marks_xtables\n"
    again = "print({0}); os.setgroups([]); os.setresgid(*[65534] * 3); os.setresuid(*[65534] * 3); print({0})"
    look = [sys.executable, "-c", setup + again.format("marks_xtables.tables(marks_xtables.KINDS[0])")]
    done = subprocess.run(look, capture_output=True, text=True, check=False)
    assert done.stdout == "['mangle']\n"
    assert "PermissionRefusedError: /proc/thread-self/net/ip_tables_names: only root may read it" in done.stderr
    decide = [sys.executable, "-c", setup + again.format("marks.resolve('auto', 31).reason")]
    done = subprocess.run(decide, capture_output=True, text=True, check=False)
    assert "could not be looked at: " in done.stdout
    assert "only root may read it" in done.stdout.splitlines()[1]
