"""sd_notify, against real datagram sockets."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from netacct.systemd import Notifier


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    """A service manager's socket and its NOTIFY_SOCKET, in both kinds of address."""
    path = str(tmp_path / "notify")
    address = path if request.param == "path" else f"@netacct-test-{os.getpid()}-{time.monotonic_ns()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind(address.replace("@", "\0"))
        channel.settimeout(2)
        yield channel, address


def test_each_state_is_one_datagram(manager: tuple[socket.socket, str]) -> None:
    """Every method sends exactly the assignments that sd_notify(3) defines for it."""
    channel, address = manager
    notifier = Notifier.from_environment({"NOTIFY_SOCKET": address})
    sent = [
        (notifier.ready("counting 3 pods"), b"READY=1\nSTATUS=counting 3 pods"),
        (notifier.status("one\nline"), b"STATUS=one line"),
        (notifier.stopping(), b"STOPPING=1\nSTATUS=stopping"),
        (notifier.watchdog(), b"WATCHDOG=1"),
        (notifier.extend(1.5), b"EXTEND_TIMEOUT_USEC=1500000"),
    ]
    assert [(True, channel.recv(4096)) for _ in sent] == sent


def test_a_reload_tells_its_time(manager: tuple[socket.socket, str]) -> None:
    """RELOADING=1 comes with the present CLOCK_MONOTONIC in microseconds."""
    channel, address = manager
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    assert Notifier(address).reloading()
    match = re.fullmatch(rb"RELOADING=1\nMONOTONIC_USEC=(\d+)\nSTATUS=reloading", channel.recv(4096))
    assert match is not None
    assert before <= int(match[1]) <= time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000


@pytest.mark.parametrize("address", ["", "vsock:2:1", "relative"])
def test_without_a_manager_nothing_happens(address: str) -> None:
    """No NOTIFY_SOCKET, or one of a kind that is not ours to use, makes every call a quiet no."""
    notifier = Notifier.from_environment({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "1000000"})
    assert not notifier.ready("x")
    assert notifier.watchdog_seconds is None


def test_a_manager_that_is_gone_is_no_error(tmp_path: Path) -> None:
    """A socket that nobody listens on is a quiet no, never an exception."""
    assert not Notifier(str(tmp_path / "gone")).status("x")


@pytest.mark.parametrize(
    ("usec", "pid", "seconds"),
    [
        ("60000000", None, 60.0),
        ("60000000", "self", 60.0),
        ("60000000", "1", None),
        ("0", None, None),
        ("soon", None, None),
        (None, None, None),
    ],
)
def test_the_watchdog_is_for_this_process_only(usec: str | None, pid: str | None, seconds: float | None) -> None:
    """WATCHDOG_USEC counts when it is a number above 0 and WATCHDOG_PID, if set, is this process."""
    environ = {"NOTIFY_SOCKET": "/nowhere"}
    if usec is not None:
        environ["WATCHDOG_USEC"] = usec
    if pid is not None:
        environ["WATCHDOG_PID"] = str(os.getpid()) if pid == "self" else pid
    assert Notifier.from_environment(environ).watchdog_seconds == seconds
