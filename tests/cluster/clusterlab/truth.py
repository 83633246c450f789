"""What pods really sent and received: nftables counters in each pod's own network namespace, by flow.

A thread per node watches /run/netns and puts the counters in as soon as containerd has made a namespace, while the CNI
plugins are still at work, and long before there is a process in it: so the first packet is counted. Where that came too
late, the namespace's own statistics say so, and reading fails. The namespace is held by a descriptor, so that its
counters can be read when the pod is gone.

Who lives in a namespace is taken from the sandbox's OCI specification, which containerd writes when the sandbox starts,
and not from libcni's results, which the agent reads.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from clusterlab.hosts import HostError, inside
from netacct.inotify import Inotify

Direction = Literal["transmit", "receive"]

_NETNS = "run/netns"
_TASKS = "run/containerd/io.containerd.runtime.v2.task/k8s.io"
_KEY = "{address} . inet_proto . inet_service . inet_service"
_RULES = """\
table inet truth {{
{sets}
  chain out {{
    type filter hook output priority 0
    oifname lo return
    ip6 saddr {{ ::, fe80::/10 }} return
    meta l4proto {{ tcp, udp }} goto out-flows
    add @out4 {{ ip daddr . meta l4proto . 0 . 0 counter }} return
    add @out6 {{ ip6 daddr . meta l4proto . 0 . 0 counter }}
  }}
  chain out-flows {{
    add @out4 {{ ip daddr . meta l4proto . th sport . th dport counter }} return
    add @out6 {{ ip6 daddr . meta l4proto . th sport . th dport counter }}
  }}
  chain in {{
    type filter hook prerouting priority -300
    iifname lo return
    ip daddr 224.0.0.0/3 return
    ip6 daddr {{ fe80::/10, ff00::/8 }} return
    meta l4proto {{ tcp, udp }} goto in-flows
    add @in4 {{ ip saddr . meta l4proto . 0 . 0 counter }} return
    add @in6 {{ ip6 saddr . meta l4proto . 0 . 0 counter }}
  }}
  chain in-flows {{
    add @in4 {{ ip saddr . meta l4proto . th dport . th sport counter }} return
    add @in6 {{ ip6 saddr . meta l4proto . th dport . th sport counter }}
  }}
}}
"""
_SETS = {"out4": "ipv4_addr", "in4": "ipv4_addr", "out6": "ipv6_addr", "in6": "ipv6_addr"}
_TALK = (
    *("Ip:InReceives", "Ip:OutRequests", "Tcp:InSegs", "Tcp:OutSegs"),
    *("Udp6InDatagrams", "Udp6NoPorts", "Udp6OutDatagrams", "Icmp6InEchos", "Icmp6OutEchos"),
)
_POD = "io.kubernetes.cri.sandbox-"


class PodId(NamedTuple):
    """Which pod."""

    namespace: str
    name: str
    uid: str


class Flow(NamedTuple):
    """What is counted together, as the pod sees it, outside of any NAT of the node; ports are 0 but for TCP and UDP."""

    direction: Direction
    peer: str
    protocol: str
    own_port: int
    peer_port: int


class Count(NamedTuple):
    """Layer-3 bytes, and packets."""

    bytes: int
    packets: int

    def plus(self, other: Count) -> Count:
        """The sum."""
        return Count(self.bytes + other.bytes, self.packets + other.packets)


Flows = dict[Flow, Count]


@dataclass
class _Space:
    """A pod's network namespace: a descriptor that holds it, its pod where known, whether it was metered too late.

    `final` are its last counters, when it is gone; the descriptor is closed then.
    """

    path: Path
    descriptor: int
    late: bool
    pod: PodId | None = None
    final: Flows | None = None

    def read(self) -> Flows:
        """The counters of now."""
        if self.final is not None:
            return self.final
        gone = not self.path.exists()  # containerd removes it when the plugins have taken the interface away
        flows = _read(self.descriptor)
        if gone:
            self.close(flows)
        return flows

    def close(self, flows: Flows) -> None:
        """Nothing is counted any more."""
        if self.final is None:
            os.close(self.descriptor)
            self.final = flows


class Truth:
    """The counters of all pods of one node, also of those that are gone."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._spaces: dict[str, _Space] = {}
        self._reading = threading.Lock()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._wake = os.pipe()
        self._trouble = ""

    def follow(self, root: Path) -> None:
        """Meter every pod from now on; `root` is the node's file system."""
        assert self._thread is None
        self._thread = threading.Thread(target=self._run, args=(root,), name=f"truth-{self._name}", daemon=True)
        started = threading.Event()
        self._started = started
        self._thread.start()
        assert started.wait(60), self._trouble

    def leave(self) -> None:
        """The node goes down: follow no more, and forget. Totals live one boot, those of agents too."""
        if self._thread is not None:
            os.write(self._wake[1], b"x")
            self._thread.join(60)
            self._thread = None
        with self._reading, self._lock:
            for space in self._spaces.values():
                space.close({})
            self._spaces.clear()

    def close(self) -> None:
        """Let go of all."""
        self.leave()
        for end in self._wake:
            os.close(end)

    def read(self) -> dict[PodId, Flows]:
        """All counters of this boot of each pod, over all its sandboxes. Raises HostError where truth is not known."""
        with self._reading:
            return self._read()

    def _read(self) -> dict[PodId, Flows]:
        assert not self._trouble, self._trouble
        with self._lock:
            spaces = dict(self._spaces)
        found: dict[PodId, Flows] = {}
        for name, space in spaces.items():
            flows = space.read()
            if flows and (space.late or space.pod is None):
                pod = space.pod or "a pod that nobody knows"
                raise HostError(f"{self._name}: {pod} in {name}: {'metered too late' if space.late else 'no sandbox'}")
            if space.pod is not None:
                mine = found.setdefault(space.pod, {})
                for flow, count in flows.items():
                    mine[flow] = mine.get(flow, Count(0, 0)).plus(count)
        return found

    def _run(self, root: Path) -> None:
        # nobody waits for it: on a busy machine it must be the first to run, or it comes after the first packet
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), -10)
        try:
            self._watch(root)
        except Exception as error:  # noqa: BLE001 -- a thread has nobody to raise to: the next reading tells
            self._trouble = f"{self._name}: the watch of pods' namespaces ended: {error!r}"
        finally:
            self._started.set()

    def _watch(self, root: Path) -> None:
        folder, tasks = root / _NETNS, root / _TASKS
        notes = Inotify()
        try:
            notes.watch(str(folder))
            self._started.set()
            poll = select.poll()
            poll.register(notes.fd, select.POLLIN)
            poll.register(self._wake[0], select.POLLIN)
            patience = 0
            while not any(fd == self._wake[0] for fd, _ in poll.poll(patience)):
                notes.events()
                pending = self._meter_new(folder)
                unknown = self._name_new(tasks)
                patience = 2 if pending else 20 if unknown else 1000
            os.read(self._wake[0], 1)
        finally:
            notes.close()

    def _meter_new(self, folder: Path) -> bool:
        """Meter what has no counters yet; returns whether a namespace is there half-made."""
        pending = False
        for entry in os.listdir(folder):  # noqa: PTH208 -- a name is all that is needed
            if entry in self._spaces:
                continue
            descriptor = _namespace(folder / entry)
            if descriptor is None:
                pending = folder.joinpath(entry).exists()
                continue
            late = _meter(descriptor)
            with self._lock:
                self._spaces[entry] = _Space(folder / entry, descriptor, late)
        return pending

    def _name_new(self, tasks: Path) -> bool:
        """Find out whose namespaces they are; returns whether some are not known yet."""
        unknown = {name: space for name, space in self._spaces.items() if space.pod is None}
        if unknown:
            for name, pod in _sandboxes(tasks):
                if name in unknown:
                    unknown[name].pod = pod
        return any(space.pod is None for space in unknown.values())


def totals(flows: Flows) -> Counter[tuple[Direction, str]]:
    """Bytes by direction and peer."""
    sums: Counter[tuple[Direction, str]] = Counter()
    for flow, count in flows.items():
        sums[flow.direction, flow.peer] += count.bytes
    return sums


def _namespace(path: Path) -> int | None:
    """A descriptor of the namespace that is mounted there; None while it is still an empty file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    if os.fstat(descriptor).st_dev == Path("/proc/self/ns/net").stat().st_dev:
        return descriptor
    os.close(descriptor)
    return None


def _meter(descriptor: int) -> bool:
    """Put the counters in; returns whether something was sent or received before."""
    sets = "\n".join(
        f"  set {name} {{ type {_KEY.format(address=kind)}; size 65535; flags dynamic; }}"
        for name, kind in _SETS.items()
    )
    with inside(descriptor):
        subprocess.run(
            ["nft", "-f", "-"], input=_RULES.format(sets=sets), text=True, check=True, timeout=120, capture_output=True
        )
        return _has_talked()


def _has_talked() -> bool:
    """Whether the namespace of this thread has sent or received anything but what kernels say unasked by ICMPv6."""
    counts: dict[str, int] = {}
    # /proc/net/snmp has a line of names and one of values for each protocol, snmp6 a name and a value in each line
    lines = Path("/proc/thread-self/net/snmp").read_text(encoding="ascii").splitlines()
    for names, values in zip(lines[::2], lines[1::2], strict=True):
        protocol, *keys = names.split()
        counts |= {protocol + key: int(value) for key, value in zip(keys, values.split()[1:], strict=True)}
    for line in Path("/proc/thread-self/net/snmp6").read_text(encoding="ascii").splitlines():
        key, value = line.split()
        counts[key] = int(value)
    return any(counts[key] for key in _TALK)


def _sandboxes(tasks: Path) -> list[tuple[str, PodId]]:
    """The name of the network namespace and the pod of every sandbox that lives."""
    found = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(tasks):
            with contextlib.suppress(OSError, ValueError, KeyError):
                document = json.loads(Path(entry.path, "config.json").read_text(encoding="utf-8"))
                notes = document["annotations"]
                if notes["io.kubernetes.cri.container-type"] != "sandbox":
                    continue
                pod = PodId(notes[f"{_POD}namespace"], notes[f"{_POD}name"], notes[f"{_POD}uid"])
                spaces = document["linux"]["namespaces"]
                paths = [space["path"] for space in spaces if space["type"] == "network" and space.get("path")]
                found += [(Path(path).name, pod) for path in paths]
    return found


def _read(descriptor: int) -> Flows:
    with inside(descriptor):
        done = subprocess.run(
            ["nft", "-nj", "list", "table", "inet", "truth"], check=True, timeout=120, capture_output=True, text=True
        )
    flows: Flows = {}
    for item in json.loads(done.stdout)["nftables"]:
        found = item.get("set")
        for element in found.get("elem", []) if found else []:
            peer, protocol, own, other = element["elem"]["val"]["concat"]
            direction: Direction = "transmit" if found["name"].startswith("out") else "receive"
            count = element["elem"]["counter"]
            flow = Flow(direction, peer, _protocol(protocol), int(own), int(other))
            flows[flow] = Count(count["bytes"], count["packets"])
    return flows


def _protocol(value: str | int) -> str:
    names = {socket.IPPROTO_TCP: "tcp", socket.IPPROTO_UDP: "udp"}
    return names.get(int(value), str(value)) if str(value).isdigit() else str(value)
