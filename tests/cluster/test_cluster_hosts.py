"""Hosts without Kubernetes: namespaces, services, links, and what becomes of them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from clusterlab import leftovers, plan, prerequisites
from clusterlab.hosts import Fabric, Host, HostError, until

pytestmark = pytest.mark.cluster

_HARNESS = """
import sys, time
from pathlib import Path
from clusterlab import plan
from clusterlab.hosts import Fabric, Host
fabric = Fabric(Path(sys.argv[1]) / "c")
host = Host("one", plan.host(1), fabric)
host.serve("sleeper", ["sleep", "1000"])
print(fabric.pid, host.pid, flush=True)
time.sleep(1000)
"""


@pytest.fixture
def fabric(tmp_path: Path) -> Iterator[Fabric]:
    """A bridge without hosts."""
    try:
        prerequisites.require()
    except prerequisites.MissingError as error:
        pytest.skip(f"no hosts here: {error}")
    made = Fabric(tmp_path / "c")
    yield made
    made.kill()


@contextlib.contextmanager
def _host(fabric: Fabric, number: int) -> Iterator[Host]:
    made = Host(f"host{number}", plan.host(number), fabric)
    try:
        yield made
    finally:
        made.kill()


def test_hosts_reach_each_other(fabric: Fabric) -> None:
    """Hosts on one fabric reach each other in both families."""
    with _host(fabric, 1) as one, _host(fabric, 2):
        for family, address in plan.host(2).items():
            one.run(["busybox", "ping", f"-{family}", "-c", "1", "-w", "60", address])


def test_a_service_is_stopped_and_started(fabric: Fabric) -> None:
    """A service runs until it is stopped, runs again when started, and is another process then."""
    with _host(fabric, 1) as host:
        host.serve("sleeper", ["bash", "-c", "echo $$ $WORD; exec sleep 1000"], WORD="said")
        until(lambda: "said" in host.read_log("sleeper"), 60, "nothing logged")
        host.stop("sleeper")
        assert not host.runs("sleeper")
        host.start("sleeper")
        until(lambda: host.read_log("sleeper").count("said") == 2, 60, "nothing logged")
        assert host.runs("sleeper")
        first, second = host.read_log("sleeper").splitlines()
        assert first != second


def test_a_command_that_fails_is_told(fabric: Fabric) -> None:
    """A command that fails raises what it printed, with the host's name."""
    with _host(fabric, 1) as host, pytest.raises(HostError, match=r"host1: .*no such thing"):
        host.run(["bash", "-c", "echo no such thing >&2; exit 3"])


def test_the_machine_is_not_changed(fabric: Fabric) -> None:
    """What a host writes below /etc and /var is in the host only."""
    with _host(fabric, 1) as host:
        host.write("/etc/netacct-written", "inside")
        host.run(["mkdir", "/var/lib/netacct-written"])
        assert not Path("/etc/netacct-written").exists()
        assert not Path("/var/lib/netacct-written").exists()
        host.reboot()
        assert host.run(["cat", "/etc/netacct-written"]).stdout == "inside"


def test_hosts_end_with_their_harness(tmp_path: Path) -> None:
    """When the harness is killed, its hosts end with all their processes."""
    argv = [sys.executable, "-c", _HARNESS, str(tmp_path)]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environ) as harness:
        assert harness.stdout is not None
        pids = [int(word) for word in harness.stdout.readline().split()]
        assert len(pids) == 2
        assert all(Path("/proc", str(pid)).exists() for pid in pids)
        harness.kill()
    until(lambda: not any(Path("/proc", str(pid)).exists() for pid in pids), 60, "hosts outlive their harness")


def test_leftovers_of_the_dead_are_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders named by a process that has ended are removed, those of one that lives are not."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ended = subprocess.Popen(["true"])
    ended.wait()
    dead, alive = (tmp_path / f"{leftovers.PREFIX}{pid}-cluster-x" for pid in (ended.pid, os.getpid()))
    for folder in (dead, alive):
        folder.mkdir()
        folder.joinpath("file").touch()
    leftovers.sweep()
    assert [entry.name for entry in tmp_path.iterdir()] == [alive.name]
