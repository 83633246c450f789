"""What is known of pods besides who they are: owner and labels, by uid, whoever told it, for all addresses. Pure.

The sources that know an address first know the least: CNI sees neither owner nor labels, nor does anybody but CNI see a
second network's address. So what one source tells of a pod holds for each of its leases, as long as one is remembered:
a source that falls silent, or that says of a pod that it has ended, does not make its owner unknown. Worker
thread only.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

from netacct.model import Pod

TELLERS = frozenset({"kubelet-pods-api", "kubelet", "apiserver"})
"""The sources that tell the owner of each pod. (A file tells that of its own pods, at once.)"""

_ROOM = 1024
"""So many more pods than are remembered may have names, before those of the others are forgotten."""


class _Told(NamedTuple):
    """Who told it (0 is trusted most), when, and what."""

    rank: int
    seen_at: float
    pod: Pod

    def yields_to(self, other: _Told) -> bool:
        """Whether the other is to be believed instead."""
        return other.rank < self.rank or (other.rank == self.rank and other.seen_at >= self.seen_at)


class Names:
    """Owners and labels. A `uid` is whatever tells pods apart."""

    def __init__(self) -> None:
        self._owners: dict[str, _Told] = {}
        self._labels: dict[str, _Told] = {}

    def note(self, uid: str, rank: int, seen_at: float, pod: Pod) -> bool:
        """Note what a source of this rank tells; whether anything is known now that was not.

        Who tells an owner tells the labels too, also that there are none.
        """
        told = _Told(rank, seen_at, pod)
        news = False
        if pod.workload:
            known = self._owners.get(uid)
            news = known is None or (known.pod.workload_kind, known.pod.workload) != (pod.workload_kind, pod.workload)
            if known is None or known.yields_to(told):
                self._owners[uid] = told
        if pod.workload or pod.labels:
            known = self._labels.get(uid)
            news = news or known is None or known.pod.labels != pod.labels
            if known is None or known.yields_to(told):
                self._labels[uid] = told
        return news

    def fill(self, uid: str, pod: Pod) -> Pod:
        """The pod, with the owner and the labels that are known of it in the place of those that it lacks."""
        owner, labels = self._owners.get(uid), self._labels.get(uid)
        if owner and not pod.workload:
            pod = replace(pod, workload_kind=owner.pod.workload_kind, workload=owner.pod.workload)
        if labels and labels.pod.labels and not pod.labels:
            pod = replace(pod, labels=labels.pod.labels)
        return pod

    def has_excess(self, pods: int) -> bool:
        """Whether there are names of many more than so many pods."""
        return max(len(self._owners), len(self._labels)) > pods + _ROOM

    def keep(self, uids: Collection[str]) -> None:
        """Forget all others."""
        self._owners = {uid: told for uid, told in self._owners.items() if uid in uids}
        self._labels = {uid: told for uid, told in self._labels.items() if uid in uids}
