"""The control socket: how commands that write talk to a running agent, and how two writers are kept apart.

One request per connection: a line of JSON `{"command": NAME, "arguments": {...}}`, answered by a line of JSON, either
`{"result": ...}` or `{"error": MESSAGE, "exit_code": N}`. The socket lies in the state directory, which only root may
enter. Whoever writes to the kernel holds an flock on `agent.lock` beside it: the agent for its life, a command that
found no agent for as long as it runs.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from netacct.errors import NetacctError, PermissionRefusedError, StoreError

SOCKET = "control.sock"
LOCK = "agent.lock"
REQUEST_LIMIT = 1 << 16
ANSWER_LIMIT = 1 << 26
REQUEST_TIMEOUT = 5.0
ANSWER_TIMEOUT = 60.0
_SUN_PATH = 107

PAUSED = "rules are removed, until `netacct rules apply`"
"""The one difference that an agent tells which was asked to remove its rules."""

File: TypeAlias = tuple[int, int]
"""A file by device and inode."""


class NoAgentError(NetacctError):
    """No agent listens on the control socket."""


@dataclass(frozen=True, slots=True)
class Command:
    """A request on its way to the worker; the worker puts one answer (a value or an exception) into `reply`."""

    name: str
    arguments: Mapping[str, Any]
    reply: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)


class ControlServer:
    """Accepts connections in a thread of its own and hands each request to `submit`, one at a time."""

    def __init__(self, state_dir: Path, submit: Callable[[Command], None]) -> None:
        self._path = state_dir / SOCKET
        self._submit = submit
        self._socket: socket.socket
        self._thread: threading.Thread
        self._file: File | None = None

    def start(self) -> None:
        """Bind and listen. Errors: StoreError where the socket cannot be made."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._path.unlink(missing_ok=True)  # the lock is ours, so whoever made it is gone
            with _sockaddr(self._path) as name:
                self._socket.bind(name)
            self._path.chmod(0o600)
            self._socket.listen(8)
            self._file = _file_at(self._path)
        except OSError as error:
            self._socket.close()
            raise StoreError(f"{self._path}: cannot listen: {error.strerror or error}") from error
        self._thread = threading.Thread(target=self._serve, args=(self._socket,), name="control", daemon=True)
        self._thread.start()

    def renew(self) -> bool:
        """Listen anew where the socket's file is not ours any more; whether that was so. Errors: StoreError."""
        if _file_at(self._path) == self._file:
            return False
        self._end()
        self.start()
        return True

    def stop(self) -> None:
        """Stop listening and remove the socket."""
        if _file_at(self._path) == self._file:
            self._path.unlink(missing_ok=True)
        self._end()

    def _end(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(timeout=1)

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError as error:
                if error.errno in (errno.EBADF, errno.EINVAL):  # closed, or shut down
                    return
                threading.Event().wait(0.1)  # out of descriptors or memory, for now
                continue
            with connection, contextlib.suppress(OSError):
                connection.settimeout(REQUEST_TIMEOUT)
                connection.sendall(self._answer(_read_line(connection, REQUEST_LIMIT)))

    def _answer(self, line: bytes) -> bytes:
        try:
            request = json.loads(line)
            command = Command(str(request["command"]), dict(request.get("arguments", {})))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return _encode({"error": "not a request", "exit_code": 2})
        self._submit(command)
        try:
            answer = command.reply.get(timeout=ANSWER_TIMEOUT)
        except queue.Empty:
            return _encode({"error": f"the agent did not answer within {ANSWER_TIMEOUT:.0f} s", "exit_code": 1})
        if isinstance(answer, NetacctError):
            return _encode({"error": str(answer), "exit_code": answer.exit_code})
        if isinstance(answer, Exception):
            return _encode({"error": f"{type(answer).__name__} in the agent; its log has the details", "exit_code": 1})
        return _encode({"result": answer})


def ask(state_dir: Path, command: str, *, patience: float = ANSWER_TIMEOUT + REQUEST_TIMEOUT, **arguments: Any) -> Any:
    """Send one command to the running agent and return its result; wait for `patience` seconds at most.

    Errors: NoAgentError where none is running; PermissionRefusedError; NetacctError with the agent's own message and
    exit code.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(patience)
        try:
            with _sockaddr(state_dir / SOCKET) as name:
                connection.connect(name)
        except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError) as error:
            raise NoAgentError(f"no agent is running (nothing listens on {state_dir / SOCKET})") from error
        except PermissionError as error:
            raise PermissionRefusedError(f"{state_dir / SOCKET}: only root may talk to the agent") from error
        try:
            connection.sendall(_encode({"command": command, "arguments": arguments}))
            answer = json.loads(_read_line(connection, ANSWER_LIMIT))
        except (OSError, ValueError) as error:
            raise NetacctError(f"the agent broke off its answer to {command!r}: {error}") from error
    if "error" in answer:
        failure = NetacctError(answer["error"])
        failure.exit_code = int(answer.get("exit_code", 1))
        raise failure
    return answer["result"]


class WriterLock:
    """The writer's lock, held from the start until `close`. Makes the state directory where it is missing.

    Errors: NetacctError where an agent or another command holds it; PermissionRefusedError; StoreError.
    """

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / LOCK
        self._descriptor = self._take()

    def renew(self) -> bool:
        """Take the lock anew where its file is not ours any more; whether that was so. Errors as above."""
        if _file_at(self._path) == _identity(os.fstat(self._descriptor)):
            return False
        was, self._descriptor = self._descriptor, self._take()
        os.close(was)
        return True

    def close(self) -> None:
        """Let others write."""
        os.close(self._descriptor)

    def _take(self) -> int:
        path = self._path
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except PermissionError as error:
            raise PermissionRefusedError(f"{path}: {error.strerror} (netacct must be root)") from error
        except OSError as error:  # of the directory, or of the file in it
            raise StoreError(f"{error.filename or path}: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            message = f"{path} is held: an agent (or another netacct command that writes) is running"
            raise NetacctError(message) from error
        return descriptor


@contextlib.contextmanager
def sole_writer(state_dir: Path) -> Iterator[WriterLock]:
    """Hold the writer's lock for the length of a `with` block. Errors: as for `WriterLock`."""
    with contextlib.closing(WriterLock(state_dir)) as lock:
        yield lock


@contextlib.contextmanager
def _sockaddr(path: Path) -> Iterator[str]:
    """What names a socket to the kernel: `sun_path` holds 107 bytes (unix(7)), so a longer path by its directory."""
    if len(os.fsencode(path)) <= _SUN_PATH:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def _file_at(path: Path) -> File | None:
    """Which file is at a path; None where there is none."""
    try:
        return _identity(path.stat())
    except OSError:
        return None


def _identity(found: os.stat_result) -> File:
    return found.st_dev, found.st_ino


def _encode(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _read_line(connection: socket.socket, limit: int) -> bytes:
    """One line of at most `limit` bytes; what was read so far where the other end says no more."""
    chunks: list[bytes] = []
    size = 0
    while size < limit:
        chunk = connection.recv(1 << 16)
        chunks.append(chunk)
        size += len(chunk)
        if not chunk or chunk.endswith(b"\n"):
            break
    return b"".join(chunks)
