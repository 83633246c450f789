"""The control socket and the writer's lock, with real sockets and files."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from netacct.control import LOCK, SOCKET, Command, ControlServer, NoAgentError, WriterLock, ask, sole_writer
from netacct.errors import ConfigError, NetacctError, StoreError
from netacct.holding import Holding


@contextmanager
def serving(state_dir: Path, answer: Callable[[Command], object]) -> Iterator[None]:
    """A control server whose worker answers at once."""
    server = ControlServer(state_dir, lambda command: command.reply.put(answer(command)))
    server.start()
    try:
        yield
    finally:
        server.stop()


def test_a_command_and_its_arguments_reach_the_worker(tmp_path: Path) -> None:
    """The worker gets name and arguments, and the caller gets the worker's value."""
    with serving(tmp_path, lambda command: [command.name, dict(command.arguments)]):
        result = ask(tmp_path, "pods", namespace="team-a")

    assert result == ["pods", {"namespace": "team-a"}]


def test_an_error_of_the_agent_keeps_message_and_exit_code(tmp_path: Path) -> None:
    """What the agent raises comes out of `ask` with the same message and exit code."""
    with (
        serving(tmp_path, lambda _: ConfigError("netacct.yaml", "policy", "no such file")),
        pytest.raises(NetacctError, match=r"netacct\.yaml: policy: no such file") as caught,
    ):
        ask(tmp_path, "reload")

    assert caught.value.exit_code == 78


def test_an_unforeseen_exception_leaks_no_details(tmp_path: Path) -> None:
    """An exception that is not ours is named by its type only."""
    with (
        serving(tmp_path, lambda _: ValueError("secret")),
        pytest.raises(NetacctError, match="ValueError in the agent"),
    ):
        ask(tmp_path, "pods")


def test_without_an_agent_the_caller_is_told(tmp_path: Path) -> None:
    """A missing socket and one that nobody listens on both mean that no agent is running."""
    with pytest.raises(NoAgentError):
        ask(tmp_path, "pods")
    orphan = socket.socket(socket.AF_UNIX)
    orphan.bind(str(tmp_path / SOCKET))
    orphan.close()
    with pytest.raises(NoAgentError):
        ask(tmp_path, "pods")


@pytest.mark.parametrize(
    "line",
    [b"\n", b"garbage\n", b"[]\n", b'{"command": "x", "arguments": 3}\n', b"\xff\xfe\n", b"[" * 60_000 + b"\n"],
    ids=["empty", "no JSON", "a list", "no arguments", "no text", "nested too deeply"],
)
def test_garbage_is_answered_and_the_next_request_works(tmp_path: Path, line: bytes) -> None:
    """A request that is none gets an error, and the server goes on."""
    with serving(tmp_path, lambda command: command.name):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(tmp_path / SOCKET))
            client.sendall(line)
            answer = json.loads(client.recv(4096))

        assert answer == {"error": "not a request", "exit_code": 2}
        assert ask(tmp_path, "ping") == "ping"


def test_a_state_directory_may_be_deep(tmp_path: Path) -> None:
    """The kernel takes 107 bytes of a socket's path; one that is longer is listened on and asked all the same."""
    deep = tmp_path / ("d" * 110)
    with pytest.raises(NoAgentError, match="no agent is running"):
        ask(deep, "ping")
    deep.mkdir()
    with pytest.raises(NoAgentError, match="no agent is running"):
        ask(deep, "ping")
    with serving(deep, lambda command: command.name):
        assert ask(deep, "ping") == "ping"
    assert list(deep.iterdir()) == []


def test_a_socket_that_cannot_be_made_is_told_in_words(tmp_path: Path) -> None:
    """What the system says is shown beside the path."""
    with pytest.raises(StoreError, match=r"gone/control\.sock: cannot listen: No such file or directory"):
        ControlServer(tmp_path / "gone", lambda _: None).start()


def test_a_large_answer_arrives_whole(tmp_path: Path) -> None:
    """Answers are not bound by the size of one read."""
    with serving(tmp_path, lambda _: "x" * 1_000_000):
        assert len(ask(tmp_path, "pods")) == 1_000_000


def test_the_socket_is_for_its_owner_only_and_goes_with_the_server(tmp_path: Path) -> None:
    """The socket has mode 0600 while the server lives and is gone afterwards."""
    with serving(tmp_path, lambda _: None):
        assert (tmp_path / SOCKET).stat().st_mode & 0o777 == 0o600

    assert not (tmp_path / SOCKET).exists()


def test_only_one_writer_at_a_time(tmp_path: Path) -> None:
    """The second holder of the writer's lock is refused, and the lock is free after the first."""
    state_dir = tmp_path / "new"
    with sole_writer(state_dir), pytest.raises(NetacctError, match="is running"), sole_writer(state_dir):
        pass
    with sole_writer(state_dir):
        assert state_dir.stat().st_mode & 0o777 == 0o700


def test_a_file_in_place_of_the_state_directory_is_named(tmp_path: Path) -> None:
    """The error is about the file that is there, not about the lock that cannot be in it."""
    state_dir = tmp_path / "state"
    state_dir.touch()
    with pytest.raises(StoreError, match=f"^{state_dir}: File exists$"), sole_writer(state_dir):
        pass


def test_lock_and_socket_come_back_where_somebody_removed_them(tmp_path: Path) -> None:
    """A cleared state directory gets lock and socket again; while another process has the lock, that is a trouble."""
    state_dir = tmp_path / "state"
    with sole_writer(state_dir) as lock:
        server = ControlServer(state_dir, lambda command: command.reply.put(command.name))
        server.start()
        holding = Holding(lock, server)
        shutil.rmtree(state_dir)
        with closing(WriterLock(state_dir)):
            holding.look()
            assert holding.troubles == [
                f"{state_dir / LOCK} is held: an agent (or another netacct command that writes) is running"
            ]
        holding.look()
        assert holding.troubles == []
        assert ask(state_dir, "ping") == "ping"
        with pytest.raises(NetacctError, match="is running"):
            WriterLock(state_dir)
        before = (state_dir / SOCKET).stat().st_ino
        holding.look()
        assert (state_dir / SOCKET).stat().st_ino == before
        server.stop()
    assert not (state_dir / SOCKET).exists()
