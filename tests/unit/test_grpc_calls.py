"""Calls by real gRPC over real unix sockets."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from grpclab import Server

from netacct.identity.grpc_calls import Caller, CallError

SECONDS = 60.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a socket may be."""
    return tmp_path / "s.sock"


def echo(request: bytes, _context: grpc.ServicerContext) -> bytes:
    """Answer with what was asked."""
    return request


def failing(code: grpc.StatusCode, detail: str = "its own words") -> Callable[..., bytes]:
    """A method that fails."""

    def fail(_request: bytes, context: grpc.ServicerContext) -> bytes:
        context.abort(code, detail)
        raise AssertionError

    return fail


def call(path: Path, method: str = "/a.B/C", limit: int = 1 << 20, seconds: float = SECONDS) -> bytes:
    """A unary call over a connection of its own."""
    with Caller(limit).connect(str(path)) as connection:
        return connection.unary(method, b"hello", seconds)


def code(path: Path, method: str = "/a.B/C", limit: int = 1 << 20, seconds: float = SECONDS) -> tuple[str, str]:
    """How such a call fails: its code, and in words."""
    with pytest.raises(CallError) as failed:
        call(path, method, limit, seconds)
    assert failed.value.path == str(path)
    return failed.value.code, str(failed.value).removeprefix(f"{path}: ")


def test_an_answer(path: Path) -> None:
    """Bytes go there and back."""
    with Server(path, "a.B", {"C": echo}, {}):
        assert call(path) == b"hello"


def test_the_authority_that_servers_in_go_accept(path: Path) -> None:
    """The request names localhost as its authority, and not the socket's path."""
    seen = []

    def method(request: bytes, context: grpc.ServicerContext) -> bytes:
        seen.append(context._rpc_event.call_details.host)  # type: ignore[attr-defined]  # the only place that has it
        return request

    with Server(path, "a.B", {"C": method}, {}):
        call(path)
    assert seen == [b"localhost"]


def test_no_socket(path: Path) -> None:
    """A path without a socket is UNAVAILABLE."""
    name, words = code(path)
    assert name == "UNAVAILABLE"
    assert words.startswith("nobody answers")


def test_a_socket_that_was_left_behind(path: Path) -> None:
    """A socket that nobody listens on is UNAVAILABLE at once, and the reason is the kernel's."""
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    name, words = code(path)
    assert name == "UNAVAILABLE"
    assert "refused" in words.lower()


def test_a_server_that_returns(path: Path) -> None:
    """A new connection does not wait for the backoff of an earlier one."""
    for _ in range(3):
        assert code(path)[0] == "UNAVAILABLE"
    with Server(path, "a.B", {"C": echo}, {}):
        assert call(path) == b"hello"


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (grpc.StatusCode.FAILED_PRECONDITION, "is not ready (its own words)"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "refuses for now (its own words)"),
        (grpc.StatusCode.PERMISSION_DENIED, "does not permit it (its own words)"),
        (grpc.StatusCode.INTERNAL, "INTERNAL (its own words)"),
    ],
)
def test_what_a_server_says(path: Path, status: grpc.StatusCode, words: str) -> None:
    """An error has gRPC's code, and a sentence with the server's own words."""
    with Server(path, "a.B", {"C": failing(status)}, {}):
        assert code(path) == (status.name, words)


def test_a_long_error_is_cut(path: Path) -> None:
    """Of a server's long words the end is told, where Go puts the cause."""
    with Server(path, "a.B", {"C": failing(grpc.StatusCode.UNKNOWN, "x" * 5000 + "cause")}, {}):
        words = code(path)[1]
    assert len(words) < 200
    assert words.endswith("xcause)")


def test_a_service_that_is_not_there(path: Path) -> None:
    """A method that the server does not have is UNIMPLEMENTED."""
    with Server(path, "a.B", {"C": echo}, {}):
        assert code(path, "/a.V2/C")[0] == "UNIMPLEMENTED"


def test_a_slow_server(path: Path) -> None:
    """An answer that does not come in time is an error."""
    done = threading.Event()

    def slow(request: bytes, _context: grpc.ServicerContext) -> bytes:
        done.wait(SECONDS)
        return request

    with Server(path, "a.B", {"C": slow}, {}):
        assert code(path, seconds=0.05)[0] == "DEADLINE_EXCEEDED"
        done.set()


def test_a_server_that_does_not_read(path: Path) -> None:
    """A process that is stopped accepts by its kernel and never answers: the deadline ends the call."""
    with socket.socket(socket.AF_UNIX) as stopped:
        stopped.bind(str(path))
        stopped.listen(1)
        assert code(path, seconds=0.1)[0] == "DEADLINE_EXCEEDED"


def test_a_message_that_is_too_long(path: Path) -> None:
    """A message beyond the limit is refused, and not kept in memory."""
    with Server(path, "a.B", {"C": lambda _request, _context: b"x" * 2000}, {}):
        assert call(path, limit=2000) == b"x" * 2000
        assert code(path, limit=1999)[0] == "RESOURCE_EXHAUSTED"


def test_what_speaks_no_grpc(path: Path) -> None:
    """A socket of another protocol is an error like any other."""
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        other.settimeout(SECONDS)

        def answer() -> None:
            peer, _ = other.accept()
            with peer:
                peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        assert code(path)[0] in {"UNAVAILABLE", "INTERNAL"}
        thread.join()


def test_a_stream(path: Path) -> None:
    """Messages come one by one, and the end of the stream is the end of the loop."""

    def count(request: bytes, _context: grpc.ServicerContext) -> Iterator[bytes]:
        for number in range(1000):
            yield request + b"%d" % number

    with Server(path, "a.B", {}, {"C": count}), Caller(1 << 20).connect(str(path)) as connection:
        assert list(connection.stream("/a.B/C", b"n", SECONDS)) == [b"n%d" % number for number in range(1000)]


def test_a_stream_that_fails(path: Path) -> None:
    """What came before the error is there; the error comes after it."""

    def fail(_request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        yield b"one"
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "watch client channel closed")

    got: list[bytes] = []
    with Server(path, "a.B", {}, {"C": fail}), Caller(1 << 20).connect(str(path)) as connection:
        with pytest.raises(CallError, match="refuses for now") as failed:
            got.extend(connection.stream("/a.B/C", b"", SECONDS))
        assert failed.value.code == "RESOURCE_EXHAUSTED"
    assert got == [b"one"]


def test_an_end_from_another_thread(path: Path) -> None:
    """A stream that waits for its next message ends when it is told to, and nothing begins after that."""
    over = threading.Event()

    def wait(_request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        context.add_callback(over.set)
        yield b"one"
        over.wait(SECONDS)

    caller = Caller(1 << 20)
    with Server(path, "a.B", {"D": echo}, {"C": wait}):
        with caller.connect(str(path)) as connection:
            stream = connection.stream("/a.B/C", b"", 60.0)
            assert next(stream) == b"one"
            threading.Timer(0.05, caller.end).start()
            with pytest.raises(CallError) as failed:
                next(stream)
            assert failed.value.code == "CANCELLED"
            with pytest.raises(CallError):
                connection.unary("/a.B/D", b"", SECONDS)
        assert over.wait(SECONDS)
        with pytest.raises(CallError), caller.connect(str(path)):
            pass
        caller.begin()
        with caller.connect(str(path)) as connection:
            assert connection.unary("/a.B/D", b"again", SECONDS) == b"again"


def test_nothing_is_imported_or_printed(path: Path) -> None:
    """Neither grpcio nor protobuf is loaded before the first call, and a call that fails writes nothing."""
    program = f"""
import sys
from netacct.identity import cri, kubelet_pods_api
from netacct.identity.grpc_calls import Caller
assert not {{"grpc", "google.protobuf"}} & set(sys.modules)
try:
    with Caller(1).connect({str(path)!r}) as connection:
        connection.unary("/a.B/C", b"", 5.0)
except Exception as error:
    print(error.code, "grpc" in sys.modules)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert (ran.stdout, ran.stderr) == ("UNAVAILABLE True\n", "")


def test_connections_leave_nothing(path: Path) -> None:
    """Neither descriptors nor threads grow with the number of calls."""
    with Server(path, "a.B", {"C": echo}, {}):
        for _ in range(5):
            call(path)
        before = _held()
        for _ in range(40):
            call(path)
        deadline = time.monotonic() + SECONDS
        while _held() > before + 10 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert _held() <= before + 10


def _held() -> int:
    """Descriptors and threads of this process."""
    return sum(len(list(Path(folder).iterdir())) for folder in ("/proc/self/fd", "/proc/self/task"))
