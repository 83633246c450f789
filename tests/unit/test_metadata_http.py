"""The HTTP client for metadata servers, against real servers that answer well, badly, slowly or not at all."""

from __future__ import annotations

import contextlib
import email.utils
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from metadata_server import PATIENCE, Reply, serving

from netacct.identity import metadata_http
from netacct.identity.metadata_http import Answer, Base, MetadataClient, base


def get(reply: Reply | bytes, timeout: float = PATIENCE) -> Answer:
    """What a client makes of one reply."""
    with serving(lambda _: reply) as server:
        client = MetadataClient([server.url], timeout)
        try:
            return client.request("/x", {"Metadata": "true"})
        finally:
            client.close()


@contextlib.contextmanager
def silent() -> Iterator[str]:
    """A server that accepts connections (by its kernel) and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("http://169.254.169.254", Base("169.254.169.254", 80)),
        ("http://127.0.0.1:8080/", Base("127.0.0.1", 8080)),
        ("http://[fd00:ec2::254]", Base("fd00:ec2::254", 80)),
        ("http://[::1]:8080", Base("::1", 8080)),
    ],
)
def test_addresses_of_servers(url: str, found: Base) -> None:
    """A server is named by an address of either family and perhaps a port."""
    assert base(url) == found


@pytest.mark.parametrize(
    "url",
    [
        "",
        "169.254.169.254",
        "https://127.0.0.1",
        "http://metadata",
        "http://127.0.0.1:0",
        "http://127.0.0.1:65536",
        "http://127.0.0.1/x",
        "http://::1",
        "http://user@127.0.0.1",
        "http://127.0.0.256",
    ],
)
def test_what_is_no_address_of_a_server(url: str) -> None:
    """Names, paths, other schemes and impossible addresses are refused."""
    with pytest.raises(ValueError, match=r".*"):
        base(url)


def test_an_answer_has_status_body_and_headers() -> None:
    """A 200 is handed over whole, the names of its headers in lower case."""
    answer = get(Reply("body", headers={"ETag": "abc"}))
    assert (answer.status, answer.body, answer.headers["etag"], answer.fault) == (200, b"body", "abc", "")


def test_what_is_sent() -> None:
    """Method, path and headers go to the server as they were given, without a trace of a proxy or of compression."""
    with serving(lambda _: Reply()) as server:
        client = MetadataClient([server.url], PATIENCE)
        client.request("/latest/api/token", {"X-ttl": "60"}, method="PUT")
        client.close()
    (asked,) = server.asked
    assert (asked.method, asked.path, asked.headers["x-ttl"]) == ("PUT", "/latest/api/token", "60")
    assert asked.headers["accept-encoding"] == "identity"
    assert "x-forwarded-for" not in asked.headers


def test_proxies_of_the_environment_play_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy that the environment names is not used: the metadata server refuses what comes through one."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert get(Reply("direct")).body == b"direct"


@pytest.mark.parametrize("status", [301, 404, 429, 503])
def test_other_answers_are_values(status: int) -> None:
    """Any status is handed over, a redirect is not followed, and words say what came."""
    answer = get(Reply(status=status, headers={"Location": "http://127.0.0.1:1/"}))
    assert answer.status == status
    assert str(status) in answer.why


def test_retry_after() -> None:
    """Retry-After is understood as a number and as a date, is bounded, and nonsense is as if it were not there."""
    assert get(Reply(status=429)).retry_after is None
    assert get(Reply(status=429, headers={"Retry-After": "7"})).retry_after == 7.0
    assert get(Reply(status=429, headers={"Retry-After": "86400"})).retry_after == 600.0
    assert get(Reply(status=429, headers={"Retry-After": "soon"})).retry_after is None
    begin = time.time()
    later = get(Reply(status=503, headers={"Retry-After": email.utils.formatdate(begin + 300, usegmt=True)}))
    assert later.retry_after is not None
    assert 299 - (time.time() - begin) <= later.retry_after <= 300  # a date has whole seconds


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "closed the connection"),
        (b"SSH-2.0-OpenSSH\r\n", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc", "ended too soon"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab", "ended too soon"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000 + b"\r\n\r\n", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * (metadata_http.SIZE_LIMIT + 1), "longer than"),
        (f"HTTP/1.1 200 OK\r\nContent-Length: {10**15}\r\n\r\n".encode() + b"x" * (1 << 21), "longer than"),
    ],
    ids=["nothing", "another-protocol", "truncated", "truncated-chunk", "endless-header", "endless", "announced"],
)
def test_an_answer_that_is_none(raw: bytes, why: str) -> None:
    """What is cut off, no HTTP, or too long is no answer, and the words say which."""
    answer = get(raw)
    assert answer.status == 0
    assert why in answer.why


def test_a_silent_server() -> None:
    """A server that accepts and says nothing is given up after the timeout."""
    with silent() as url:
        answer = MetadataClient([url], timeout=0.1).request("/", {})
    assert answer == Answer(0, fault="no answer in time")


def test_a_server_that_trickles() -> None:
    """The timeout is for the whole answer: a byte now and then does not prolong it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def trickle() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                for _ in range(3000):  # or until the client leaves
                    connection.sendall(b"H")
                    time.sleep(0.02)

        thread = threading.Thread(target=trickle)
        thread.start()
        answer = MetadataClient([f"http://127.0.0.1:{listener.getsockname()[1]}"], timeout=0.2).request("/", {})
        assert answer.fault == "no answer in time"
        thread.join()


def test_nobody_there() -> None:
    """A refused connection is told as such."""
    with silent() as url:
        pass
    assert "refused" in MetadataClient([url], PATIENCE).request("/", {}).why


def test_the_next_address_is_asked_after_no_answer() -> None:
    """Of a server with two addresses the one that answers is found, and kept."""
    with silent() as dead:
        pass
    with serving(lambda _: Reply("here")) as server:
        client = MetadataClient([dead, server.url], PATIENCE)
        assert client.request("/", {}).status == 0
        assert client.request("/", {}).body == b"here"
        assert client.request("/", {}).body == b"here"
        client.close()


def test_one_connection_serves_several_requests() -> None:
    """Requests that follow each other share a connection; after `close` there is another one."""
    with serving(lambda _: Reply("x")) as server:
        client = MetadataClient([server.url], PATIENCE)
        for _ in range(3):
            assert client.request("/", {}).status == 200
        client.close()
        assert client.request("/", {}).status == 200
        client.close()
    connections = [asked.connection for asked in server.asked]
    assert len(set(connections[:3])) == 1
    assert connections[3] != connections[0]


def test_an_idle_connection_that_the_server_closed_is_replaced() -> None:
    """A kept connection that has ended meanwhile costs no answer."""
    answers: Iterator[Reply | bytes] = iter([b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n1", Reply("2")])
    with serving(lambda _: next(answers)) as server:
        client = MetadataClient([server.url], PATIENCE)
        assert client.request("/", {}).body == b"1"
        time.sleep(0.05)  # the server closes
        assert client.request("/", {}).body == b"2"
        client.close()


def test_an_interrupted_request_ends_at_once() -> None:
    """A request that waits for its answer is ended from another thread, and no later one is sent."""
    with silent() as url:
        client = MetadataClient([url], timeout=3600)
        found: list[Answer] = []
        thread = threading.Thread(target=lambda: found.append(client.request("/", {})))
        thread.start()
        time.sleep(0.05)
        client.interrupt()
        thread.join(PATIENCE)
        assert not thread.is_alive()
        assert client.request("/", {}).fault == "interrupted"
    assert found == [Answer(0, fault="interrupted")]
