"""The source `kubelet-pods-api`: all pods of this node, pushed by its kubelet over a socket that only root can use.

Kubernetes 1.37 serves it by default (KEP-4188, feature gate PodsAPI). No API server and no token is involved, and the
kubelet tells its own view: also pods that the API server has not heard of yet. Every so often the watch begins anew:
its beginning is a list of everything, and in order with what follows it, which a list beside a watch would not be.
"""

from __future__ import annotations

import contextlib
import os
import random
import stat
from collections.abc import Callable, Collection, Iterator, Sequence

from netacct import clock, log
from netacct.following import Follower, Pace, entries
from netacct.identity import grpc_messages
from netacct.identity.grpc_calls import Caller, CallError, Connection
from netacct.identity.kube_pod import KubePod
from netacct.identity.kube_proto import from_proto
from netacct.identity.pod_book import PodBook
from netacct.identity.source import Health, SourceEvent
from netacct.log import Repeats
from netacct.sleeper import Sleeper, Why

SOURCE = "kubelet-pods-api"

SOCKETS = (
    "/var/lib/kubelet/pods-api/pods-api.sock",
    "/var/lib/k0s/kubelet/pods-api/pods-api.sock",
    "/var/lib/kubelet/pods/kubelet.sock",
)
"""Where the kubelet of 1.37 has it, in its root directory (pkg/kubelet/kubelet_getters.go), which k0s has elsewhere
(docs.k0sproject.io, directories); and where KEP-4188 says that it is.
"""

SERVICES = ("v1alpha1.Pods", "v1beta1.Pods", "v1.Pods")
"""What the service may be called, the present name first."""

RELIST = 300.0
"""Seconds after which the watch begins anew, on average: the kubelet drops events for a reader that it finds slow."""

RETRY, RETRY_LIMIT = 0.5, 30.0
"""Seconds before the next attempt after the first that failed, and after many."""

PATIENCE = 10.0
"""Seconds that the list at the beginning may take, and after which a watch that ended counts as one that worked."""

_RESTARTING = 4
"""So many attempts in a row, eight seconds of them, fail without a warning."""

POLL = 30.0
"""Seconds between looks for the socket when nothing was signalled."""

TROUBLE_SECONDS = 300.0
"""The same trouble is logged again after so long."""

_LIMIT = 4 << 20
"""Bytes of a message, which is of one pod: more than etcd takes (1.5 MiB)."""

_ADDED, _MODIFIED, _DELETED, _SYNCED = 1, 2, 3, 4
"""EventType (kubernetes/kubelet, pkg/apis/pods/v1alpha1/api.proto)."""


class KubeletPodsApi:
    """Watches the kubelet's pods: a `Replace` at each beginning of the watch, an `Update` for each change after it.

    What was told holds while there is no kubelet to be asked, also where its socket is gone. A pod that cannot be
    decoded is passed over, and takes nothing back.

    Args:
        sockets: where the kubelet may serve it (absolute paths); the first that answers is watched.
        labels: the keys of the pod labels to tell.
        relist: seconds after which the watch begins anew, on average.
        networks: the secondary networks whose addresses count (see `multus`).
    """

    name = SOURCE

    def __init__(
        self,
        sockets: Sequence[str] = SOCKETS,
        labels: Collection[str] = (),
        relist: float = RELIST,
        networks: Collection[str] = (),
    ) -> None:
        self._sockets, self._labels, self._relist = tuple(sockets), tuple(labels), relist
        self._networks = frozenset(networks)
        self._emit: Callable[[SourceEvent], None] = lambda _: None
        self._found: dict[str, tuple[int, int]] = {}
        self._services: tuple[str, ...] = SERVICES
        self._book = PodBook(SOURCE, self._labels)
        self._failures = 0
        self._asked: float | None = None
        self._heard: float | None = None
        self._health = Health(up=False, reason="not asked yet", present=False)
        self._repeats = Repeats(TROUBLE_SECONDS)
        self._log = log.get(source=self.name)
        self._caller = Caller(_LIMIT)
        self._sleeper = Sleeper(f"source-{self.name}")
        self._follower = Follower(
            lambda: (entry for path in self._sockets for entry in entries(path)),
            self._look,
            Pace(POLL),
            f"socket-{self.name}",
            self._log,
        )

    def start(self, emit: Callable[[SourceEvent], None]) -> None:
        """Begin to watch. `emit` is called from the thread, never from this call."""
        self._emit = emit
        self._book = PodBook(SOURCE, self._labels)
        self._caller.begin()
        self._follower.start()
        self._sleeper.start(self._run)

    def stop(self) -> None:
        """End the watch and the threads. Idempotent."""
        self._follower.stop()
        self._caller.end()
        self._sleeper.stop()

    def healthy(self) -> Health:
        """Whether the watch runs and began with all pods, and how long ago the kubelet said something."""
        health, asked, heard = self._health, self._asked, self._heard
        if asked is not None and clock.now() - asked > PATIENCE:
            health = Health(up=False, reason=f"the kubelet did not list its pods within {PATIENCE:.0f} s")
        return health._replace(age=None if heard is None else clock.now() - heard)

    def _look(self, _files: object) -> None:
        """Look for sockets; a new one is tried at once."""
        found = _stamps(self._sockets)
        if found != self._found:
            self._found = found
            self._sleeper.wake()

    def _run(self) -> None:
        pause = 0.0
        while (why := self._sleeper.sleep(pause)) is not Why.STOP:
            if why is Why.WOKEN:
                self._failures = 0
            pause = self._turn()

    def _turn(self) -> float:
        """Watch as long as it goes; returns the pause before the next time, in seconds."""
        began = clock.now()
        if not self._found:
            was_there = self._heard is not None
            self._health = Health(up=False, reason="the kubelet has no Pods API socket", present=was_there)
            return RETRY_LIMIT
        try:
            self._watch_any(tuple(self._found))
        except Exception as error:  # noqa: BLE001 -- a source that died would go unnoticed
            self._complain(error)
        finally:
            self._asked = None
        if clock.now() - began > PATIENCE:
            self._failures = 0
            return 0.0 if self._health.up else RETRY
        self._failures = min(self._failures + 1, 10)
        pause = min(RETRY * 2.0 ** (self._failures - 1), RETRY_LIMIT)
        return pause * random.uniform(0.5, 1.5)  # noqa: S311 -- spreads nodes, guards nothing

    def _complain(self, error: Exception) -> None:
        """Say why there is no watch; in the log only when it lasts longer than a restart of the kubelet."""
        known = isinstance(error, CallError)
        self._health = Health(up=False, reason=str(error) if known else f"{type(error).__name__}: {error}")
        hangs = self._asked is not None and clock.now() - self._asked > PATIENCE
        ended = isinstance(error, CallError) and error.code == "CANCELLED"
        if (hangs or self._failures >= _RESTARTING) and not ended and self._repeats.due(self._health.reason):
            self._log.warning("cannot watch the kubelet's pods, trying again", error=self._health.reason)

    def _watch_any(self, paths: Sequence[str]) -> None:
        """Watch at the first of these sockets where somebody serves it. Raises CallError, of the first, for none."""
        first: CallError | None = None
        for path in paths:
            try:
                self._watch(path)
            except CallError as error:
                if error.code not in {"UNAVAILABLE", "UNIMPLEMENTED"}:
                    raise
                first = first or error
            else:
                return
        if first:
            raise first

    def _watch(self, path: str) -> None:
        """Watch at this socket, by whichever name the service has. Raises CallError."""
        with self._caller.connect(path) as connection:
            for service in self._services:
                try:
                    self._follow(connection, service)
                except CallError as error:
                    if error.code != "UNIMPLEMENTED" or service == self._services[-1]:
                        raise
                else:
                    return

    def _follow(self, connection: Connection, service: str) -> None:
        """Watch until it is time to begin anew. Raises CallError where the kubelet ended it."""
        asked = self._asked = clock.now()
        listed = False
        seconds = self._relist * random.uniform(0.7, 1.3)  # noqa: S311 -- as below
        stream = connection.stream(f"/{service}/WatchPods", b"", seconds)
        try:
            listed = self._begin(stream, asked)
            self._services = (service, *(each for each in self._services if each != service))
            for data in stream:
                if not self._change(*self._decode(data)):
                    return
        except CallError as error:
            if error.code != "DEADLINE_EXCEEDED" or not listed:
                raise
            return
        raise CallError(connection.path, "OK")

    def _begin(self, stream: Iterator[bytes], asked: float) -> bool:
        """Take the list with which the watch begins; returns False where the stream ended before it did."""
        listed: dict[str, KubePod] = {}
        complete = True
        for data in stream:
            kind, pod = self._decode(data)
            if kind == _SYNCED:
                break
            if pod is None:
                complete = False
            elif kind in {_ADDED, _MODIFIED}:
                listed[pod.uid] = pod
            elif kind == _DELETED:
                listed.pop(pod.uid, None)
        else:
            return False
        self._asked = None
        if complete and not self._health.up:
            self._log.info("watching the kubelet's pods", pods=len(listed))
        self._health = Health(up=complete, reason="" if complete else "not all pods of the kubelet are understood")
        if event := self._book.fill(listed.values(), asked, complete=complete):
            self._emit(event)
        return True

    def _change(self, kind: int, pod: KubePod | None) -> bool:
        """Take a change; returns False where it shows that events were lost, or came out of order."""
        if pod is None or kind not in {_ADDED, _MODIFIED, _DELETED}:
            return True
        if kind == _MODIFIED and pod.uid not in self._book:
            return False  # perhaps of a pod that is gone: the kubelet sends without holding the lock of what it tells
        event = self._book.drop(pod.uid, clock.now()) if kind == _DELETED else self._book.put(pod, clock.now())
        if event:
            self._emit(event)
        return True

    def _decode(self, data: bytes) -> tuple[int, KubePod | None]:
        """The type of an event, and its pod; (0, None) for what is not understood."""
        self._heard = clock.now()
        try:
            event = grpc_messages.decode(grpc_messages.pods_api()["WatchPodsEvent"], data)
            return event.type, from_proto(event.pod, self._labels, self._networks)
        except ValueError as error:
            if self._repeats.due("not understood"):
                self._log.warning("the kubelet says something that is not understood, ignoring it", why=str(error))
            return 0, None


def _stamps(paths: Sequence[str]) -> dict[str, tuple[int, int]]:
    """The sockets that there are, each with what tells it from the one that was there before (inode, ctime in ns)."""
    found = {}
    for path in paths:
        with contextlib.suppress(OSError):
            status = os.stat(path)  # noqa: PTH116 -- plain strings all through
            if stat.S_ISSOCK(status.st_mode):
                found[path] = (status.st_ino, status.st_ctime_ns)
    return found
