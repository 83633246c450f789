"""The whole demo, with the real agent: exact, and gone afterwards however it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from netacct.demo import cni

pytestmark = pytest.mark.kernel

KEYS = {"namespace", "pod", "direction", "traffic", "family", "sent_bytes", "counted_bytes"}
PATIENCE = 60.0


@pytest.fixture
def temporary(tmp_path: Path) -> Iterator[Path]:
    """A temporary directory of the demo's own, which it must leave empty."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    yield folder
    assert list(folder.iterdir()) == []


def start(temporary: Path, *flags: str) -> subprocess.Popen[str]:
    """Start the demo in a session of its own, so that its processes can be told from all others."""
    return subprocess.Popen(
        [sys.executable, "-m", "netacct", "demo", *flags],
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def agents(temporary: Path) -> list[int]:
    """The pids of agents that use a configuration below that directory."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue  # it has ended meanwhile
        if b"run" in command and any(str(temporary).encode() in word for word in command):
            found.append(int(process.name))
    return found


def wait_for_agent(temporary: Path) -> int:
    """The pid of the agent, as soon as it runs."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if found := agents(temporary):
            return found[0]
        time.sleep(0.05)
    raise AssertionError("no agent was started")


def wait_for_no_agent(temporary: Path) -> bool:
    """Whether all agents end by themselves."""
    end = time.monotonic() + PATIENCE
    while agents(temporary) and time.monotonic() < end:
        time.sleep(0.05)
    return agents(temporary) == []


@pytest.mark.parametrize("pods", ["cni", "veth"])
def test_every_series_is_exact(temporary: Path, pods: str) -> None:
    """The agent counts what was sent, to the byte, in both families, however pods are made, and nothing stays."""
    if pods == "cni" and cni.plugins() is None:
        pytest.skip("no CNI plugins here (Debian package containernetworking-plugins)")
    demo = start(temporary, "-o", "json", f"--pods={pods}")
    out, err = demo.communicate(timeout=120)
    assert demo.returncode == 0, out + err
    assert re.search("^netacct demo: it counts by (iptables|nftables)$", err, re.MULTILINE)
    document = json.loads(out)
    assert document["exact"] is True
    assert {frozenset(series) for series in document["series"]} == {frozenset(KEYS)}
    assert {series["family"] for series in document["series"]} == {"ipv4", "ipv6"}
    assert all(series["sent_bytes"] == series["counted_bytes"] > 0 for series in document["series"])
    assert agents(temporary) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_leaves_nothing(temporary: Path, number: signal.Signals) -> None:
    """Interrupted in the middle, the demo stops its agent, removes its files, and says that it was interrupted."""
    demo = start(temporary)
    wait_for_agent(temporary)
    demo.send_signal(number)
    out, err = demo.communicate(timeout=60)
    assert demo.returncode == 130, out + err
    assert agents(temporary) == []


def test_killed_agent_is_a_failure(temporary: Path) -> None:
    """When the agent dies, the demo says so, exits with 1, and cleans up."""
    demo = start(temporary)
    os.kill(wait_for_agent(temporary), signal.SIGKILL)
    _, err = demo.communicate(timeout=60)
    assert demo.returncode == 1
    assert "the agent ended with exit code -9" in err
    assert agents(temporary) == []


def test_killed_demo_takes_its_agent_along(temporary: Path) -> None:
    """Nobody can clean up after kill -9, but the agent ends, and the next run removes the folder."""
    demo = start(temporary)
    wait_for_agent(temporary)
    demo.kill()
    demo.communicate(timeout=60)
    assert wait_for_no_agent(temporary)
    assert len(list(temporary.iterdir())) == 1
    following = start(temporary)
    wait_for_agent(temporary)
    assert len(list(temporary.iterdir())) == 1
    following.terminate()
    following.communicate(timeout=60)


@pytest.mark.parametrize(
    ("datapath", "words"), [("iptables", "iptables-legacy-save"), ("nftables", "list table ip netacct")]
)
def test_keep_goes_on_until_it_is_told_to_stop(temporary: Path, datapath: str, words: str) -> None:
    """With --keep the result is printed, then commands to look around that work, and Ctrl-C ends it in order."""
    demo = start(temporary, "--keep", "-o", "json", f"--datapath={datapath}")
    assert demo.stderr is not None
    hints = []
    for line in demo.stderr:
        hints.append(line)
        if "agent's log" in line:
            break
    kernel, rules, pods = (
        subprocess.run(line.split(), capture_output=True, text=True, check=True).stdout
        for wanted in (words, "rules diff", " pods ")
        for line in hints
        if wanted in line and "nsenter" in line
    )
    demo.send_signal(signal.SIGINT)
    out, err = demo.communicate(timeout=60)
    assert demo.returncode == 0, out + err
    assert "netacct" in kernel.lower()
    assert rules == ""
    assert "train-0" in pods
    assert json.loads(out)["exact"] is True
