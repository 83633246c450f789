"""The agent with a state directory that is full, damaged, or not to be had."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from agentlab import AgentLab, agent_lab, datagrams, until
from support import OTHER_POD, POD, Node, sh

from netacct.errors import EX_CONFIG

pytestmark = pytest.mark.kernel

PODS = {"team-a/a-0": [*POD.values()], "team-b/b-0": [*OTHER_POD.values()]}


@pytest.fixture
def lab(node: Node, tmp_path: Path) -> Iterator[AgentLab]:
    """A node without an agent."""
    with agent_lab(node, tmp_path) as made:
        yield made


@contextlib.contextmanager
def small_disk(lab: AgentLab) -> Iterator[Path]:
    """Agents of the lab get a state directory of half a megabyte; gives its path as seen from here."""
    state = lab.folder / "state"
    state.mkdir()
    script = f"mount -t tmpfs -o size=512k,mode=700 none {state} && echo mounted && exec sleep 300"
    command = ["unshare", "--mount", "--propagation=private", "sh", "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout
            assert holder.stdout.readline() == "mounted\n"
            lab.prefix = ("nsenter", f"--target={holder.pid}", "--mount", "--")
            yield Path(f"/proc/{holder.pid}/root{state}")
        finally:
            lab.kill()
            holder.kill()


def _shows(lab: AgentLab, octets: int) -> None:
    """Wait until exactly this was sent, all of it by a-0."""
    until(lambda: lab.totals() == {("a-0", "internet"): octets})


def fill(file: Path) -> None:
    """Write until the disk is full."""
    with contextlib.suppress(OSError), file.open("wb", buffering=0) as filler:
        while filler.write(bytes(4096)):
            pass


def test_a_full_disk_stops_nothing(lab: AgentLab) -> None:
    """While nothing can be stored the agent counts and serves, says so once, and stores again as soon as it can."""
    with small_disk(lab) as disk:
        lab.start()
        octets = datagrams(lab.node)
        _shows(lab, octets)
        fill(disk / "filler")
        for number in range(3):
            lab.pods({**PODS, f"team-c/c-{number}": [f"10.244.1.{number + 2}"]})  # each is stored, or not
            until(lambda: lab.metric("netacct_leases") == 5)
            octets += datagrams(lab.node)
            _shows(lab, octets)
        assert lab.get("/readyz")[0] == 200
        assert lab.log.count("cannot store the totals") == 1
        (disk / "filler").unlink()
        lab.pods(PODS)
        until(lambda: lab.metric("netacct_leases") == 4)
        lab.kill()
        lab.start()
        octets += datagrams(lab.node)
        _shows(lab, octets)


def test_a_damaged_store_is_put_aside(lab: AgentLab) -> None:
    """A store with rubbish in it is kept under another name, named in the log, and totals begin at 0."""
    lab.start()
    datagrams(lab.node)
    lab.stop()
    database = lab.folder / "state" / "netacct.db"
    database.write_bytes(b"rubbish" * 1000)
    lab.start()
    assert lab.totals() == {}
    assert database.with_name("netacct.db.unusable").read_bytes().startswith(b"rubbish")
    assert "the stored state is not used" in lab.log
    octets = datagrams(lab.node)
    _shows(lab, octets)


def test_without_a_state_directory_nothing_starts(lab: AgentLab) -> None:
    """Where the state directory cannot be made, `run` and `rules apply` say so and end with exit code 1."""
    lab.write("file", "")
    lab.configure(state_dir=str(lab.folder / "file" / "state"))
    for command in ("run", "rules apply"):
        done = lab.command(*command.split())
        assert done.returncode == 1
        assert f"{lab.folder}/file/state: Not a directory" in done.stderr


def test_a_state_directory_that_somebody_removed_comes_back(lab: AgentLab) -> None:
    """An agent whose files in /run were removed makes lock and socket anew, says so, and stays the only one."""
    lab.start()
    shutil.rmtree(lab.folder / "state")
    until(lambda: lab.command("pods").returncode == 0)
    second = lab.command("run")

    assert (second.returncode, "is held" in second.stderr) == (1, True)
    assert "removed the agent's lock or socket, made anew" in lab.log
    octets = datagrams(lab.node)
    _shows(lab, octets)


DATAPATHS = ("iptables", "nftables")


def _rules() -> bool:
    return any("etacct" in sh(show).lower() for show in ("iptables-legacy-save -t mangle", "nft list tables"))


@pytest.mark.parametrize("datapath", DATAPATHS)
def test_rules_can_be_removed_whatever_the_policy_says(lab: AgentLab, datapath: str) -> None:
    """With an error in the policy, `rules remove` books all that was counted and takes the rules away."""
    lab.configure(datapath=datapath)
    assert lab.command("rules", "apply").returncode == 0
    octets = datagrams(lab.node, to="storage")
    lab.write("policy.yaml", "classes: 5")
    assert lab.command("rules", "apply").returncode == EX_CONFIG
    done = lab.command("rules", "remove")
    assert (done.returncode, done.stdout) == (0, "removed\n"), done.stderr
    assert "policy refused, which does not keep rules from being taken away" in done.stderr
    assert not _rules()
    lab.policy()
    lab.start()
    until(lambda: lab.totals() == {("a-0", "storage"): octets})


@pytest.mark.parametrize("datapath", DATAPATHS)
def test_the_kill_switch_needs_no_good_policy_and_no_marks(lab: AgentLab, datapath: str) -> None:
    """`enabled: false` takes rules away with an error in the policy, and with marks that cannot be; totals stay."""
    lab.configure(datapath=datapath)
    lab.start()
    octets = datagrams(lab.node, to="storage")
    sh("iptables-legacy -t mangle -A FORWARD -j MARK --set-mark 0x1")
    lab.write("policy.yaml", "classes: 5")
    until(lambda: lab.metric("netacct_config_last_reload_successful") == 0)
    lab.configure(enabled=False, marks={"mode": "on"})
    until(lambda: not _rules())
    assert lab.totals() == {("a-0", "storage"): octets}
    assert lab.metric("netacct_config_last_reload_successful") == 0
    lab.stop()
    lab.start()
    assert not _rules()
    lab.policy()
    until(lambda: lab.metric("netacct_config_last_reload_successful") == 1)
    lab.configure(enabled=True, marks={"mode": "off"})
    until(lambda: lab.metric("netacct_rules_in_sync") == 1)
    octets += datagrams(lab.node, to="storage", packets=7)
    until(lambda: lab.totals() == {("a-0", "storage"): octets})
