"""The unit on a Debian that boots: installed as the README tells, under its full hardening, exact to the byte."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import debian
import nspawn
import pytest
import support
from unitlab import UNIT, UnitLab, unit_lab

pytestmark = [pytest.mark.systemd, pytest.mark.timeout(2400)]  # the first run makes the Debian tree

BOTH = pytest.mark.parametrize("datapath", ["iptables", "nftables"])
LIMIT = 2.5
IPTABLES = """\
*mangle
:PREROUTING ACCEPT [0:0]
:INPUT ACCEPT [0:0]
:FORWARD ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
-A PREROUTING -i eno1 -j ACCEPT
COMMIT
"""

NFTABLES = """\
flush ruleset
table inet filter {
    chain input { type filter hook input priority filter; iifname "eno1" drop; }
}
"""


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an administrator takes to the node: `dist/wheels` and `systemd/` of this checkout."""
    try:
        debian.require()
    except debian.MissingError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("shared")
    debian.wheels(folder)
    shutil.copytree(debian.ROOT / "systemd", folder / "systemd")
    return folder


@pytest.fixture(scope="session")
def installed(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Path]]:
    """The folders that make a machine on which the README's commands were run."""
    try:
        tree = debian.tree()
    except debian.MissingError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("installed") / "machine"
    folder.mkdir()
    with nspawn.machine(folder, [tree], shared) as machine:
        machine.boot()
        for command in debian.install_commands():
            if not command.startswith("apt-get install"):  # the tree was made with what this names
                machine.run(f"cd /src && {command}")
        assert machine.run(f"systemctl is-active {UNIT}") == "active"
        machine.power_off()
        yield [machine.upper, tree]


def unowned(rules: str) -> str:
    """Rules without what nft says about the process that holds a table, if there is one."""
    return re.sub(r" # progname \w+|\tflags [\w,]*\n", "", rules)


@pytest.fixture
def datapath() -> str:
    """What counts, where a test is not for both."""
    return "iptables"


@pytest.fixture
def lab(datapath: str, installed: list[Path], shared: Path, tmp_path: Path) -> Iterator[UnitLab]:
    """A machine of its own for each test, booted, with netacct running as a unit, and with pods."""
    folder = tmp_path / "machine"
    folder.mkdir()
    with nspawn.machine(folder, installed, shared) as machine, unit_lab(machine, tmp_path) as made:
        made.boot(datapath)
        yield made


@BOTH
def test_the_process_has_nothing_that_it_does_not_need(lab: UnitLab) -> None:
    """The hardening is really in force: two capabilities, no new privileges, seccomp, a read-only system."""
    status = dict(line.split(":\t", 1) for line in lab.machine.run(f"cat /proc/{lab.pid()}/status").splitlines())
    assert status["Uid"].split() == ["0"] * 4
    for name in ("CapPrm", "CapEff", "CapBnd"):
        assert int(status[name], 16) == 1 << 12 | 1 << 13  # CAP_NET_ADMIN, CAP_NET_RAW (linux/capability.h)
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    inside = f"nsenter --target {lab.pid()} --mount --"
    for folder in ("/etc", "/usr", "/opt/netacct", "/var", "/run", "/run/lock", "/etc/netacct"):
        assert "Read-only file system" in lab.machine.run(f"{inside} touch {folder}/x", check=False), folder
    write = f"{inside} sh -c 'echo 1 > /proc/sys/net/ipv4/ip_forward'"
    assert "Read-only file system" in lab.machine.run(write, check=False)
    for file in ("/run/netacct/x", "/var/lib/netacct/x", "/run/xtables.lock"):
        lab.machine.run(f"{inside} touch {file}")
    assert lab.machine.run(f"{inside} stat -c %i /run/xtables.lock") == lab.machine.run("stat -c %i /run/xtables.lock")
    modes = lab.machine.run("stat -c %a /run/netacct /var/lib/netacct /run/xtables.lock")
    assert modes.split() == ["700", "750", "600"]


def test_systemd_on_the_node_has_nothing_to_say_about_the_unit(lab: UnitLab) -> None:
    """The node's own systemd-analyze accepts the installed unit and rates its exposure at or below the limit."""
    assert lab.machine.run(f"systemd-analyze verify {UNIT}") == ""
    rated = re.search(r"exposure level for \S+: ([0-9.]+)", lab.machine.run(f"systemd-analyze security {UNIT}"))
    assert rated is not None
    assert float(rated[1]) <= LIMIT


def test_the_lock_is_the_nodes_own(lab: UnitLab) -> None:
    """A lock file that somebody replaced keeps its meaning in the unit's own mounts: a repair waits for its holder."""
    lab.machine.run("rm /run/xtables.lock && touch /run/xtables.lock")
    holder = lab.machine.spawn("flock /run/xtables.lock sleep 600")
    support.eventually(lambda: lab.machine.run("flock --nonblock /run/xtables.lock true || echo held") == "held")
    lab.machine.run("XTABLES_LOCKFILE=/root/another iptables-legacy -t mangle -F FORWARD")
    support.eventually(lambda: "rules are not in sync, repairing" in lab.journal())
    lab.machine.run("sleep 1")
    assert "NETACCT-TX" not in lab.machine.run("iptables-legacy-save -t mangle | grep -e '-A FORWARD'", check=False)
    lab.machine.run("pkill --full '^sleep 600$'")
    assert holder.wait(support.PATIENCE) != 0
    support.eventually(lambda: "-A FORWARD" in lab.machine.run("iptables-legacy-save -t mangle"))
    lab.traffic()
    lab.check()


@BOTH
def test_a_lock_file_that_is_gone_is_missed_by_iptables_alone(lab: UnitLab, datapath: str) -> None:
    """Without the lock file the unit starts with nftables, and with iptables once the file is there again."""
    lab.traffic()
    lab.machine.run(f"systemctl stop {UNIT} && rm /run/xtables.lock")
    lab.traffic()
    lab.machine.run(f"systemctl start {UNIT}", check=datapath == "nftables")
    if datapath == "iptables":
        assert "/run/xtables.lock" in lab.journal().rpartition("msg=starting")[2]
        lab.machine.run("systemd-tmpfiles --create netacct.conf")
    support.eventually(lambda: lab.show("ActiveState") == "active")
    lab.traffic()
    lab.check()


@BOTH
def test_a_normal_life_leaves_no_complaint(lab: UnitLab) -> None:
    """Booting, counting, reloading and stopping write no warning into the journal, and STATUS says what is done."""
    lab.traffic()
    lab.check()
    assert lab.show("StatusText") == "accounting 4 addresses, policy policy, rules in sync"
    lab.machine.run(f"systemctl reload {UNIT}")
    support.eventually(lambda: "msg=reloaded" in lab.journal())
    assert lab.show("ActiveState") == "active"
    lab.traffic()
    lab.check()
    lab.machine.run(f"systemctl stop {UNIT}")
    assert lab.show("Result") == "success"
    complaints = lab.machine.run(f"journalctl --boot --quiet --no-pager --priority=warning --unit={UNIT}")
    assert complaints == ""


@BOTH
def test_rules_stay_when_the_service_stops(lab: UnitLab) -> None:
    """What passes while the service is stopped is counted, and booked when it starts again and adopts the rules."""
    lab.traffic()
    lab.machine.run(f"systemctl stop {UNIT}")
    rules = lab.rules()
    assert "netacct" in rules.lower()
    lab.traffic()
    lab.machine.run(f"systemctl start {UNIT}")
    lab.check()
    assert unowned(lab.rules()) == unowned(rules)
    assert "rules brought up to date" not in lab.journal().rpartition("msg=starting")[2]


def test_a_restart_costs_nothing(lab: UnitLab) -> None:
    """Totals go on to the byte over several restarts with traffic between and during them."""
    for _ in range(3):
        lab.traffic()
        lab.machine.run(f"systemctl restart --no-block {UNIT}")
        lab.traffic()
        support.eventually(lambda: lab.show("ActiveState") == "active")
    lab.check()


@BOTH
def test_a_killed_agent_comes_back(lab: UnitLab) -> None:
    """After SIGKILL systemd starts the agent again, and its totals have what passed before, meanwhile and after."""
    lab.traffic()
    lab.check()
    pid = lab.pid()
    lab.machine.run(f"kill -KILL {pid}")
    lab.traffic()
    lab.until_restarted(pid)
    lab.traffic()
    lab.check()


def test_a_hung_agent_is_replaced(lab: UnitLab) -> None:
    """A process that no longer runs trips the watchdog, systemd replaces it, and no byte is lost."""
    lab.drop_in("[Service]\nWatchdogSec=4s\n")
    lab.machine.run(f"systemctl restart {UNIT}")
    lab.traffic()
    pid = lab.pid()
    lab.machine.run(f"kill -STOP {pid}")
    lab.traffic()
    lab.until_restarted(pid)
    assert f"{UNIT}: Watchdog timeout" in lab.journal()
    lab.traffic()
    lab.check()


def test_the_watchdog_is_fed_in_time(lab: UnitLab) -> None:
    """An idle agent feeds a watchdog that is shorter than its own pace."""
    lab.drop_in("[Service]\nWatchdogSec=4500ms\n")  # that pace is 5 s, and machines stand still for a second or two
    lab.machine.run(f"systemctl restart {UNIT}")
    pid = lab.pid()
    lab.machine.run("sleep 6")
    assert lab.pid() == pid
    assert "Watchdog timeout" not in lab.journal()


def test_a_full_disk_costs_nothing(lab: UnitLab) -> None:
    """With no byte left for state and accounts the agent counts on, also over a SIGKILL, and recovers by itself."""
    lab.machine.run(f"systemctl stop {UNIT}")
    for folder in ("/run/netacct", "/var/lib/netacct"):
        lab.machine.run(
            f"cp -a {folder} /root/kept && mount -t tmpfs -o size=1m,mode=$(stat -c 0%a {folder}) full {folder}"
            f" && cp -a /root/kept/. {folder} && rm -r /root/kept"
        )
    lab.sent.clear()  # the state was moved to another file system, as a copy: it is not trusted
    lab.machine.run(f"systemctl start {UNIT}")
    lab.traffic()
    lab.check()
    for folder in ("/run/netacct", "/var/lib/netacct"):
        lab.machine.run(
            f"dd if=/dev/zero of={folder}/fill bs=4k status=none; df {folder} | grep -q ' 100% '", check=True
        )
    lab.traffic()
    lab.check()
    pid = lab.pid()
    lab.machine.run(f"kill -KILL {pid}")
    lab.traffic()
    lab.until_restarted(pid)
    lab.check()
    lab.machine.run("rm /run/netacct/fill /var/lib/netacct/fill")
    lab.traffic()
    lab.machine.run(f"systemctl restart {UNIT}")
    lab.traffic()
    lab.check()


@BOTH
def test_a_reboot_starts_at_zero(lab: UnitLab) -> None:
    """After a reboot the service is up by itself, counts from 0, and has accounts of all that was counted before."""
    lab.traffic()
    lab.check()
    lab.machine.reboot()
    assert lab.show("ActiveState") == "active"
    assert lab.accounts() == dict(lab.sent)
    lab.sent.clear()
    lab.connect()
    lab.check()
    lab.traffic()
    lab.check()


def test_a_power_cut_is_a_reboot(lab: UnitLab) -> None:
    """After a crash of the machine, with files left as they were, the service starts and counts from 0."""
    lab.traffic()
    lab.check()
    before = lab.machine.leader
    lab.machine.run("systemctl reboot --force --force", check=False)
    lab.machine.wait_for_boot(before)
    lab.sent.clear()
    lab.connect()
    lab.traffic()
    lab.check()


@pytest.mark.parametrize(
    ("datapath", "service", "file", "rules"),
    [
        ("iptables", "netfilter-persistent", "/etc/iptables/rules.v4", IPTABLES),
        ("nftables", "nftables", "/etc/nftables.conf", NFTABLES),
    ],
)
def test_it_starts_after_the_firewall(lab: UnitLab, service: str, file: str, rules: str) -> None:
    """A firewall that loads its whole ruleset does so before our rules come at boot; later, they stay or come back."""
    lab.machine.run(f"update-alternatives --set iptables /usr/sbin/iptables-legacy && systemctl enable {service}")
    lab.write(file, rules)
    lab.machine.reboot()
    lab.sent.clear()
    lab.connect()
    assert "eno1" in lab.rules()
    lab.traffic()
    lab.check()
    assert lab.metric("netacct_rule_repairs_total") == 0
    lab.machine.run(f"systemctl restart {service}")
    kept = "flags owner" in lab.rules()  # since Linux 6.9 nobody but its owner can flush an nft table
    support.eventually(lambda: kept or (lab.metric("netacct_rule_repairs_total") or 0) > 0)
    lab.traffic()
    lab.check()


def test_a_bad_configuration_is_not_tried_again(lab: UnitLab) -> None:
    """A start with an error in the configuration ends with 78 and stays so; put right, it goes on where it was."""
    lab.traffic()
    good = lab.machine.path("/etc/netacct/netacct.yaml").read_text(encoding="utf-8")
    lab.write("/etc/netacct/netacct.yaml", "polcy: default\n")
    lab.machine.run(f"systemctl restart {UNIT}", check=False)
    assert (lab.show("Result"), lab.show("ExecMainStatus")) == ("exit-code", "78")
    lab.machine.run("sleep 6")
    assert (lab.show("ActiveState"), lab.show("NRestarts")) == ("failed", "0")
    lab.traffic()
    lab.write("/etc/netacct/netacct.yaml", good)
    lab.machine.run(f"systemctl start {UNIT}")
    lab.check()


@BOTH
def test_removing_leaves_a_clean_node(lab: UnitLab) -> None:
    """The commands that docs/operations.md gives for removal leave no rule, no set, no service and no program."""
    text = (debian.ROOT / "docs/operations.md").read_text(encoding="utf-8")
    block = re.search(r"\n\n((?:    .*\n)+)", text.partition("## Removing netacct from a node")[2])
    assert block is not None
    lab.machine.run(block[1])
    assert [line for line in lab.rules().splitlines() if not line.startswith("-P ")] == []
    assert (lab.show("ActiveState"), lab.show("LoadState")) == ("inactive", "not-found")
    left = lab.machine.run("find / /run -xdev -name '*netacct*' -not -path '/src/*' -not -path '/var/log/*'").split()
    assert sorted(left) == ["/etc/netacct", "/etc/netacct/netacct.yaml", "/var/lib/netacct"]
