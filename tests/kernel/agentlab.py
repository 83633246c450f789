"""A real `netacct run` on the small node of `support`: its files, its process, its pages, its commands, and traffic."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import support
from support import HEADERS, LOCAL, NODE, OTHER_POD, PATIENCE, PEER, POD, STORAGE, Netns, Node

from netacct.agent import SHARED_SECONDS
from netacct.demo import exposition
from netacct.model import Family

WEB = 19112

SIZE = 172  # bytes of payload: 200 with IPv4 headers, 220 with IPv6 ones

_POLICY = """\
classes:
  pod: {cidrs: [10.244.0.0/16, "fd00:10:244::/48"]}
  node: {cidrs: [192.168.50.0/24]}
  service: {cidrs: [10.96.0.0/12]}
  private: {builtin: private}
%s
default: internet
"""
_STORAGE = '  storage: {cidrs: [198.51.100.0/24, "2001:db8:5::/48"]}'

PodName = tuple[str, str]
"""Namespace and name."""


@dataclass
class AgentLab:
    """A node and the files of one agent on it."""

    node: Node
    folder: Path
    agent: subprocess.Popen[bytes] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    prefix: tuple[str, ...] = ()  # the command that runs agents

    def configure(self, **changes: Any) -> None:
        """Write netacct.yaml; keys keep the values of earlier calls."""
        self.settings |= changes
        config = {
            "policy": str(self.folder / "policy.yaml"),
            "local_ranges": list(LOCAL.values()),
            "datapath": "iptables",
            "marks": {"mode": "off"},
            "identity": {"sources": ["file"], "file": {"path": str(self.folder / "pods.yaml")}, "late_binding": "2s"},
            "metrics": {"zero_first": "0s"},
            "state_dir": str(self.folder / "state"),
            "accounts_dir": str(self.folder / "accounts"),
            "web": {"listen_address": [f"127.0.0.1:{WEB}"]},
            **self.settings,
        }
        self.write("netacct.yaml", json.dumps(config))

    def policy(self, *, storage: bool = True) -> None:
        """Write policy.yaml, with or without the class `storage`."""
        self.write("policy.yaml", _POLICY % (_STORAGE if storage else ""))

    def pods(self, owners: Mapping[str, Sequence[str]]) -> None:
        """Write pods.yaml: `namespace/name` -> addresses."""
        entries = []
        for name, ips in owners.items():
            namespace, _, pod = name.partition("/")
            owner = {"kind": "Job", "name": pod.rpartition("-")[0] or pod}
            entries.append(
                {"namespace": namespace, "name": pod, "uid": f"uid-{name}", "ips": list(ips), "owner": owner}
            )
        self.write("pods.yaml", json.dumps({"pods": entries}))

    def write(self, name: str, text: str) -> None:
        """Replace a file in one step."""
        fresh = self.folder / f"{name}.new"
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(self.folder / name)

    def start(self, *, wait: bool = True, **environ: str) -> subprocess.Popen[bytes]:
        """Start `netacct run`, and wait until it is ready."""
        assert support.in_private_namespace()
        with self.log_file.open("ab") as log:
            self.agent = subprocess.Popen(
                [*self.prefix, sys.executable, "-m", "netacct", "run", *self._config],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | environ,
            )
        if wait:
            support.eventually(self.is_ready)
        return self.agent

    def kill(self) -> None:
        """End the agent with SIGKILL."""
        if self.agent is not None:
            self.agent.kill()
            self.agent.wait(PATIENCE)
            self.agent = None

    def stop(self) -> None:
        """End the agent with SIGTERM."""
        assert self.agent is not None
        self.agent.send_signal(signal.SIGTERM)
        code = self.agent.wait(PATIENCE)
        self.agent = None
        assert code == 0, self.log

    def hang_up(self) -> None:
        """Send SIGHUP."""
        assert self.agent is not None
        if "ready" in self.log.rpartition("starting")[2]:  # before its handler is there, the signal would end it
            self.agent.send_signal(signal.SIGHUP)

    def reload(self) -> None:
        """Send SIGHUP and wait until it was taken or refused."""
        seen = self.log.count("reload")
        self.hang_up()
        support.eventually(lambda: self.log.count("reload") > seen)

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `netacct ARGUMENTS` with the configuration of the lab."""
        assert support.in_private_namespace()
        return subprocess.run(
            [sys.executable, "-m", "netacct", *arguments, *self._config],
            capture_output=True,
            text=True,
            check=False,
            timeout=2 * PATIENCE,
        )

    def spawn(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Run `netacct ARGUMENTS` without waiting for it."""
        assert support.in_private_namespace()
        quiet = subprocess.DEVNULL
        return subprocess.Popen(
            [sys.executable, "-m", "netacct", *arguments, *self._config], stdin=quiet, stdout=quiet, stderr=quiet
        )

    @property
    def _config(self) -> tuple[str, str]:
        return "--config.file", str(self.folder / "netacct.yaml")

    @property
    def log_file(self) -> Path:
        """Where all agents of the lab log to."""
        return self.folder / "agent.log"

    @property
    def log(self) -> str:
        """What they logged so far."""
        return self.log_file.read_text(encoding="utf-8")

    def get(self, path: str, timeout: float = PATIENCE, headers: Mapping[str, str] | None = None) -> tuple[int, str]:
        """Status and body of a page. Raises OSError where nobody answers."""
        connection = http.client.HTTPConnection("127.0.0.1", WEB, timeout=timeout)
        with contextlib.closing(connection):
            connection.request("GET", path, headers=dict(headers or {}))
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    def is_ready(self) -> bool:
        """Whether /readyz says so; fails where the agent has ended."""
        assert self.agent is None or self.agent.poll() is None, self.log
        with contextlib.suppress(OSError, http.client.HTTPException):
            return self.get("/readyz")[0] == 200
        return False

    def page(self) -> str:
        """/metrics, as the second of two scrapes: the first shows new series as 0.

        A worker that has no time for scrapes shows what it showed last; then it is asked again, some times.
        """
        for _ in range(10):
            self.get("/metrics")
            status, body = self.get("/metrics")
            age = re.search(r"^netacct_reading_age_seconds (\S+)$", body, re.MULTILINE)
            if status == 200 and (age is None or float(age[1]) < 2 * SHARED_SECONDS):
                break
        assert status == 200
        return body

    def metric(self, name: str, **labels: str) -> float | None:
        """One sample of a scrape; None where it is not there."""
        found = [value for key, own, value in exposition.samples(self.page()) if key == name and own == labels]
        return found[0] if found else None

    def totals(self, level: str = "pod", direction: str = "transmit") -> dict[tuple[str, str], int]:
        """Bytes by (pod or "", traffic) of one level, without zeros; all pods have different names."""
        return totals(self.page(), level, direction)

    def booked(self, direction: str = "transmit") -> Counter[str]:
        """All bytes of pods' addresses by class, whether anybody owned them or not."""
        sums: Counter[str] = Counter()
        page = self.page()
        for level in ("pod", "unattributed"):
            for (_, traffic), octets in totals(page, level, direction).items():
                sums[traffic] += octets
        return sums


def totals(page: str, level: str, direction: str) -> dict[tuple[str, str], int]:
    """Bytes by (name, traffic) of a page."""
    name = f"netacct_{level}_{direction}_bytes_total"
    return {
        (labels.get("pod", ""), labels["traffic"]): int(value)
        for key, labels, value in exposition.samples(page)
        if key == name and value
    }


@contextlib.contextmanager
def agent_lab(node: Node, folder: Path) -> Iterator[AgentLab]:
    """A lab with the files of a normal node: two pods. The agent is killed in the end."""
    lab = AgentLab(node, folder)
    lab.configure()
    lab.policy()
    lab.pods({"team-a/a-0": POD.values(), "team-b/b-0": OTHER_POD.values()})  # type: ignore[dict-item]  # any order will do
    try:
        yield lab
    finally:
        lab.kill()


def datagrams(
    node: Node, source: str = "pod", to: str = "internet", packets: int = 10, family: Family = 4, size: int = SIZE
) -> int:
    """Send from one place to another and wait until all arrived; returns the bytes (layer 3)."""
    return node.send(family, _end(node, source, family), _end(node, to, family), packets, size).bytes


def _end(node: Node, place: str, family: Family) -> tuple[Netns, str]:
    return {
        "pod": (node.pod, POD[family]),
        "other": (node.other_pod, OTHER_POD[family]),
        "internet": (node.peer, PEER[family]),
        "storage": (node.peer, STORAGE[family]),
        "node": (node.netns, NODE[family]),
    }[place]


class Stream:
    """Datagrams from one place to another, all the time but when held; `sent` are the bytes so far (layer 3)."""

    def __init__(self, node: Node, source: str, to: str, family: Family = 4, pause: float = 0.004) -> None:
        space, address = _end(node, source, family)
        target, self._to = _end(node, to, family)
        self.source, self.to, self.sent = source, to, 0
        self._family, self._pause = family, pause
        self._sender = space.socket(family, address, 0)
        self._sink = _sink(target, family, self._to)
        self._ended, self._moving, self._idle = threading.Event(), threading.Event(), threading.Event()
        self._moving.set()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        port = self._sink.getsockname()[1]
        while not self._ended.is_set():
            if not self._moving.is_set():
                self._idle.set()
                self._moving.wait(0.05)
                continue
            self._idle.clear()
            self._sender.sendto(bytes(SIZE), (self._to, port))
            self.sent += SIZE + HEADERS[self._family]
            self._ended.wait(self._pause)
        self._idle.set()

    def hold(self) -> None:
        """Send nothing until `go`."""
        self._moving.clear()
        self._idle.clear()
        assert self._idle.wait(PATIENCE)

    def go(self) -> None:
        """Send again."""
        self._moving.set()

    def stop(self) -> int:
        """End it; returns the bytes."""
        self._ended.set()
        self._thread.join(PATIENCE)
        self._sender.close()
        self._sink.close()
        return self.sent


def _sink(space: Netns, family: Family, address: str) -> socket.socket:
    """Where datagrams end, unread: a bound socket keeps ICMP errors away."""
    return space.socket(family, address, 0)


@contextlib.contextmanager
def streams(node: Node, *ways: tuple[str, str]) -> Iterator[list[Stream]]:
    """Several streams for the length of a `with` block; when it is left they are quiet."""
    running = [Stream(node, source, to, family) for source, to in ways for family in (4, 6)]
    try:
        yield running
    finally:
        for stream in running:
            stream.stop()


def until(condition: Callable[[], Any]) -> None:
    """Wait for what an agent does within seconds."""
    support.eventually(condition)
