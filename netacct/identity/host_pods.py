"""The source `cgroup`: which cgroup is which hostNetwork pod's, for `host_pods: cgroup` (docs/host-pods.md).

Such a pod has no address of its own, so other sources say of it only who it is (an observation of `WHOLE`). The kubelet
makes a cgroup for each pod and puts the pod's uid into its name; the kernel gives each cgroup a number, which nothing
else ever gets. The two together are an observation of that number. A pod's cgroup is its sandbox: while that is there,
it is the pod's, also when those who named the pod no longer do.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from netacct import clock, log
from netacct.following import Follower, Pace, contents
from netacct.identity.source import Health, Replace, SourceEvent
from netacct.model import UNBOUNDED, WHOLE, Address, Observation, cgroup_key

SOURCE = "cgroup"

POLL = 60.0
"""Seconds between looks at everything when nothing was signalled."""

LEVELS = (2, 3)
"""Where a kubelet has its pods: kubepods/podUID, kubepods/burstable/podUID. The root of the tree is 0."""

_DEEPEST = 4
"""So deep in the tree may the kubelet's own cgroup be (`cgroupRoot`, or a kubelet in a container)."""

_KUBEPODS = re.compile(r"(?:.*-)?kubepods(?:\.slice)?")
_POD = re.compile(r"(?:.*-)?pod([0-9a-f][0-9a-f_-]*)(?:\.slice)?")
_QOS = ("burstable", "besteffort")


class Cgroup(NamedTuple):
    """A pod's cgroup: its path below the tree's root, and the key of its counters."""

    path: str
    key: Address


def level(sandbox: str) -> int:
    """How deep a hostNetwork pod's cgroup is, by its lease's sandbox."""
    return sandbox.count("/")


def tree_root(mounts: str = "/proc/self/mountinfo") -> str:
    """Where the whole cgroup v2 tree is mounted; "" where it is not. proc(5) has the format."""
    for line in Path(mounts).read_text(encoding="utf-8", errors="replace").splitlines():
        mount, _, kind = line.partition(" - ")
        fields = mount.split()
        if kind.startswith("cgroup2 ") and fields[3] == "/":
            return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
    return ""


def addresses_only(event: SourceEvent) -> SourceEvent:
    """An event without what it says of hostNetwork pods."""
    return replace(event, observations=tuple(seen for seen in event.observations if seen.ip != WHOLE))


class HostPods:
    """Follows the cgroups of pods, and speaks of those that `learn` heard to be hostNetwork pods.

    Args:
        root: where the cgroup v2 tree is mounted; looked for unless given.
        poll: seconds between looks at everything when nothing was signalled.
    """

    name = SOURCE

    def __init__(self, root: str | None = None, poll: float = POLL) -> None:
        self._root = tree_root() if root is None else root
        self._lock = threading.Lock()
        self._said: dict[tuple[str, str], Observation] = {}
        self._told: dict[Cgroup, Observation] | None = None
        self._cgroups: dict[str, Cgroup] = {}
        self._emit: Callable[[SourceEvent], None] | None = None
        self._log = log.get(source=self.name)
        self._follower = Follower(
            lambda: contents(self._directories()), self._look, Pace(poll), f"source-{self.name}", self._log
        )

    def learn(self, event: SourceEvent) -> None:
        """Hear what another source says. May be called from any thread, also before `start`."""
        with self._lock:
            if isinstance(event, Replace):
                self._said = {key: seen for key, seen in self._said.items() if key[0] != event.source}
            for seen in event.observations:
                if seen.ip == WHOLE and seen.present:
                    self._said[seen.source, seen.pod.uid] = seen
                elif seen.ip == WHOLE:
                    self._said.pop((seen.source, seen.pod.uid), None)
            self._tell()

    def start(self, emit: Callable[[SourceEvent], None]) -> None:
        """Look once, in this call, then follow in a thread."""
        self._emit = emit
        if not self._root:
            self._log.error("hostNetwork pods stay with the host", reason=self.healthy().reason)
        self._follower.start()

    def stop(self) -> None:
        """End the thread and free everything."""
        self._follower.stop()
        with self._lock:
            self._emit = None

    def healthy(self) -> Health:
        """Unhealthy where there is no cgroup v2 tree to be seen."""
        return Health(up=True) if self._root else Health(up=False, reason="the whole cgroup v2 tree is mounted nowhere")

    def once(self, events: Iterable[SourceEvent]) -> Replace:
        """What there is to say now, after these events, without following anything."""
        for event in events:
            self.learn(event)
        self._cgroups = self._find()
        return Replace(self.name, tuple(self._named(clock.now()).values()), clock.now())

    def _directories(self) -> list[str]:
        """The directories in which the cgroups of pods appear: those of kubelets that are there, and the usual ones."""
        if not self._root:
            return []
        usual = [f"{self._root}/{name}" for name in ("kubepods", "kubepods.slice")]
        return [path for top in {*usual, *self._kubepods()} for path in (top, *_qos(top))]

    def _kubepods(self) -> Iterator[str]:
        """The directories of all kubelets."""
        for path, directories, _ in os.walk(self._root):
            depth = path.count("/") - self._root.count("/")
            for name in [name for name in directories if _KUBEPODS.fullmatch(name)]:
                yield f"{path}/{name}"
                directories.remove(name)
            if depth + 1 >= _DEEPEST:
                directories.clear()

    def _find(self) -> dict[str, Cgroup]:
        """The cgroups of all pods that are there, by uid (with dashes)."""
        found: dict[str, Cgroup] = {}
        for top in self._kubepods() if self._root else ():
            for parent in (top, *_qos(top)):
                try:
                    with os.scandir(parent) as entries:
                        for entry in entries:
                            if match := _POD.fullmatch(entry.name):
                                cgroup = Cgroup(entry.path[len(self._root.rstrip("/")) :], cgroup_key(entry.inode()))
                                found[match[1].replace("_", "-")] = cgroup
                except (FileNotFoundError, NotADirectoryError):
                    continue  # no pod of this class yet, or none any more
        return found

    def _look(self, _files: object) -> None:
        with self._lock:
            self._cgroups = self._find()
            self._tell()

    def _tell(self) -> None:
        """Emit what there is to say, where it differs from what was told before."""
        if self._emit is None:
            return
        at = clock.now()
        now = self._named(at)
        for cgroup, seen in (self._told or {}).items():
            if cgroup not in now and cgroup in self._cgroups.values():
                now[cgroup] = seen
        before = {cgroup: replace(seen, seen_at=at) for cgroup, seen in (self._told or {}).items()}
        if self._told is None or before != {cgroup: replace(seen, seen_at=at) for cgroup, seen in now.items()}:
            self._told = now
            self._emit(Replace(self.name, tuple(now.values()), at))

    def _named(self, at: float) -> dict[Cgroup, Observation]:
        """The cgroups of those pods that somebody calls hostNetwork pods, with an owner if anybody names one."""
        found = {}
        for seen in self._said.values():
            cgroup = self._cgroups.get(seen.pod.uid)
            if cgroup is not None and (cgroup not in found or seen.pod.workload):
                found[cgroup] = Observation(self.name, cgroup.key, seen.pod, cgroup.path, UNBOUNDED, at)
        return found


def _qos(kubepods: str) -> list[str]:
    """The directories of the other QoS classes, by either driver's names: kubepods/burstable, or slices of systemd."""
    stem = kubepods.removesuffix(".slice")
    if stem == kubepods:
        return [f"{kubepods}/{name}" for name in _QOS]
    return [f"{kubepods}/{stem.rpartition('/')[2]}-{name}.slice" for name in _QOS]
