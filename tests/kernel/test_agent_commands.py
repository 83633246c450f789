"""`netacct rules` and `netacct pods` on the real kernel: with an agent, without one, as text for the tools, refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from agentlab import AgentLab, agent_lab, datagrams, until
from support import Netns, Node, sh

pytestmark = pytest.mark.kernel

TOOLS = {
    "ipset": ["ipset", "restore"],
    "iptables": ["iptables-legacy-restore", "-n"],
    "ip6tables": ["ip6tables-legacy-restore", "-n"],
}


@pytest.fixture
def lab(node: Node, tmp_path: Path) -> Iterator[AgentLab]:
    """A node without an agent."""
    with agent_lab(node, tmp_path) as made:
        yield made


def tables() -> str:
    """Both mangle tables with counters, without comments and without the counters of built-in chains."""
    text = sh("iptables-legacy-save -c -t mangle", "ip6tables-legacy-save -c -t mangle")
    return re.sub(r"^#.*\n|(?<=ACCEPT) \[.*\]$", "", text, flags=re.MULTILINE)


def test_rules_can_be_installed_and_removed_without_an_agent(lab: AgentLab) -> None:
    """`apply` installs all that `diff` asks for; `remove` leaves other programs' rules and counters as they were."""
    for tool in ("iptables-legacy", "ip6tables-legacy"):
        sh(
            f"{tool} -t mangle -N FOREIGN",
            f"{tool} -t mangle -A FOREIGN -p udp -j MARK --set-xmark 0x4000/0x4000",
            f"{tool} -t mangle -A FORWARD -j FOREIGN",
        )
    datagrams(lab.node)
    before = tables()
    assert re.search(r"^\[10:2000\] -A FOREIGN", before, re.MULTILINE)
    missing = lab.command("rules", "diff")
    assert missing.returncode == 1
    assert missing.stdout
    assert lab.command("rules", "apply").stdout == "installed\n"
    assert (lab.command("rules", "diff").returncode, lab.command("rules", "diff").stdout) == (0, "")
    assert json.loads(lab.command("rules", "apply", "-o", "json").stdout) == []
    assert lab.command("rules", "apply").stdout == "nothing to do\n"
    sh("ipset flush nacc4-tx-internet")
    assert lab.command("rules", "apply").stdout.startswith("repaired: set nacc4-tx-internet has lost its sentinel")
    removed = lab.command("rules", "remove", "-o", "json")
    assert (removed.returncode, json.loads(removed.stdout)) == (0, ["removed"])
    assert 'because="netacct rules remove"' in removed.stderr
    assert tables() == before
    assert sh("ipset list -n") == ""


def test_without_an_agent_a_node_that_is_switched_off_shall_have_no_rules(lab: AgentLab) -> None:
    """With `enabled: false`, `diff` names what is there, not what is missing; `apply` refuses, `show` warns."""
    lab.command("rules", "apply")
    lab.configure(enabled=False)
    there = lab.command("rules", "diff", "-o", "json")
    assert (there.returncode, json.loads(there.stdout)) == (
        1,
        ["rules and counters of the datapath iptables are left over"],
    )
    for flags in ((), ("--dry-run",)):
        refused = lab.command("rules", "apply", *flags)
        assert (refused.returncode, refused.stdout) == (1, "")
        assert "enabled is false in the configuration: rules stay removed" in refused.stderr
    assert "none of these rules shall be there" in lab.command("rules", "show").stderr
    assert lab.command("rules", "remove").returncode == 0
    clean = lab.command("rules", "diff")
    assert (clean.returncode, clean.stdout) == (0, "")


def test_what_would_be_removed_is_shown_whatever_is_wrong(lab: AgentLab) -> None:
    """Neither a broken policy nor marks that somebody else owns keep `remove --dry-run` from printing, as `remove`."""
    lab.command("rules", "apply")
    usual = lab.command("rules", "remove", "--dry-run").stdout
    sh("iptables-legacy -t mangle -A PREROUTING -j MARK --set-xmark 0x1f/0x1f")
    lab.configure(marks={"mode": "on"}, policy=str(lab.folder / "none.yaml"))
    broken = lab.command("rules", "remove", "--dry-run")
    assert (broken.returncode, broken.stdout) == (0, usual), broken.stderr
    assert "-D FORWARD" in usual
    assert lab.command("rules", "remove").stdout == "removed\n"


def test_what_no_repair_can_mend_is_not_called_repaired(lab: AgentLab) -> None:
    """With an agent and without, `apply` tells what it repaired from rules of others that still lead into ours."""
    lab.command("rules", "apply")
    sh("iptables-legacy -t mangle -N THEIRS", "iptables-legacy -t mangle -A THEIRS -j NETACCT-TX")
    left = "still there: IPv4: chain NETACCT-TX: a rule that is not ours leads there\n"
    assert lab.command("rules", "apply").stdout == left
    sh("ipset flush nacc4-tx-internet")
    *mended, last = lab.command("rules", "apply").stdout.splitlines(keepends=True)
    assert ({line.partition(":")[0] for line in mended}, last) == ({"repaired"}, left)
    lab.start()
    assert lab.command("rules", "apply").stdout == left


def test_what_is_counted_without_an_agent_is_booked(lab: AgentLab) -> None:
    """Bytes counted between `rules apply` and `rules remove` are in the totals of the agent that comes later."""
    lab.command("rules", "apply")
    octets = datagrams(lab.node)
    assert lab.command("rules", "remove").returncode == 0
    lab.start()
    until(lambda: lab.totals() == {("a-0", "internet"): octets})


def test_a_running_agent_is_asked(lab: AgentLab) -> None:
    """`remove` pauses a running agent, which a reload does not undo; `apply` has it go on; `pods` shows its totals."""
    lab.start()
    first = datagrams(lab.node)
    assert lab.command("rules", "remove").returncode == 0
    assert sh("ipset list -n") == ""
    assert lab.get("/readyz")[0] == 200
    lab.reload()
    assert sh("ipset list -n") == ""
    assert lab.metric("netacct_rules_in_sync") == 0
    paused = lab.command("rules", "diff")
    assert (paused.returncode, paused.stdout) == (1, "rules are removed, until `netacct rules apply`\n")
    assert lab.command("rules", "remove").stdout == "nothing to remove\n"
    assert lab.command("rules", "apply").stdout == "installed\n"
    assert lab.command("rules", "apply").stdout == "nothing to do\n"
    assert lab.command("rules", "diff").returncode == 0
    second = datagrams(lab.node, packets=3)
    pods = {pod["pod"]: pod for pod in json.loads(lab.command("pods", "-o", "json").stdout)}
    assert pods["a-0"]["transmit_bytes"] == first + second
    assert pods["b-0"]["transmit_bytes"] == 0
    assert "team-a" in lab.command("pods").stdout


def test_the_text_of_apply_is_what_the_tools_accept(lab: AgentLab) -> None:
    """Each tool takes its text of `apply --dry-run`, which itself installs nothing, in an empty namespace."""
    texts = {tool: lab.command("rules", "apply", "--dry-run", "--format", tool).stdout for tool in TOOLS}
    assert sh("ipset list -n") == ""
    other = Netns()
    try:
        for tool, command in TOOLS.items():
            other.run(lambda tool=tool, command=command: _feed(command, texts[tool]))  # type: ignore[misc]
        other.sh("iptables-legacy -t mangle -C FORWARD -s 10.244.1.0/28 -j NETACCT-TX")
    finally:
        other.close()


def test_the_text_of_remove_is_what_the_tools_accept(lab: AgentLab) -> None:
    """On a node with rules, the texts of `remove --dry-run` take away all that `apply` installed."""
    assert lab.command("rules", "apply").returncode == 0
    shown = lab.command("rules", "remove", "--dry-run")
    assert "-D FORWARD" in shown.stdout
    for tool in ("iptables", "ip6tables", "ipset"):
        text = lab.command("rules", "remove", "--dry-run", "--format", tool).stdout
        assert "NETACCT" in sh("iptables-legacy-save -t mangle") or tool != "iptables"
        _feed(TOOLS[tool], text)
    assert "NETACCT" not in tables()
    assert sh("ipset list -n") == ""


@pytest.mark.parametrize("datapath", ["iptables", "nftables"])
def test_a_dry_removal_lists_what_is_there(lab: AgentLab, datapath: str) -> None:
    """`remove --dry-run` names the chains, sets and tables of the datapath that is there, whatever is configured."""
    lab.configure(datapath=datapath)
    lab.command("rules", "apply")
    lab.configure(datapath="auto")
    shown = lab.command("rules", "remove", "--dry-run").stdout.splitlines()
    if datapath == "iptables":
        assert {f"destroy {name}" for name in sh("ipset list -n").split()} < set(shown)
        assert {line[3:] for line in shown if line.startswith("-X ")} == set(
            re.findall(r"^:(NETACCT\S+)", tables(), re.MULTILINE)
        )
        assert not any("delete table" in line for line in shown)
    else:
        assert shown == ["delete table ip netacct", "delete table ip6 netacct"]


@pytest.mark.parametrize("settings", [{}, {"host_pods": "cgroup"}, {"datapath": "nftables"}, {"datapath": "iptables"}])
def test_what_is_shown_is_what_would_be_applied(lab: AgentLab, settings: dict[str, str]) -> None:
    """`rules show` prints the rules of the datapath that `rules apply` takes, whatever decides which one that is."""
    sh("iptables-legacy -t mangle -N KUBE-KUBELET-CANARY")
    lab.configure(**({"datapath": "auto"} | settings))
    shown = lab.command("rules", "show").stdout
    done = lab.command("rules", "apply")
    chosen = re.search(r"datapath=(\w+) reason=\"?([^\"\n]*)", done.stderr)
    assert chosen is not None, done.stderr
    assert ("table ip netacct" in shown, "-j NETACCT-TX" in shown) == (chosen[1] == "nftables", chosen[1] == "iptables")
    if "host_pods" in settings:
        assert chosen.groups() == ("nftables", "`host_pods: cgroup` needs it")


def test_on_a_node_without_rules_removal_does_nothing(lab: AgentLab) -> None:
    """Where nothing of netacct is, `remove`, dry or not, says so, logs nothing and leaves no file."""
    for arguments in (["--dry-run"], []):
        done = lab.command("rules", "remove", *arguments)
        assert (done.returncode, done.stdout, done.stderr) == (0, "nothing to remove\n", "")
    assert lab.command("rules", "remove", "--dry-run", "--format", "iptables").stdout == ""
    assert not (lab.folder / "state").exists()


def _feed(command: list[str], text: str) -> None:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert text


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("rules", "frobnicate"), 2, "invalid choice"),
        (("rules", "explain", "10.0.0.300"), 2, "is not an IPv4 or IPv6 address"),
        (("rules", "apply", "--format", "iptables"), 2, "--format is for what --dry-run prints"),
        (("rules", "remove", "--format", "nft"), 2, "--format is for what --dry-run prints"),
        (("pods",), 1, "no agent is running"),
    ],
)
def test_refusals(lab: AgentLab, arguments: tuple[str, ...], code: int, message: str) -> None:
    """A wrong command line is 2, a missing agent is 1, and each says what is wrong."""
    done = lab.command(*arguments)
    assert done.returncode == code
    assert message in done.stderr


def test_bad_files_are_78(lab: AgentLab) -> None:
    """Every command that reads the configuration refuses an error in it with 78 and names file and key."""
    lab.configure(local_range=[])
    for command in ("run", "rules apply", "rules remove", "rules diff", "rules show", "pods"):
        done = lab.command(*command.split())
        assert done.returncode == 78, command
        assert "netacct.yaml:1: local_range: " in done.stderr


def test_a_broken_file_does_not_lock_the_operator_out(lab: AgentLab) -> None:
    """While the file on disk is wrong, commands reach the agent that runs with the one before, and warn."""
    lab.start()
    state, before = lab.folder / "state", (lab.folder / "netacct.yaml").read_text()
    for broken in (before.replace('"policy"', '"polcy"'), f"state_dir: {state}  # here\nlog: [\n"):
        lab.write("netacct.yaml", broken)
        for command in ("pods", "rules diff", "rules remove", "rules apply"):
            done = lab.command(*command.split())
            assert done.returncode == 0, done.stderr
            assert f"netacct: warning: {lab.folder / 'netacct.yaml'}:" in done.stderr
    assert "NETACCT" in tables()
    for unsure in (f"{{state_dir: {state}, log: [\n", "state_dir: state\n"):
        lab.write("netacct.yaml", unsure)
        assert lab.command("rules", "remove").returncode == 78
    assert "NETACCT" in tables()


def test_who_is_not_root_is_told_so(lab: AgentLab) -> None:
    """Without root every command that needs it ends with 77 and says so, and nothing changes."""
    assert lab.command("rules", "apply").returncode == 0
    _let_in(lab.folder)
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all"]
    for command in ("run", "rules apply", "rules remove", "rules diff", "pods"):
        netacct = [sys.executable, "-m", "netacct", *command.split(), "--config.file", str(lab.folder / "netacct.yaml")]
        done = subprocess.run([*nobody, *netacct], capture_output=True, text=True, check=False)
        assert done.returncode == 77, f"{command}: {done.stderr}"
        assert "root" in done.stderr or "CAP_NET_ADMIN" in done.stderr
    assert lab.command("rules", "diff").returncode == 0


def _let_in(folder: Path) -> None:
    """Let everybody read the files of a test below /tmp."""
    for above in (folder, *folder.parents):
        if above == Path("/tmp"):  # noqa: S108 -- where pytest works; never beyond
            return
        above.chmod(0o755)
