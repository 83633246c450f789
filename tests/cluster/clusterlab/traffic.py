"""Commands of known traffic: what `traffic` (traffic.c) is told, and what its sockets saw."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterable
from typing import NamedTuple

SERVER = "/bin/traffic"
HEADERS = {4: 20 + 8, 6: 40 + 8}
"""Bytes of IP and UDP headers."""


class Exchange(NamedTuple):
    """What the socket at one end of an exchange saw: bytes of payload."""

    protocol: str
    peer: str
    port: int
    sent: int
    received: int


def udp(address: str, port: int, count: int = 20, size: int = 500, reply: int = 300) -> str:
    """A shell command: datagrams of known size, each answered."""
    return f"traffic udp {address} {port} {count} {size} {reply}"


def tcp(address: str, port: int, up: int = 200_000, down: int = 300_000) -> str:
    """A shell command: so many bytes there, then so many back."""
    return f"traffic tcp {address} {port} {up} {down}"


def greet(address: str, port: int) -> str:
    """A shell command: a TCP connection to a server that does not know `traffic`, closed by that."""
    return f"traffic tcp {address} {port} 16 any"


def flow(targets_file: str, size: int = 400, reply: int = 200) -> tuple[str, ...]:
    """A container's command: while the file is there, datagrams to each target of it (`targets_text`), 15 a second."""
    return (SERVER, "flow", targets_file, str(size), str(reply))


def targets_text(targets: Iterable[tuple[str, int]]) -> str:
    """Addresses and ports in the form that `flow` reads."""
    return "".join(f"{address} {port}\n" for address, port in targets)


def script(commands: Iterable[str]) -> tuple[str, ...]:
    """A container's command: one after the other; fails with the first that fails."""
    return ("/bin/sh", "-ec", "\n".join(commands))


def exchanges(output: str) -> list[Exchange]:
    """What sockets saw, from the output of a client or a server."""
    return [Exchange(**json.loads(line)) for line in output.splitlines() if line.startswith("{")]


def family(address: str) -> int:
    """4 or 6."""
    return ipaddress.ip_address(address).version


def pod_address(pod: dict[str, dict[str, list[dict[str, str]]]], version: int) -> str:
    """The address of a pod as `kubectl get` gives it."""
    return next(each["ip"] for each in pod["status"]["podIPs"] if family(each["ip"]) == version)
