"""What the service manager is told: sd_notify(3), one datagram per message, without libsystemd."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping


class Notifier:
    """Talks to the service manager; does nothing where there is none.

    Args:
        address: the value of NOTIFY_SOCKET: an absolute path, or `@` and the name of an abstract socket; "" for none.
        watchdog_seconds: how long the manager waits for a `watchdog` before it kills us; None where it does not.
    """

    def __init__(self, address: str = "", watchdog_seconds: float | None = None) -> None:
        # "@" stands for the leading NUL of abstract sockets (unix(7)); others (vsock:) are for virtual machines.
        self._address = address.replace("@", "\0", 1) if address.startswith("@") else address
        self._enabled = address.startswith(("/", "@"))
        self.watchdog_seconds = watchdog_seconds if self._enabled else None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Notifier:
        """As sd_notify(3) and sd_watchdog_enabled(3) read NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID."""
        return cls(environ.get("NOTIFY_SOCKET", ""), _watchdog(environ))

    def ready(self, status: str) -> bool:
        """Started, or done with a reload."""
        return self._send("READY=1", _status(status))

    def status(self, status: str) -> bool:
        """One line for `systemctl status`."""
        return self._send(_status(status))

    def reloading(self) -> bool:
        """A reload begins; `ready` ends it. The manager wants to know when, to tell this reload from another."""
        usec = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        return self._send("RELOADING=1", f"MONOTONIC_USEC={usec}", "STATUS=reloading")

    def stopping(self) -> bool:
        """A clean stop begins."""
        return self._send("STOPPING=1", "STATUS=stopping")

    def watchdog(self) -> bool:
        """Still alive; to be sent, by the thread that does the work, at half of `watchdog_seconds` or sooner."""
        return self._send("WATCHDOG=1")

    def extend(self, seconds: float) -> bool:
        """Start, stop or reload takes longer: wait so many more seconds from now."""
        return self._send(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")

    def _send(self, *assignments: str) -> bool:
        """True where the datagram was handed over. A manager that does not listen is never a reason to stop."""
        if not self._enabled:
            return False
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
                channel.settimeout(1.0)
                channel.connect(self._address)
                channel.sendall("\n".join(assignments).encode())
        except OSError:
            return False
        return True


def _status(text: str) -> str:
    return "STATUS=" + " ".join(text.splitlines())


def _watchdog(environ: Mapping[str, str]) -> float | None:
    usec, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not usec.isdecimal() or int(usec) == 0 or (pid and pid != str(os.getpid())):
        return None
    return int(usec) / 1e6
