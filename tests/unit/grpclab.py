"""gRPC servers on unix sockets that behave as a kubelet and as a container runtime are documented to."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent import futures
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc

from netacct.identity import grpc_messages
from netacct.identity.source import Health, Source

ADDED, MODIFIED, DELETED, SYNCED = 1, 2, 3, 4
_END = None

SECONDS = 60.0
"""The longest time to wait for anything."""


def healthy_when(source: Source, holds: Callable[[Health], bool]) -> Health:
    """A source's health, as soon as this holds of it."""
    deadline = time.monotonic() + SECONDS
    while not holds(source.healthy()):
        assert time.monotonic() < deadline, source.healthy()
        time.sleep(0.01)
    return source.healthy()


class Server:
    """A server on a socket, of methods that take and return bytes (streams: yield them)."""

    def __init__(self, path: Path, service: str, unary: Mapping[str, Any], streams: Mapping[str, Any]) -> None:
        handlers: dict[str, Any] = {name: grpc.unary_unary_rpc_method_handler(method) for name, method in unary.items()}
        handlers |= {name: grpc.unary_stream_rpc_method_handler(method) for name, method in streams.items()}
        self._server = grpc.server(futures.ThreadPoolExecutor(8), options=[("grpc.max_send_message_length", -1)])
        self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, handlers)])
        self._server.add_insecure_port(f"unix:{path}")
        self._server.start()

    def stop(self) -> None:
        """Stop at once, as a process does that is killed; but the socket's file goes, too."""
        self._server.stop(0).wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _type: object, _error: BaseException | None, _trace: TracebackType | None) -> None:
        self.stop()


def pod(name: str, *ips: str, uid: str = "", phase: str = "Running", **more: Any) -> Any:
    """A Pod message, of namespace team-a unless `more` says otherwise (namespace, labels, owner, host, started)."""
    message = grpc_messages.pods_api()["Pod"]()
    message.metadata.name, message.metadata.namespace = name, more.get("namespace", "team-a")
    message.metadata.uid = uid or f"uid-{name}"
    message.metadata.labels.update(more.get("labels", {}))
    if "owner" in more:
        kind, owner = more["owner"]
        message.metadata.ownerReferences.add(kind="Node", name="not the controller")
        message.metadata.ownerReferences.add(kind=kind, name=owner, controller=True)
    message.metadata.creationTimestamp.seconds = more.get("created", 1_790_000_000)
    if "started" in more:
        message.status.startTime.seconds = more["started"]
    message.spec.hostNetwork = more.get("host", False)
    message.status.phase = phase
    for ip in ips:
        message.status.podIPs.add(ip=ip)
    return message


def event(kind: int, message: Any = None) -> bytes:
    """A WatchPodsEvent; of a deleted pod with no more than name, namespace and uid."""
    fields = {} if message is None else {"pod": message}
    if kind == DELETED:
        bare = grpc_messages.pods_api()["Pod"]()
        for name in ("name", "namespace", "uid"):
            setattr(bare.metadata, name, getattr(message.metadata, name))
        fields = {"pod": bare}
    data: bytes = grpc_messages.pods_api()["WatchPodsEvent"](type=kind, **fields).SerializeToString()
    return data


def varint(number: int) -> bytes:
    """A base-128 varint (https://protobuf.dev/programming-guides/encoding/#varints)."""
    head = b""
    while number > 0x7F:
        head += bytes([number & 0x7F | 0x80])
        number >>= 7
    return head + bytes([number])


def field(number: int, value: bytes | str | int) -> bytes:
    """A field: text, bytes and messages are of wire type 2, numbers of wire type 0."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


class Kubelet:
    """A kubelet's Pods API: what is in `pods` is listed first, then what is said goes to every watch.

    Args:
        path: of its socket.
        service: its name.
        pods: at the beginning.
    """

    def __init__(self, path: Path, pods: Iterable[Any] = (), service: str = "v1alpha1.Pods") -> None:
        self.pods = list(pods)
        self.refuse: list[grpc.StatusCode] = []
        self.before: list[bytes] = []
        self.watches = 0
        self._queues: list[queue.Queue[bytes | grpc.StatusCode | None]] = []
        self._server = Server(path, service, {}, {"WatchPods": self._watch})

    def stop(self) -> None:
        """End everything."""
        for each in self._queues:
            each.put(_END)
        self._server.stop()

    def say(self, *what: bytes | grpc.StatusCode | None) -> None:
        """Send these events; or end all watches with a status (None: OK)."""
        for each in self._queues:
            for event in what:
                each.put(event)

    def _watch(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        assert request == b""
        self.watches += 1
        if self.refuse:
            context.abort(self.refuse.pop(0), "Kubelet is initializing")
        mine: queue.Queue[bytes | grpc.StatusCode | None] = queue.Queue()
        self._queues.append(mine)
        context.add_callback(lambda: mine.put(_END))
        yield from self.before
        for each in list(self.pods):
            yield each if isinstance(each, bytes) else event(ADDED, each)
        yield event(SYNCED)
        while (said := mine.get()) is not _END:
            if isinstance(said, grpc.StatusCode):
                context.abort(said, "watch client channel closed")
            else:
                yield said


class Runtime:
    """A container runtime's CRI: `sandboxes` by id, each with its list entry and its status.

    Args:
        path: of its socket.
    """

    def __init__(self, path: Path, service: str = "runtime.v1.RuntimeService") -> None:
        self.sandboxes: dict[str, tuple[Any, Any]] = {}
        self.refuse: grpc.StatusCode | None = None
        self.broken: dict[str, grpc.StatusCode] = {}
        self.lists = 0
        self.asked: list[str] = []
        methods = {"ListPodSandbox": self._list, "PodSandboxStatus": self._status}
        self.server = Server(path, service, methods, {})

    def add(self, identity: str, name: str, *ips: str, **more: Any) -> None:
        """Add a sandbox (`more`: uid, state, created in ns, host, labels)."""
        types = grpc_messages.cri()
        sandbox = types["PodSandbox"](id=identity, state=more.get("state", 0), created_at=more.get("created", 0))
        sandbox.metadata.name, sandbox.metadata.namespace = name, "team-a"
        sandbox.metadata.uid = more.get("uid", f"uid-{name}")
        sandbox.labels.update(more.get("labels", {}))
        status = types["PodSandboxStatus"](state=more.get("status", sandbox.state))
        if ips:
            status.network.ip = ips[0]
        for ip in ips[1:]:
            status.network.additional_ips.add(ip=ip)
        status.linux.namespaces.options.network = 2 if more.get("host") else 0
        self.sandboxes[identity] = (sandbox, status)

    def _list(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        self.lists += 1
        if self.refuse:
            context.abort(self.refuse, "no")
        types = grpc_messages.cri()
        asked = types["ListPodSandboxRequest"].FromString(request)
        ready = asked.filter.HasField("state") and asked.filter.state.state == 0
        items = [sandbox for sandbox, _ in self.sandboxes.values() if sandbox.state == 0 or not ready]
        answer: bytes = types["ListPodSandboxResponse"](items=items).SerializeToString()
        return answer

    def _status(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        types = grpc_messages.cri()
        identity = types["PodSandboxStatusRequest"].FromString(request).pod_sandbox_id
        self.asked.append(identity)
        if identity in self.broken:
            context.abort(self.broken[identity], "an error occurred when try to find sandbox: not found")
        answer: bytes = types["PodSandboxStatusResponse"](status=self.sandboxes[identity][1]).SerializeToString()
        return answer
