"""The source `cri`: the pod sandboxes of this node's container runtime, asked for by CRI every so often.

It knows when exactly a sandbox was made and which addresses it has, and works where nothing else of Kubernetes can be
asked; it does not know owners. The runtime's stream of events (GetContainerEvents) is not used: containerd holds up the
start of pods while a subscriber of it is slow (containerd, internal/eventq/eventq.go).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from netacct import clock
from netacct.errors import NetacctError
from netacct.identity import grpc_messages
from netacct.identity.grpc_calls import Caller, CallError, Connection
from netacct.identity.kube_pod import addresses
from netacct.identity.polling import INTERVAL, AbsentError, Poller
from netacct.identity.source import Health, SourceEvent
from netacct.model import UNBOUNDED, WHOLE, Address, Observation, Pod

SOURCE = "cri"

SOCKETS = (
    "/run/containerd/containerd.sock",
    "/run/crio/crio.sock",
    "/run/k3s/containerd/containerd.sock",  # k3s and RKE2
    "/run/k0s/containerd.sock",
    "/run/cri-dockerd.sock",
    "/var/snap/microk8s/common/run/containerd.sock",
)
"""Where runtimes serve CRI."""

SECONDS = 5.0
"""An answer may take so long."""

_LIMIT = 16 << 20
"""Bytes of a message: as many as the kubelet itself takes (kubernetes/cri-client, pkg/utils.go)."""

_LIST, _STATUS = (f"/runtime.v1.RuntimeService/{name}" for name in ("ListPodSandbox", "PodSandboxStatus"))

_NOBODY = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED"})
"""The codes of a call that came to no answer about the sandbox."""

_READY, _NODE = 0, 2
"""PodSandboxState and NamespaceMode (kubernetes/cri-api, pkg/apis/runtime/v1/api.proto)."""


class CriSource:
    """Lists the ready sandboxes, and asks for the addresses of those that are new. See `Poller`.

    Where there are several runtimes, all are asked: a containerd of Docker's knows no pods. One that has answered must
    go on answering: else what is known of all holds.

    Args:
        sockets: where a runtime may serve CRI (absolute paths).
        labels: the keys of the pod labels to tell.
        needed: False while a better source is up.
        interval: seconds between two questions, on average.
    """

    name = SOURCE

    def __init__(
        self,
        sockets: Sequence[str] = SOCKETS,
        labels: Collection[str] = (),
        needed: Callable[[], bool] = lambda: True,
        interval: float = INTERVAL,
    ) -> None:
        self._sockets, self._labels = tuple(sockets), tuple(labels)
        self._answered: set[str] = set()
        self._known: dict[str, tuple[Observation, ...]] = {}
        self._caller = Caller(_LIMIT)
        self._poller = Poller(SOURCE, self._ask, needed, interval)

    def start(self, emit: Callable[[SourceEvent], None]) -> None:
        """Begin to ask, in a thread."""
        self._caller.begin()
        self._poller.start(emit)

    def stop(self) -> None:
        """End the thread, and the question that is under way. Idempotent."""
        self._caller.end()
        self._poller.stop()

    def hurry(self) -> None:
        """Somebody's bytes have no owner: ask soon. From any thread."""
        self._poller.hurry()

    def healthy(self) -> Health:
        """Whether the last question was answered, and how long ago the last answer came."""
        return self._poller.healthy()

    def _ask(self, at: float) -> Iterator[Observation]:
        """The observations of now. Raises CallError, and AbsentError where there is no runtime."""
        paths = _sockets(self._sockets)
        if missing := self._answered.difference(paths):
            raise CallError(min(missing), "UNAVAILABLE", "no socket")
        known: dict[str, tuple[Observation, ...]] = {}
        failed: list[CallError] = []
        for path in paths:
            try:
                with self._caller.connect(path) as connection:
                    known |= self._sandboxes(connection, at)
            except CallError as error:
                if path in self._answered:
                    raise
                failed.append(error)
        self._require(paths, failed)
        self._answered.update(path for path in paths if path not in {error.path for error in failed})
        self._known = {sandbox: seen for sandbox, seen in known.items() if seen}
        return (replace(each, seen_at=at) for seen in self._known.values() for each in seen)

    def _require(self, paths: Sequence[str], failed: Sequence[CallError]) -> None:
        """Raise CallError, or AbsentError for what is no trouble, where nobody answered."""
        if len(failed) < len(paths):
            return
        for error in failed:
            if error.code != "UNIMPLEMENTED":
                raise error
        raise AbsentError(str(failed[0]) if failed else "no container runtime has a socket here")

    def _sandboxes(self, connection: Connection, at: float) -> dict[str, tuple[Observation, ...]]:
        """The observations of each ready sandbox of a runtime, by its id."""
        types = grpc_messages.cri()
        request = types["ListPodSandboxRequest"]()
        request.filter.state.state = _READY  # READY is 0: to set it makes the filter be there, which is what counts
        data = connection.unary(_LIST, request.SerializeToString(), SECONDS)
        found: dict[str, tuple[Observation, ...]] = {}
        for sandbox in _decode(connection, "ListPodSandboxResponse", data).items:
            if sandbox.state == _READY and sandbox.id:
                known = self._known.get(sandbox.id)
                found[sandbox.id] = self._look(connection, sandbox, at) if known is None else known
        return found

    def _look(self, connection: Connection, sandbox: Any, at: float) -> tuple[Observation, ...]:
        """The observations of a sandbox that is not known yet; none where it is gone, or has no address yet."""
        metadata = sandbox.metadata
        if not (metadata.namespace and metadata.name and metadata.uid):
            return ()
        types = grpc_messages.cri()
        request = types["PodSandboxStatusRequest"](pod_sandbox_id=sandbox.id).SerializeToString()
        try:
            data = connection.unary(_STATUS, request, SECONDS)
        except CallError as error:
            if error.code in _NOBODY:
                raise
            return ()  # it is gone, or broken
        status = _decode(connection, "PodSandboxStatusResponse", data).status
        if status.state != _READY:
            return ()
        ips: tuple[Address, ...] = (WHOLE,)
        if status.linux.namespaces.options.network != _NODE:
            ips = addresses([status.network.ip, *(each.ip for each in status.network.additional_ips)])
        kept = tuple(sorted((key, sandbox.labels[key]) for key in self._labels if key in sandbox.labels))
        pod = Pod(metadata.namespace, metadata.name, metadata.uid, labels=kept)
        created = min(clock.from_wall(sandbox.created_at / 1e9), at)
        if created < 0:  # before this boot, or before somebody set the clock
            created = UNBOUNDED
        return tuple(Observation(SOURCE, ip, pod, sandbox.id, created, at) for ip in ips)


def _decode(connection: Connection, name: str, data: bytes) -> Any:
    """A message of a runtime. Raises NetacctError where it is none."""
    try:
        return grpc_messages.decode(grpc_messages.cri()[name], data)
    except ValueError as error:
        raise NetacctError(f"{connection.path}: what it answers is {error}") from error


def _sockets(paths: Sequence[str]) -> list[str]:
    """Those of these paths where a socket is, each socket once."""
    found: dict[tuple[int, int], str] = {}
    for path in paths:
        try:
            status = os.stat(path)  # noqa: PTH116 -- plain strings all through
        except OSError:
            continue
        if stat.S_ISSOCK(status.st_mode):
            found.setdefault((status.st_dev, status.st_ino), path)
    return list(found.values())
