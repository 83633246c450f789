"""gRPC calls over a unix socket of this node, by grpcio; messages are bytes here.

grpcio costs 15 MB, and so it is imported at the first call and not before.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from netacct.errors import NetacctError

if TYPE_CHECKING:
    import grpc

_WORDS = {
    "OK": "ended the stream",
    "UNAVAILABLE": "nobody answers",
    "UNIMPLEMENTED": "does not serve this",
    "FAILED_PRECONDITION": "is not ready",
    "RESOURCE_EXHAUSTED": "refuses for now",
    "DEADLINE_EXCEEDED": "did not answer in time",
    "PERMISSION_DENIED": "does not permit it",
}
"""What status codes mean here (https://grpc.github.io/grpc/core/md_doc_statuscodes.html)."""

_DETAIL = 160
"""So many characters of the other side's own words are passed on."""


class CallError(NetacctError):
    """A call that failed. `code` is gRPC's status code by name, as UNAVAILABLE; `path` the socket."""

    def __init__(self, path: str, code: str, detail: str = "") -> None:
        self.path, self.code = path, code
        short = detail if len(detail) <= _DETAIL else f"…{detail[-_DETAIL:]}"
        super().__init__(f"{path}: {_WORDS.get(code, code)}" + (f" ({short})" if short else ""))


class Connection:
    """A connection to a socket; made by `Caller.connect`."""

    def __init__(self, path: str, channel: grpc.Channel) -> None:
        self.path, self._channel = path, channel

    def unary(self, method: str, request: bytes, seconds: float) -> bytes:
        """The answer to a request.

        Args:
            method: as `/runtime.v1.RuntimeService/ListPodSandbox`.
            request: the request message.
            seconds: the answer may take.

        Raises:
            CallError: there is no answer.
        """
        import grpc  # noqa: PLC0415 -- loaded already

        try:
            call: Any = self._channel.unary_unary(method)  # of bytes: without serializers
            answer: bytes = call(request, timeout=seconds)
        except grpc.RpcError as error:
            raise self._error(error) from None
        except ValueError as error:  # the channel was closed by another thread
            raise CallError(self.path, "CANCELLED", str(error)) from None
        return answer

    def stream(self, method: str, request: bytes, seconds: float) -> Iterator[bytes]:
        """The messages of a stream, as they come, for so many seconds. Raises CallError where it ends otherwise."""
        import grpc  # noqa: PLC0415 -- loaded already

        try:
            call: Any = self._channel.unary_stream(method)  # as above
            yield from call(request, timeout=seconds)
        except grpc.RpcError as error:
            raise self._error(error) from None
        except ValueError as error:  # as above
            raise CallError(self.path, "CANCELLED", str(error)) from None

    def _error(self, error: grpc.RpcError) -> CallError:
        return CallError(self.path, error.code().name, error.details() or "")


class Caller:
    """Makes connections, and ends them from another thread.

    Args:
        limit: no message may have more bytes.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._open: grpc.Channel | None = None
        self._ended = False

    @contextlib.contextmanager
    def connect(self, path: str) -> Iterator[Connection]:
        """A connection to the socket of this absolute path, one at a time. Raises CallError after `end`."""
        grpc = _grpc()
        with self._lock:
            if self._ended:
                raise CallError(path, "CANCELLED")
            channel = self._open = grpc.insecure_channel(f"unix:{path}", self._options())
        try:
            yield Connection(path, channel)
        finally:
            with self._lock:
                self._open = None
            channel.close()

    def begin(self) -> None:
        """Allow connections (again)."""
        self._ended = False

    def end(self) -> None:
        """End the calls under way, which raise CallError, and let none begin. From any thread."""
        with self._lock:
            self._ended = True
            channel = self._open
        if channel is not None:
            channel.close()

    def _options(self) -> list[tuple[str, int | str]]:
        """https://grpc.github.io/grpc/core/group__grpc__arg__keys.html."""
        return [
            ("grpc.default_authority", "localhost"),  # servers in Go refuse a path as :authority
            ("grpc.max_receive_message_length", self._limit),
            ("grpc.use_local_subchannel_pool", 1),  # else a new connection waits for the backoff of the one before
            ("grpc.enable_http_proxy", 0),
            ("grpc.enable_retries", 0),
            ("grpc.service_config_disable_resolution", 1),
            ("SingleThreadedUnaryStream", 1),  # grpc.experimental.ChannelOptions: no thread of its own for a stream
        ]


def _grpc() -> Any:
    """The package, told not to write to stderr."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    import grpc  # noqa: PLC0415 -- as the module says

    return grpc
