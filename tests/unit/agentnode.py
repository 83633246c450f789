"""A node with an agent on a datapath in memory, for tests of what the agent does when."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from netacct import clock, config, policy_file
from netacct.accounting import accounts_read
from netacct.accounting.encoding import Checkpoint
from netacct.accounting.store import Store
from netacct.agent import Agent
from netacct.books import Books
from netacct.errors import DatapathError, StoreError
from netacct.identity.source import Replace, SourceEvent
from netacct.kernel.base import Keep, keep_nothing
from netacct.kernel.fake import FakeDatapath, FakeKernel
from netacct.kernel.plan import Plan
from netacct.model import (
    UNBOUNDED,
    Address,
    CounterKey,
    Direction,
    Level,
    Observation,
    Pod,
    Scope,
    Snapshot,
    family_of,
    pack,
)

A, B = pack("10.244.1.10"), pack("10.244.1.11")
INTERNET = CounterKey(4, Scope.POD, Direction.TRANSMIT, "internet")


class Recorder(FakeDatapath):
    """Writes down what is called, and fails where it is told to."""

    def __init__(self, kernel: FakeKernel, calls: list[str]) -> None:
        super().__init__(kernel)
        self.calls = calls
        self.broken: set[str] = set()

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.broken:
            raise DatapathError(f"{name} is broken")

    def adopt(self, plan: Plan) -> None:
        """See `Datapath.adopt`."""
        self._plan = plan

    def install(self, plan: Plan, keep: Keep = keep_nothing) -> Snapshot:
        """See `Datapath.install`."""
        self._call("install")
        return super().install(plan, keep)

    def read(self) -> Snapshot:
        """See `Datapath.read`."""
        self._call("read")
        return super().read()

    def add(self, ips: Any) -> None:
        """See `Datapath.add`."""
        self._call("add")
        super().add(ips)

    def remove(self, keep: Keep = keep_nothing) -> Snapshot:
        """See `Datapath.remove`."""
        self._call("remove")
        return super().remove(keep)


class RecordingStore(Store):
    """Writes down what is called, and fails where it is told to."""

    calls: list[str]
    broken = False

    def save(self, checkpoint: Checkpoint) -> None:
        """See `Store.save`."""
        self.calls.append("save")
        if self.broken:
            raise StoreError("no space left")
        super().save(checkpoint)


class Node:
    """Files, kernel and store of a node; `begin` starts an agent on it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.kernel, self.calls = folder, FakeKernel(), list[str]()
        self.configure()

    def configure(self, **changes: Any) -> config.Config:
        """Write netacct.yaml and read it."""
        policy = self.folder / "policy.yaml"
        policy.write_text("classes: {pod: {}, node: {}, service: {}, private: {builtin: private}}\ndefault: internet\n")
        keys = {
            "policy": str(policy),
            "local_ranges": ["10.244.1.0/28"],
            "marks": {"mode": "off"},
            "metrics": {"zero_first": "0s"},
            "state_dir": str(self.folder / "state"),
            "accounts_dir": str(self.folder / "accounts"),
            **changes,
        }
        (self.folder / "netacct.yaml").write_text(json.dumps(keys))
        self.config = config.load(str(self.folder / "netacct.yaml"))
        for directory in (self.config.state_dir, self.config.accounts_dir):
            assert Path(directory).is_relative_to(self.folder), "a test writes to the host's own directory"
        self.policy = policy_file.load(self.config.policy)
        return self.config

    def begin(self, owners: dict[Address, str] | None = None, *events: SourceEvent) -> Agent:
        """A new agent, with new books from the store; `events` are what sources said, beside the list of a file."""
        self.datapath = Recorder(self.kernel, self.calls)
        self.store = RecordingStore(Path(self.config.state_dir))
        self.store.calls = self.calls
        self.books = Books(self.store, self.config, ["file", "cni"])
        agent = Agent(self.config, self.policy, self.datapath, self.books)
        agent.start(frozenset(), [pods(owners or {A: "a"}), *events])
        self.calls.clear()
        return agent

    def count(self, ip: Address, octets: int) -> None:
        """The kernel counts what an address sent to the internet."""
        self.kernel.count(INTERNET._replace(family=family_of(ip)), ip, octets)

    def sent(self) -> dict[str, int]:
        """Bytes by pod, as booked; unattributed ones under `""`."""
        found: dict[str, int] = {}
        for key, count in self.books.ledger.totals.items():
            if key.level in (Level.POD, Level.UNATTRIBUTED):
                name = key.labels[1] if key.labels else ""
                found[name] = found.get(name, 0) + count.bytes
        return {name: octets for name, octets in found.items() if octets}

    def accounts(self) -> list[tuple[str, int]]:
        """Name and bytes of each lease that has closed, in the order of the file."""
        records = accounts_read.read_directory(Path(self.config.accounts_dir), lambda _event, **_fields: None)
        return [(record.pod, sum(count.bytes for count in record.counts.values())) for record in records]


def pods(owners: dict[Address, str]) -> Replace:
    """The list of a file: address -> name of a pod."""
    at = clock.now()
    seen = [Observation("file", ip, Pod("n", name, name), "", UNBOUNDED, at) for ip, name in owners.items()]
    return Replace("file", tuple(seen), at)
