"""What a watched source knows of a node's pods, and which events follow from what it hears: pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from netacct.identity.kube_pod import KubePod, observations
from netacct.identity.source import Replace, Update
from netacct.model import Observation


class PodBook:
    """The pods by uid. Times are CLOCK_BOOTTIME seconds: when the source learnt it.

    Args:
        source: its name.
        labels: the keys of the labels to tell.
    """

    def __init__(self, source: str, labels: Collection[str] = ()) -> None:
        self._source, self._labels = source, labels
        self._pods: dict[str, KubePod] | None = None

    def __contains__(self, uid: str) -> bool:
        return uid in (self._pods or ())

    def __len__(self) -> int:
        return len(self._pods or ())

    def fill(self, pods: Iterable[KubePod], at: float, *, complete: bool = True) -> Replace | None:
        """These are the pods of now; None where that is no news.

        Args:
            pods: all of them.
            at: when the source asked for them.
            complete: False where some may be missing. Then nothing is taken back.
        """
        now = {pod.uid: pod for pod in pods}
        if not complete:
            now = (self._pods or {}) | now
        if now == self._pods:
            return None
        self._pods = now
        return Replace(self._source, self._observations(now.values(), at), at)

    def put(self, pod: KubePod, at: float) -> Update | None:
        """This pod is new, or has changed; None where it has not."""
        if self._pods is None:
            self._pods = {}
        before, self._pods[pod.uid] = self._pods.get(pod.uid), pod
        if before == pod:
            return None
        now = self._observations([pod], at)
        kept = {seen.ip for seen in now}
        gone = self._taken_back(before, at) if before else ()
        told = (*(seen for seen in gone if seen.ip not in kept), *now)
        return Update(self._source, told) if told else None

    def drop(self, uid: str, at: float) -> Update | None:
        """The pod of this uid is gone; None where nobody was told of it, or it owned nothing."""
        before = (self._pods or {}).pop(uid, None)
        told = self._taken_back(before, at) if before else ()
        return Update(self._source, told) if told else None

    def _observations(self, pods: Iterable[KubePod], at: float) -> tuple[Observation, ...]:
        return observations(self._source, pods, at, self._labels)

    def _taken_back(self, pod: KubePod, at: float) -> tuple[Observation, ...]:
        return tuple(replace(seen, present=False) for seen in self._observations([pod], at) if seen.present)
