"""The doctor in namespaces with real faults in them: each is found by its name, and nothing else is."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import support

from netacct import config, desired
from netacct.cli import main
from netacct.control import LOCK, SOCKET, ask
from netacct.doctor import checks, gather
from netacct.doctor.facts import Facts
from netacct.doctor.finding import Finding
from netacct.doctor.look import process as looking
from netacct.doctor.look import saved
from netacct.doctor.look.process import flock_on
from netacct.errors import NetacctError
from netacct.identity.host_pods import tree_root
from netacct.kernel.detect import DATAPATHS
from netacct.kernel.iptables import IptablesDatapath
from netacct.kernel.nftables import NftablesDatapath

pytestmark = pytest.mark.kernel

NETACCT = str(Path(sys.executable).parent / "netacct")

POLICY = """
classes:
  pod: {cidrs: [10.244.0.0/16]}
  node: {cidrs: [192.168.50.0/24]}
  service: {cidrs: [10.96.0.0/12]}
default: internet
marks: {mask: 0x1f, values: {pod: 1}}
"""


@pytest.fixture
def settings(tmp_path: Path) -> str:
    """A configuration without a fault, with directories of the test's own."""
    (tmp_path / "policy.yaml").write_text(POLICY)
    path = tmp_path / "netacct.yaml"
    path.write_text(
        f"policy: {tmp_path}/policy.yaml\nlocal_ranges: [10.244.1.0/28]\nstate_dir: {tmp_path}/state\n"
        f"accounts_dir: {tmp_path}/accounts\nidentity: {{file: {{path: {tmp_path}/pods.yaml}}}}\n"
        "web: {listen_address: ['127.0.0.1:19112']}\ndatapath: iptables\n"
    )
    return str(path)


def examine(path: str) -> list[Finding]:
    """What the doctor finds in this thread's namespace, but for which datapath counts: that is said of each node."""
    return [item for item in checks.examine(gather.gather(path)) if item.name != "datapath-chosen"]


def names(path: str) -> list[str]:
    """The names alone."""
    return [item.name for item in examine(path)]


def install(path: str) -> None:
    """Put netacct's rules in place."""
    datapath = IptablesDatapath()
    datapath.install(desired.plan(config.load(path))[0])
    datapath.close()


@contextlib.contextmanager
def agent(path: str) -> Iterator[subprocess.Popen[bytes]]:
    """A running agent in this thread's namespace that has answered once."""
    process = subprocess.Popen([NETACCT, "run", "--config.file", path], stderr=subprocess.DEVNULL)
    state = Path(config.load(path).state_dir)

    def answers() -> bool:
        assert process.poll() is None
        try:
            return list(ask(state, "differences")) == []
        except NetacctError:
            return False

    try:
        support.eventually(answers)
        yield process
    finally:
        process.kill()
        process.wait()


def tables() -> str:
    """The legacy tables that exist in this thread's namespace."""
    net = Path("/proc/thread-self/net")
    return (net / "ip_tables_names").read_text() + (net / "ip6_tables_names").read_text()


def test_a_clean_namespace_has_nothing_and_stays_as_it_is(netns: support.Netns, settings: str) -> None:
    """Nothing is found where nothing is wrong, and looking makes no legacy table and no directory."""
    del netns
    assert examine(settings) == []
    assert tables() == ""
    assert not Path(config.load(settings).state_dir).exists()


def test_nothing_is_found_where_netacct_was_never_set_up() -> None:
    """The command prints an empty list and exits with 0 in a new namespace without any file of netacct's."""
    if os.geteuid():
        pytest.skip("network namespaces need root")
    script = f"mount -t tmpfs none /run && exec {NETACCT} doctor -o json"
    done = subprocess.run(["unshare", "-nm", "sh", "-c", script], capture_output=True, check=False, timeout=60)
    assert (done.returncode, json.loads(done.stdout), done.stderr) == (0, [], b"")


@pytest.mark.parametrize("datapath", DATAPATHS)
def test_a_node_that_counts_has_nothing(node: support.Node, settings: str, datapath: str) -> None:
    """With an agent running and pods on veths nothing is found but which datapath counts, and why."""
    del node
    _set(settings, datapath)
    with agent(settings):
        assert examine(settings) == []
        (item,) = checks.examine(gather.gather(settings))
        assert (item.name, item.what) == ("datapath-chosen", f"{datapath} counts: the configuration says so")


def _set(settings: str, datapath: str) -> None:
    """Write another datapath into the configuration."""
    path = Path(settings)
    path.write_text(path.read_text().replace("datapath: iptables", f"datapath: {datapath}"))


def test_rules_of_nftables_are_verified_too(netns: support.Netns, settings: str) -> None:
    """Where nftables is installed and `auto` keeps it, a deleted chain's rules are found missing, and no agent."""
    del netns
    _set(settings, "auto")
    datapath = NftablesDatapath()
    datapath.install(desired.plan(config.load(settings))[0])
    datapath.close()
    assert names(settings) == ["rules-without-agent"]
    support.sh("nft flush table ip netacct")
    assert names(settings) == ["rules-not-in-place", "rules-without-agent"]


def test_a_hint_that_came_later_and_what_is_left_over_are_found(netns: support.Netns, settings: str) -> None:
    """It is said where `auto` would choose another datapath than the one that counts, and where both are there."""
    del netns
    install(settings)
    _set(settings, "auto")
    support.sh("iptables-nft -t mangle -N KUBE-IPTABLES-HINT")
    (item,) = [one for one in examine(settings) if one.name == "datapath-outdated"]
    assert item.what.startswith(
        "iptables counts, and nftables would be chosen now: the kubelet keeps KUBE-IPTABLES-HINT"
    )
    datapath = NftablesDatapath()
    datapath.install(desired.plan(config.load(settings))[0])
    datapath.close()
    (item,) = [one for one in examine(settings) if one.name == "datapath-left-over"]
    assert item.what == "both iptables and nftables have rules or counters of netacct; nftables is chosen"


def test_a_blind_platform_is_found_before_anything_is_installed(netns: support.Netns, settings: str) -> None:
    """Interfaces of OVN-Kubernetes are an error where `auto` refuses, and a warning where a datapath is named."""
    netns.sh("ip link add br-int type bridge", "ip link add ovn-k8s-mp0 type bridge")
    for datapath, severity in (("iptables", "warning"), ("auto", "error")):
        _set(settings, datapath)
        (item,) = [one for one in examine(settings) if one.name == "host-netfilter-blind"]
        assert (item.severity, "Open vSwitch" in item.what) == (severity, True)


@pytest.mark.parametrize(
    ("commands", "name", "where"),
    [
        (
            ["iptables-legacy -t mangle -A PREROUTING -p udp -j TPROXY --on-port 9 --tproxy-mark 0x100/0x100"],
            "tproxy",
            "iptables -t mangle, PREROUTING rule 1",
        ),
        (
            ["ip6tables-nft -t mangle -A PREROUTING -p udp -j TPROXY --on-port 9 --tproxy-mark 0x100/0x100"],
            "tproxy",
            "nft ip6 mangle, PREROUTING rule 1",
        ),
        (
            [
                "nft add table ip t",
                "nft add chain ip t c '{ type filter hook prerouting priority mangle; }'",
                "nft add rule ip t c udp dport 1 counter",
                "nft add rule ip t c udp dport 53 tproxy to :9",
            ],
            "tproxy",
            "nft ip t, c rule 2",
        ),
        (
            [
                "nft add table inet t",
                "nft add chain inet t c '{ type filter hook forward priority -200; policy drop; }'",
            ],
            "drops-before-counting",
            "nft inet t c",
        ),
        (
            [
                "nft add table ip6 t",
                "nft add chain ip6 t c '{ type filter hook input priority raw; }'",
                "nft add chain ip6 t d",
                "nft add rule ip6 t c udp dport 1 jump d",
                "nft add rule ip6 t d reject",
            ],
            "drops-before-counting",
            "nft ip6 t c",
        ),
        (
            ["iptables-legacy -A INPUT -p udp -j ACCEPT", "iptables-nft -A INPUT -p udp -j ACCEPT"],
            "legacy-and-nft-mixed",
            "iptables",
        ),
        (
            ["ip rule add fwmark 0x4/0x4 lookup main priority 99"],
            "mark-collision",
            "ip rule priority 99 fwmark 0x4/0x4",
        ),
        (
            ["iptables-legacy -t mangle -A PREROUTING -j MARK --set-xmark 0x10/0x10"],
            "mark-collision",
            "iptables table mangle chain PREROUTING target MARK",
        ),
        (
            [
                "ip link add v0 type veth peer name v1",
                "sysctl -qw net.ipv4.conf.v0.rp_filter=1 net.ipv4.conf.all.rp_filter=0",
                "sysctl -qw net.ipv4.conf.v1.rp_filter=2 net.ipv4.conf.all.src_valid_mark=1",
            ],
            "strict-reverse-path",
            "v0",
        ),
        (
            ["ip link add vx0 type vxlan id 9 dstport 9999 dev lo local 127.0.0.1", "ip link set vx0 up"],
            "tunnel-not-in-policy",
            "vx0",
        ),
        (["ip link add kube-ipvs0 type bridge"], "ipvs", "kube-ipvs0"),
        (
            [
                "sysctl -qw net.bridge.bridge-nf-call-iptables=0",
                "ip link add cni0 type bridge",
                "ip link add v0 type veth peer name v1",
                "ip link set v0 master cni0",
                "ip addr add 10.244.1.1/24 dev cni0",
            ],
            "bridge-without-netfilter",
            "cni0",
        ),
    ],
)
def test_a_planted_fault_is_found_by_name(
    netns: support.Netns, settings: str, commands: list[str], name: str, where: str
) -> None:
    """Each fault of the network is found once, by its name and place, and no other finding comes with it."""
    del netns
    support.sh(*commands)
    assert [(item.name, item.where) for item in examine(settings)] == [(name, where)]


@pytest.mark.parametrize(
    "commands",
    [
        ["ip link add vx0 type vxlan id 9 dstport 4789 dev lo local 127.0.0.1", "ip link set vx0 up"],
        ["ip link add vx0 type vxlan id 9 dstport 9999 dev lo local 127.0.0.1"],
        ["nft add table inet t", "nft add chain inet t c '{ type filter hook forward priority filter; policy drop; }'"],
        [
            "nft add table ip t",
            "nft add chain ip t c '{ type filter hook forward priority raw; }'",
            "nft add rule ip t c accept",
        ],
        ["iptables-legacy -A INPUT -p udp -j DROP", "ip6tables-legacy -t nat -A OUTPUT -j ACCEPT"],
        ["iptables-nft -t mangle -N KUBE-IPTABLES-HINT"],
        ["iptables-legacy -t mangle -A FORWARD -m mark --mark 0x1/0x1f -j ACCEPT"],
        [
            "ip link add cni0 type bridge nf_call_iptables 1",
            "ip link add v0 type veth peer name v1",
            "sysctl -qw net.bridge.bridge-nf-call-iptables=0",
            "ip link set v0 master cni0",
            "ip addr add 10.244.1.1/24 dev cni0",
        ],
        [
            "sysctl -qw net.bridge.bridge-nf-call-iptables=0",
            "ip link add docker0 type bridge",
            "ip link add v0 type veth peer name v1",
            "ip link set v0 master docker0",
            "ip addr add 172.17.0.1/16 dev docker0",
        ],
    ],
)
def test_what_is_no_fault_is_not_found(netns: support.Netns, settings: str, commands: list[str]) -> None:
    """Known tunnels, tunnels that are down, late drops, one backend alone, and bridges without pods say nothing."""
    del netns
    support.sh(*commands)
    assert examine(settings) == []


def test_two_faults_are_two_findings_the_gravest_first(netns: support.Netns, settings: str) -> None:
    """Faults do not hide each other, and warnings come before what is only good to know."""
    del netns
    support.sh(
        "ip rule add fwmark 0x1/0x1f lookup main",
        "ip link add vx0 type vxlan id 9 dstport 9999 dev lo local 127.0.0.1",
        "ip link set vx0 up",
    )
    assert names(settings) == ["tunnel-not-in-policy", "mark-collision"]


def test_a_forced_mark_that_a_rule_sets_is_an_error(netns: support.Netns, settings: str) -> None:
    """With marks.mode on, a rule that sets our bits weighs as an error, for the agent does not start."""
    del netns
    Path(settings).write_text(Path(settings).read_text() + "marks: {mode: on}\n")
    support.sh("iptables-legacy -t nat -A OUTPUT -j MARK --or-mark 0x2")
    (item,) = examine(settings)
    assert (item.name, item.severity) == ("mark-collision", "error")


@pytest.mark.parametrize(("tool", "family"), [("iptables", 4), ("ip6tables", 6)])
def test_a_rule_ahead_of_ours_is_named(netns: support.Netns, settings: str, tool: str, family: int) -> None:
    """A rule that can end traversal ahead of ours is named with chain and number, also inside a chain of its own."""
    del netns
    install(settings)
    hook = "FORWARD" if family == 4 else "INPUT"
    support.sh(
        f"{tool}-legacy -t mangle -N guard",
        f"{tool}-legacy -t mangle -A guard -p udp --dport 7 -j DROP",
        f"{tool}-legacy -t mangle -I {hook} -j guard",
        f"{tool}-legacy -t mangle -I {hook} -j MARK --set-xmark 0x100/0x100",
    )
    found = examine(settings)
    assert [(item.name, item.where) for item in found] == [
        ("rules-shadowed", f"{tool} -t mangle, {hook} rule 2"),
        ("rules-without-agent", "rules"),
    ]
    assert "(-j guard)" in found[0].what


def test_rules_that_are_not_in_place_are_found(netns: support.Netns, settings: str) -> None:
    """A flushed hook and a destroyed set are found by verification, and that nobody is there to repair them."""
    del netns
    install(settings)
    support.sh("iptables-legacy -t mangle -F FORWARD")
    found = examine(settings)
    assert [item.name for item in found] == ["rules-not-in-place", "rules-without-agent"]
    assert "hook FORWARD" in found[0].what


def test_sets_that_a_foreign_restore_left_alone_are_rules_without_an_agent(netns: support.Netns, settings: str) -> None:
    """Where the tables were replaced by somebody and only the sets are left, rules are known to be missing."""
    del netns
    install(settings)
    support.sh(
        r"printf '*mangle\nCOMMIT\n' | iptables-legacy-restore",
        r"printf '*mangle\nCOMMIT\n' | ip6tables-legacy-restore",
    )
    assert names(settings) == ["rules-not-in-place", "rules-without-agent"]


def test_a_host_on_nftables_is_noted_where_our_rules_are_legacy(netns: support.Netns, settings: str) -> None:
    """The kubelet's hint in nftables beside our legacy rules is good to know, and no more."""
    del netns
    install(settings)
    support.sh("iptables-nft -t mangle -N KUBE-IPTABLES-HINT")
    found = examine(settings)
    assert [(item.name, item.severity) for item in found] == [
        ("rules-without-agent", "warning"),
        ("host-uses-nftables", "info"),
    ]


def test_mixed_backends_are_counted_with_the_hints(netns: support.Netns, settings: str) -> None:
    """The finding says how many rules are in which table of which backend, and where the kubelet's hint is."""
    del netns
    support.sh(
        "iptables-legacy -t nat -A OUTPUT -p udp -j ACCEPT",
        "iptables-legacy -t nat -A OUTPUT -p tcp -j ACCEPT",
        "ip6tables-nft -A FORWARD -p udp -j ACCEPT",
        "iptables-nft -t mangle -N KUBE-KUBELET-CANARY",
    )
    (item,) = examine(settings)
    assert item.what == (
        "2 rules in legacy tables (iptables nat 2), 1 in nftables (ip6 filter 1); "
        "the kubelet keeps KUBE-KUBELET-CANARY in nftables"
    )


@pytest.mark.parametrize(
    ("datapath", "file", "save", "load"),
    [
        (IptablesDatapath, "etc/iptables/rules.v4", "iptables-legacy-save", "iptables-legacy-restore"),
        (NftablesDatapath, "etc/nftables.conf", "nft list ruleset", "nft -f"),
    ],
)
def test_a_ruleset_that_was_saved_with_ours_is_found(
    netns: support.Netns,
    tmp_path: Path,
    datapath: type[IptablesDatapath | NftablesDatapath],
    file: str,
    save: str,
    load: str,
) -> None:
    """A saved ruleset with ours in it, which cannot be loaded again, is found; one that only names them is not."""
    del netns
    (tmp_path / file).parent.mkdir(parents=True)
    others = "# table ip netacct, -j NETACCT-TX\\ndestroy table ip netacct\\n"
    support.sh(f"{save} > {tmp_path / file}", f"printf '{others}' >> {tmp_path / file}")
    assert saved.rulesets(tmp_path) == ()
    with contextlib.closing(datapath()) as ours:
        ours.install(support.plan())
        support.sh(f"{save} > {tmp_path / file}")
        if datapath is IptablesDatapath:
            ours.remove()
        refused = subprocess.run([*load.split(), tmp_path / file], capture_output=True, check=False)
    assert refused.returncode != 0
    found = saved.rulesets(tmp_path)
    assert found == (f"/{file}",)
    (item,) = checks.examine(Facts(saved=found))
    assert (item.name, item.where) == ("saved-with-our-rules", f"/{file}")


def test_who_holds_the_lock_and_for_how_long(netns: support.Netns, settings: str) -> None:
    """A lock that is held all the time is reported with holder, command, waiters, and bounds of the time."""
    del netns
    lock = os.environ["XTABLES_LOCKFILE"]
    holder = subprocess.Popen(["flock", "-x", lock, "sleep", "600"], start_new_session=True)
    support.eventually(lambda: flock_on(Path(lock)))
    waiter = subprocess.Popen(["flock", "-x", lock, "true"])
    try:
        support.eventually(lambda: flock_on(Path(lock)) == (holder.pid, 1))
        (item,) = examine(settings)
        assert item.name == "xtables-lock-held"
        assert f"process {holder.pid} (flock) has held {lock} for at least " in item.what
        bounds = re.search(r"for at least ([0-9.]+) s, and for ([0-9]+) s at most", item.what)
        assert bounds is not None
        assert looking.WATCH <= float(bounds[1]) <= int(bounds[2]) + 1
        assert "; 1 waiting" in item.what
    finally:
        os.killpg(holder.pid, signal.SIGKILL)  # the group that was made above: flock and its sleep
        holder.wait()
        waiter.wait(support.PATIENCE)
    assert names(settings) == []


def test_a_lock_that_is_held_for_a_moment_is_no_fault(
    netns: support.Netns, settings: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer that has the lock when the doctor looks, and gives it back soon, is not reported."""
    del netns
    lock = Path(os.environ["XTABLES_LOCKFILE"])
    looks: list[looking.Lock | None] = []

    def look(path: Path) -> looking.Lock | None:
        """As the doctor's own; after the second one the writer is done."""
        if path != lock:
            return flock_on(path)
        looks.append(flock_on(path))
        if len(looks) == 2:
            holder.communicate()
        return looks[-1]

    with subprocess.Popen(["flock", "-x", str(lock), "cat"], stdin=subprocess.PIPE) as holder:
        support.eventually(lambda: flock_on(lock))
        monkeypatch.setattr(looking, "flock_on", look)
        monkeypatch.setattr(looking, "watch", partial(looking.watch, seconds=3600.0))
        assert names(settings) == []
    assert [found and found.pid for found in looks] == [holder.pid, holder.pid, None]


def test_a_lock_file_that_cannot_be_made_is_found(
    netns: support.Netns, settings: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock file in a directory that is not there is found, and so is one that is a directory."""
    del netns
    monkeypatch.setenv("XTABLES_LOCKFILE", "/nonexistent/xtables.lock")
    assert names(settings) == ["xtables-lock-unusable"]
    monkeypatch.setenv("XTABLES_LOCKFILE", "/proc")
    assert names(settings) == ["xtables-lock-unusable"]


def test_an_agent_that_was_killed_leaves_two_findings(netns: support.Netns, settings: str) -> None:
    """After SIGKILL the stale socket is found, and rules that nobody looks after; then the rules alone."""
    del netns
    with agent(settings) as process:
        process.kill()
        process.wait()
        assert names(settings) == ["control-socket-stale", "rules-without-agent"]
    (Path(config.load(settings).state_dir) / SOCKET).unlink()
    assert names(settings) == ["rules-without-agent"]


def test_an_agent_that_was_told_to_remove_its_rules_is_paused(netns: support.Netns, settings: str) -> None:
    """After `rules remove` the agent is said to wait; when it is gone too, that nothing counts, unless it is off."""
    del netns
    with agent(settings):
        ask(Path(config.load(settings).state_dir), "remove")
        assert names(settings) == ["accounting-paused"]
    (Path(config.load(settings).state_dir) / SOCKET).unlink()
    assert names(settings) == ["nothing-counts"]
    Path(settings).write_text(Path(settings).read_text() + "enabled: false\n")
    assert names(settings) == []


def test_an_agent_that_hangs_is_found_in_time(netns: support.Netns, settings: str) -> None:
    """A stopped agent is reported, and not waited for until it goes on; with its process."""
    del netns
    with agent(settings) as process:
        process.send_signal(signal.SIGSTOP)
        found = examine(settings)
        assert [(item.name, item.where) for item in found] == [("agent-not-answering", f"process {process.pid}")]


def test_an_agent_in_another_namespace_is_found(netns: support.Netns, settings: str) -> None:
    """Called outside of the agent's network namespace, the command says so, and compares no rules with it."""
    del netns
    other = support.Netns()
    try:
        with agent(settings) as process:
            found = other.run(lambda: examine(settings))
            assert [(item.name, item.where) for item in found] == [
                ("agent-in-other-namespace", f"process {process.pid}")
            ]
    finally:
        other.close()


def test_a_lock_without_an_agent_behind_it_is_found(netns: support.Netns, settings: str) -> None:
    """Who holds the agent's lock and listens nowhere is reported."""
    del netns
    state = Path(config.load(settings).state_dir)
    state.mkdir(mode=0o700)
    holder = subprocess.Popen(["flock", "-x", str(state / LOCK), "sleep", "600"], start_new_session=True)
    try:
        support.eventually(lambda: names(settings) == ["agent-not-answering"])
    finally:
        os.killpg(holder.pid, signal.SIGKILL)  # the group that was made above
        holder.wait()


def test_the_agent_reports_what_it_cannot_repair_yet(netns: support.Netns, settings: str) -> None:
    """A running agent is asked for differences, so that only a rule it has not repaired yet is found."""
    del netns
    with agent(settings) as process:
        process.send_signal(signal.SIGSTOP)
        support.sh("iptables-legacy -t mangle -I FORWARD -j ACCEPT")
        assert names(settings) == ["agent-not-answering", "rules-shadowed"]
        process.send_signal(signal.SIGCONT)
        support.eventually(lambda: names(settings) == [])


def test_a_pod_without_host_network_is_recognised(
    netns: support.Netns, settings: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kubelet's environment in a namespace with one interface is a pod's; with pods' interfaces it is a node's."""
    del netns
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    support.sh("ip link add eth0 type veth peer name far")
    assert names(settings) == []
    support.sh("ip link del eth0", "ip link add eth0 type bridge")
    assert names(settings) == ["pod-namespace"]


def test_missing_capabilities_are_named(netns: support.Netns, settings: str) -> None:
    """Without CAP_NET_RAW that is what is found, with what could not be looked at for it, and exit code 1."""
    del netns
    support.sh("iptables-legacy -t mangle -N other")
    command = ["setpriv", "--bounding-set=-net_raw", NETACCT, "doctor", "-o", "json", "--config.file", settings]
    done = subprocess.run(command, capture_output=True, check=False, timeout=60)
    found = [(item["name"], item["where"]) for item in json.loads(done.stdout)]
    assert found[0] == ("capability-missing", "this process")
    assert {name for name, _ in found[1:]} == {"could-not-look"}
    assert ("could-not-look", "legacy tables") in found
    assert done.returncode == 1


@pytest.mark.parametrize(
    ("prepare", "name"),
    [
        ("mount -t tmpfs -o size=1m,mode=700 none {dir}", "state-directory-full"),
        ("mount -t tmpfs -o ro none {dir}", "state-directory-unusable"),
        ("chmod 0777 {dir}", "state-directory-open"),
        ("chown 65534 {dir}", "state-directory-open"),
        ("rmdir {dir} && touch {dir}", "state-directory-unusable"),
    ],
)
def test_a_state_directory_that_will_not_do_is_found(
    netns: support.Netns, settings: str, prepare: str, name: str
) -> None:
    """Full, read-only, open to others, another's, or no directory at all."""
    del netns
    state = Path(config.load(settings).state_dir)
    state.mkdir(mode=0o700)
    script = f"{prepare.format(dir=state)} && exec {NETACCT} doctor -o json --config.file {settings}"
    done = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, check=False, timeout=60)
    assert [item["name"] for item in json.loads(done.stdout)] == [name], done.stderr


def test_errors_in_files_are_findings(netns: support.Netns, settings: str) -> None:
    """Errors of configuration, policy and pods file are each found with file and line, beside what else is wrong."""
    del netns
    folder = Path(settings).parent
    (folder / "pods.yaml").write_text("pods:\n  - {namespace: a, name: b, ips: [300.1.1.1]}\n")
    (folder / "policy.yaml").write_text("classes: {pod: {cidrs: [10.244.0.0/99]}}\n")
    Path(settings).write_text(Path(settings).read_text() + "enbled: true\n")
    found = [item for item in examine(settings) if item.name == "configuration-invalid"]
    line = len(Path(settings).read_text().splitlines())
    assert {item.where for item in found} == {f"{settings}:{line}", f"{folder}/policy.yaml:1", f"{folder}/pods.yaml:2"}


def test_a_node_without_ranges_is_found(netns: support.Netns, settings: str) -> None:
    """Set up, but without local ranges and with classes that no CIDR fills: both are said."""
    del netns
    folder = Path(settings).parent
    (folder / "policy.yaml").write_text("classes: {pod: {}, node: {cidrs: [192.168.50.0/24]}}\ndefault: internet\n")
    Path(settings).write_text(Path(settings).read_text().replace("local_ranges: [10.244.1.0/28]\n", ""))
    found = examine(settings)
    assert [item.name for item in found] == ["no-local-range", "cluster-ranges-unknown"]
    assert found[1].what == "policy policy has no CIDR for pod, service, and none was found"


def test_a_silent_metadata_server_is_found(netns: support.Netns, settings: str) -> None:
    """A provider of local ranges that gets no answer is named, with the reason."""
    del netns
    Path(settings).write_text(Path(settings).read_text() + "ranges: {providers: [aws, rtnetlink]}\n")
    (found,) = (item for item in examine(settings) if item.name == "local-ranges-not-read")
    assert found.what == "a provider of local ranges cannot be read: aws: Network is unreachable"


def test_a_subnet_that_pods_share_is_said(netns: support.Netns, settings: str) -> None:
    """Where this node's pods have addresses of the nodes' subnet, that is why no range is known."""
    folder = Path(settings).parent
    (folder / "policy.yaml").write_text("classes: {service: {cidrs: [10.96.0.0/12]}, private: {builtin: private}}\n")
    support.sh(
        "ip link add eth0 type veth peer name router",
        "ip link set eth0 up",
        "ip link set router up",
        "ip addr add 10.244.1.100/24 dev eth0",
        "ip route add default via 10.244.1.99",
    )
    del netns
    (found,) = (item for item in examine(settings) if item.name == "cluster-ranges-unknown")
    assert found.what == (
        "policy policy has no CIDR for pod, node, and none was found; not used: 10.244.1.0/24 cluster (connected "
        "subnet of eth0, which has the default route; pods of this node are in 10.244.1.0/24, too): the policy has no "
        "class cluster"
    )
    Path(folder / "policy.yaml").write_text("classes: {service: {cidrs: [10.96.0.0/12]}, cluster: {}}\n")
    assert "cluster-ranges-unknown" not in names(settings)


@pytest.mark.parametrize(("pods", "severity"), [("10.244.0.0/16", "warning"), ("10.244.1.0/24", "info")])
def test_a_plugin_that_masquerades_between_nodes_is_found(
    netns: support.Netns, settings: str, pods: str, severity: str
) -> None:
    """A plugin ptp with ipMasq is named with its file: a warning where the cluster has more pods than this node's."""
    del netns
    folder = Path(settings).parent
    (folder / "policy.yaml").write_text(POLICY.replace("10.244.0.0/16", pods))
    (folder / "net.d").mkdir()
    Path(settings).write_text(Path(settings).read_text() + f"ranges: {{cni: {{directories: [{folder}/net.d]}}}}\n")
    plugin = {"type": "ptp", "ipMasq": True, "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.244.1.0/24"}]]}}
    (folder / "net.d/10-ptp.conflist").write_text(json.dumps({"name": "pods", "plugins": [plugin]}))
    (found,) = examine(settings)
    assert (found.name, found.severity) == ("masquerade-between-nodes", severity)
    assert found.where == f"{folder}/net.d/10-ptp.conflist"
    assert found.what.startswith("plugin ptp has ipMasq: true, and masquerades what leaves 10.244.1.0/24")
    plugin["ipMasq"] = False
    (folder / "net.d/10-ptp.conflist").write_text(json.dumps({"name": "pods", "plugins": [plugin]}))
    assert examine(settings) == []


@pytest.mark.skipif(not tree_root(), reason="needs a cgroup v2 tree")
def test_a_cgroup_tree_that_is_not_mounted_is_found(netns: support.Netns, settings: str) -> None:
    """Where hostNetwork pods shall be told apart, the missing tree is said; with the tree there nothing is."""
    del netns
    text = Path(settings).read_text()
    Path(settings).write_text(text.replace("datapath: iptables", "datapath: nftables\nhost_pods: cgroup"))
    assert examine(settings) == []
    script = f"umount -l {tree_root()} && exec {NETACCT} doctor -o json --config.file {settings}"
    done = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, check=False, timeout=60)
    found = [(item["name"], item["severity"], item["where"]) for item in json.loads(done.stdout)]
    assert found == [("host-pods-not-told-apart", "warning", "mounts")], done.stderr


def npd(*arguments: str, wrapper: tuple[str, ...] = ()) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command as a plugin of node-problem-detector."""
    command = [*wrapper, NETACCT, "doctor", "-o", "npd", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, done.stdout, done.stderr


def test_node_problem_detector_is_told_in_one_short_line(netns: support.Netns, settings: str) -> None:
    """Exit code 0 without a problem, 1 with one line of 80 bytes at most on stdout and all of it on stderr."""
    del netns
    assert npd("--config.file", settings) == (0, "no problem found\n", "")
    support.sh(
        *(f"ip link add vx{n} type vxlan id {n} dstport 999{n} dev lo local 127.0.0.1" for n in (1, 2)),
        "ip link set vx1 up",
        "ip link set vx2 up",
        "ip rule add fwmark 0x1/0x1f lookup main",
    )
    code, out, err = npd("--config.file", settings)
    assert code == 1
    assert out.startswith("tunnel-not-in-policy (+1): vx1 (vxlan) uses UDP port 9991")
    assert (out.count("\n"), len(out.encode()) <= 81) == (1, True)
    assert [line.split(":")[0] for line in err.splitlines()] == [
        "warning tunnel-not-in-policy",
        "warning tunnel-not-in-policy",
        "info mark-collision",
    ]


def test_who_is_not_root_gets_no_answer(
    netns: support.Netns, settings: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without root the exit code is 77, and for node-problem-detector 2: not known."""
    del netns
    monkeypatch.setattr(os, "geteuid", lambda: 65534)  # the interpreter of the tests may be closed to other users
    assert main(["doctor", "--config.file", settings]) == 77
    assert "only root" in capsys.readouterr().err
    assert main(["doctor", "-o", "npd", "--config.file", settings]) == 2
    assert "only root" in capsys.readouterr().out


def test_people_read_what_where_why_and_what_to_do(
    netns: support.Netns, settings: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table has a paragraph for each finding, and one line where there is none."""
    del netns
    assert main(["doctor", "--config.file", settings]) == 0
    assert capsys.readouterr().out == "nothing found\n"
    support.sh("ip link add kube-ipvs0 type bridge")
    assert main(["doctor", "--config.file", settings]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["warning: ipvs", "  what:  0 virtual services, interface kube-ipvs0", "  where: kube-ipvs0"]
    assert [line.split(":")[0] for line in lines[3:]] == ["  why", "  do"]
