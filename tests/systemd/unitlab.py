"""netacct as a unit on a Debian machine: files, state as systemd sees it, real traffic, and what must be counted."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import agentlab
import support
from agentlab import AgentLab
from nspawn import Machine
from support import LOCAL, OTHER_POD, POD, Netns

UNIT = "netacct.service"
OWNERS = {"pod": "a-0", "other": "b-0"}
SHARED = 1.1  # seconds after which a scrape makes a reading of its own

# The node's own addresses come up after the agent, which finds them; here it knows them, so that no test has to wait.
_POLICY = """\
classes:
  pod: {cidrs: [10.244.0.0/16, "fd00:10:244::/48"]}
  node: {cidrs: [203.0.113.1/32, "2001:db8::1/128"]}
  service: {cidrs: [10.96.0.0/12]}
  private: {builtin: private}
  storage: {cidrs: [198.51.100.0/24, "2001:db8:5::/48"]}
default: internet
"""


class MachineNetns(Netns):
    """The network namespace of a machine; a reboot gives it another."""

    def __init__(self, leader: int) -> None:
        self._fd = os.open(f"/proc/{leader}/ns/net", os.O_RDONLY | os.O_CLOEXEC)


class UnitLab:
    """A machine with two pods and a peer. `sent` is what must be on the page: bytes by (pod, traffic, direction)."""

    def __init__(self, machine: Machine, folder: Path) -> None:
        self.machine = machine
        self.sent: Counter[tuple[str, str, str]] = Counter()
        self._folder = folder
        self._stack = contextlib.ExitStack()

    def boot(self, datapath: str) -> None:
        """Write the unit's configuration, boot, and give the machine its pods."""
        etc = self.machine.upper / "etc/netacct"
        etc.mkdir(parents=True)
        (etc / "policy.yaml").write_text(_POLICY)
        (etc / "netacct.yaml").write_text(
            json.dumps(
                {
                    "policy": "/etc/netacct/policy.yaml",
                    "datapath": datapath,
                    "local_ranges": list(LOCAL.values()),
                    "metrics": {"zero_first": "0s"},
                }
            )
        )
        # Every node has it, minimal trees have not; and the unit has it hidden from the agent.
        (self.machine.upper / "usr/lib/modules" / os.uname().release).mkdir(parents=True)
        self.machine.boot()
        self.connect()

    def connect(self) -> None:
        """Give the machine its pods; they are new after each boot, as its network is."""
        self._stack.close()
        netns = MachineNetns(self.machine.leader)
        self._stack.callback(netns.close)
        self.node = self._stack.enter_context(support.node(netns))
        self._http = AgentLab(self.node, self._folder)
        self.pods()

    def close(self) -> None:
        """Let the pods go."""
        self._stack.close()

    def pods(self) -> None:
        """Write pods.yaml, which the running agent sees for itself."""
        entries = [
            {"namespace": "lab", "name": OWNERS[place], "uid": f"uid-{place}", "ips": list(ips)}
            for place, ips in (("pod", POD.values()), ("other", OTHER_POD.values()))
        ]
        self.write("/etc/netacct/pods.yaml", json.dumps({"pods": entries}))
        support.eventually(lambda: "accounting 4 addresses" in self.show("StatusText"))

    def rules(self) -> str:
        """Everything in the kernel that somebody put there to handle packets, in both datapaths, without counters."""
        return self.machine.run(
            "for all in iptables ip6tables; do $all-legacy -t mangle -S; done; ipset list -name; nft -s list ruleset"
        )

    def write(self, path: str, text: str) -> None:
        """Replace a file of the machine in one step, as tools that configure machines do."""
        fresh = self.machine.path(f"{path}.new")
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(self.machine.path(path))

    def drop_in(self, text: str) -> None:
        """Change the unit, as `systemctl edit` does; for its next start."""
        self.machine.run(f"mkdir -p /etc/systemd/system/{UNIT}.d")
        self.write(f"/etc/systemd/system/{UNIT}.d/override.conf", text)
        self.machine.run("systemctl daemon-reload")

    def show(self, name: str) -> str:
        """A property of the unit."""
        return self.machine.run(f"systemctl show --property={name} --value {UNIT}")

    def pid(self) -> int:
        """The unit's main process, as the machine numbers it."""
        return int(self.show("MainPID"))

    def until_restarted(self, before: int) -> None:
        """Wait until systemd has put another process in the place of `before`, and it is ready."""
        support.eventually(lambda: self.pid() not in (0, before) and self.show("ActiveState") == "active", 120)

    def traffic(self) -> None:
        """Send some datagrams on each way of each family, each way another number, and note what must be booked."""
        ways = (
            ("pod", "internet", 3),
            ("internet", "pod", 5),
            ("pod", "other", 7),
            ("other", "storage", 2),
            ("pod", "node", 4),
        )
        for source, to, packets in ways:
            for family in (4, 6):
                octets = agentlab.datagrams(self.node, source, to, packets, family)
                if source in OWNERS:
                    self.sent[OWNERS[source], "pod" if to in OWNERS else to, "transmit"] += octets
                if to in OWNERS:
                    self.sent[OWNERS[to], "pod" if source in OWNERS else source, "receive"] += octets

    def booked(self) -> dict[tuple[str, str, str], int]:
        """What the page says, in the form of `sent`; bytes without an owner come under ""."""
        page = self.node.netns.run(self._http.page)
        return {
            (pod, traffic, direction): octets
            for level in ("pod", "unattributed")
            for direction in ("receive", "transmit")
            for (pod, traffic), octets in agentlab.totals(page, level, direction).items()
        }

    def metric(self, name: str) -> float | None:
        """A sample without labels."""
        return self.node.netns.run(lambda: self._http.metric(name))

    def accounts(self) -> dict[tuple[str, str, str], int]:
        """The accounts of finished leases, in the form of `sent`."""
        return {
            (account["pod"], traffic, direction): count["bytes"]
            for account in json.loads(self.machine.run("netacct accounts --by pod -o json"))
            for direction in ("receive", "transmit")
            for traffic, count in account[direction].items()
        }

    def check(self) -> None:
        """Fails unless each byte that was sent is booked once, and no other."""
        time.sleep(SHARED)
        booked, sent = self.booked(), dict(self.sent)
        wrong = {key: (booked.get(key, 0), sent.get(key, 0)) for key in booked.keys() | sent.keys()}
        wrong = {key: pair for key, pair in wrong.items() if pair[0] != pair[1]}
        assert not wrong, f"(booked, sent): {wrong}\n{self.journal()}"

    def journal(self) -> str:
        """What the unit wrote and what systemd said about it, in this boot."""
        return self.machine.run(f"journalctl --boot --no-pager --output=short-monotonic --unit={UNIT}")


@contextlib.contextmanager
def unit_lab(machine: Machine, folder: Path) -> Iterator[UnitLab]:
    """A lab for the length of a `with` block."""
    lab = UnitLab(machine, folder)
    try:
        yield lab
    finally:
        lab.close()
