"""The units in systemd/, read as systemd reads them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from netacct import service
from netacct.kernel import modules

SYSTEMD = Path(__file__).parents[2] / "systemd"
UNIT = SYSTEMD / "netacct.service"

EXPOSURE_LIMIT = 2.5
"""As `systemd-analyze security` counts it; 2.1 when this was written, with the two capabilities that stay."""


def settings() -> dict[str, list[str]]:
    """All values of each key of the unit, in order."""
    found: dict[str, list[str]] = {}
    for line in UNIT.read_text().splitlines():
        key, separator, value = line.partition("=")
        if separator and not line.startswith("#"):
            found.setdefault(key, []).append(value)
    return found


def test_state_outlives_the_service() -> None:
    """The runtime directory holds this boot's totals, so the unit keeps it when the service stops."""
    unit = settings()
    assert unit["RuntimeDirectory"] == ["netacct"]
    assert unit["RuntimeDirectoryPreserve"] == ["yes"]
    assert unit["RuntimeDirectoryMode"] == ["0700"]
    assert unit["StateDirectory"] == ["netacct"]


def test_errors_that_no_retry_mends_are_not_retried() -> None:
    """The exit codes for permission and configuration end the service; others restart it."""
    unit = settings()
    assert unit["Restart"] == ["on-failure"]
    assert unit["RestartPreventExitStatus"] == ["77 78"]
    assert unit["StartLimitIntervalSec"] == ["0"]


def test_firewalls_come_first() -> None:
    """The unit starts after the services that load a whole ruleset, and requires or delays none of anybody's."""
    unit = settings()
    after = {name for line in unit["After"] for name in line.split()}
    assert after >= {
        "network-pre.target",
        "nftables.service",
        "netfilter-persistent.service",
        "iptables.service",
        "ip6tables.service",
        "firewalld.service",
        "ufw.service",
    }
    assert not unit.keys() & {"Requires", "Requisite", "BindsTo", "PartOf", "Before"}
    assert all(name.startswith("modprobe@") for line in unit["Wants"] for name in line.split())


def test_the_watchdog_watches_the_worker() -> None:
    """Readiness and signs of life come from the main process, at several rounds of its loop per watchdog."""
    unit = settings()
    assert (unit["Type"], unit["NotifyAccess"]) == (["notify"], ["main"])
    assert float(unit["WatchdogSec"][0].removesuffix("s")) >= 4 * service.IDLE_SECONDS


def test_the_lock_is_writable_and_exists() -> None:
    """The xtables lock is the one file in /run that may be written, if it is there; tmpfiles.d makes it for root."""
    assert settings()["ReadWritePaths"] == ["-/run/xtables.lock"]
    assert settings()["ReadOnlyPaths"] == ["/run", "/etc/netacct"]
    lines = [x for x in (SYSTEMD / "tmpfiles.d/netacct.conf").read_text().splitlines() if not x.startswith("#")]
    assert lines == ["f /run/xtables.lock 0600 root root -"]


def test_all_modules_are_loaded_and_none_must_be_there() -> None:
    """Each module that some rule needs is wanted of the service that tolerates its absence, and waited for."""
    needed = {module for some in (*modules.NEEDED.values(), modules.HOST_PODS) for module in some}
    unit = settings()
    for setting in ("Wants", "After"):
        names = [name for line in unit[setting] for name in line.split() if name.startswith("modprobe@")]
        assert sorted(names) == sorted(f"modprobe@{module}.service" for module in needed)


@pytest.fixture
def analyzed(tmp_path: Path) -> Path:
    """The unit with a program that exists, for systemd-analyze."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/netacct/bin/netacct", "/bin/true"))
    return copy


def test_systemd_accepts_the_unit(analyzed: Path) -> None:
    """`systemd-analyze verify` finds nothing to say."""
    done = subprocess.run(["systemd-analyze", "verify", str(analyzed)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_unit_stays_hardened(analyzed: Path) -> None:
    """`systemd-analyze security` rates the exposure at or below the limit."""
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(analyzed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    match = re.search(r"Overall exposure level for netacct\.service: ([0-9.]+)", done.stdout)
    assert match is not None, done.stderr
    assert float(match[1]) <= EXPOSURE_LIMIT
