"""The HTTP server, over real connections to ::1 and 127.0.0.1."""

from __future__ import annotations

import contextlib
import http.client
import io
import random
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from http import HTTPStatus

import pytest
from prometheus_client import CollectorRegistry

from netacct.export import server as server_module
from netacct.export.connection import Limits, State
from netacct.export.endpoints import Handler, MetricsEndpoint, page, routes, scrape_timeout
from netacct.export.listen import ListenAddress
from netacct.export.native import View, registries
from netacct.export.pages import landing
from netacct.export.quiet import Log, no_log
from netacct.export.server import Server
from netacct.export.wire import Request, Response, text
from netacct.model import Count, Direction, Level, SeriesKey

VIEW = View(
    "0.1.0",
    "iptables",
    "default",
    "abc",
    series=[(SeriesKey(Level.POD, ("team-a", f"p-{i}"), Direction.RECEIVE, "pod"), Count(i, i)) for i in range(200)],
)
LOOPBACK = ListenAddress("127.0.0.1", 0)
QUICK = Limits(connections=100, head_seconds=0.4, idle_seconds=0.6, write_seconds=0.4)
"""For tests of clients that are cut off."""

HOUR = 3600.0
PATIENT = Limits(connections=200, head_seconds=HOUR, idle_seconds=HOUR, write_seconds=HOUR)
"""For all others: who holds up anybody here does it for longer than anybody waits."""

PATIENCE = 60.0
"""Seconds for what must come."""

Serve = Callable[..., int]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts servers, gives their port, and stops them at the end."""
    with contextlib.ExitStack() as stack:

        def start(table: Mapping[str, Handler], limits: Limits = PATIENT, log: Log = no_log) -> int:
            return stack.enter_context(served(table, limits, log)).addresses[0].port

        yield start


@contextlib.contextmanager
def served(table: Mapping[str, Handler], limits: Limits = PATIENT, log: Log = no_log) -> Iterator[Server]:
    """A running server."""
    server = Server([LOOPBACK], table, log, limits)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def until(condition: Callable[[], object]) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def refused(port: int) -> bool:
    """Whether nobody listens there any more."""
    with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), PATIENCE):
        return False
    return True


def agent_routes() -> Mapping[str, Handler]:
    """The routes of an agent that lives and is not ready for two reasons."""
    metrics = MetricsEndpoint(registries(lambda _: VIEW))
    return routes(metrics, list, lambda: ["no reading yet", "rules differ"], landing("0.1.0"))


def get(port: int, path: str, method: str = "GET", **headers: str) -> tuple[int, http.client.HTTPMessage, bytes]:
    """Status, fields and body of one request on a connection of its own. `_` in a field's name stands for `-`."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    with contextlib.closing(connection):
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        return response.status, response.headers, response.read()


def raw(port: int, data: bytes, *, finish: bool = True) -> bytes:
    """Everything that the server answers to these bytes until it closes, or resets, the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as client:
        answer = io.BytesIO()
        with contextlib.suppress(ConnectionError):
            client.sendall(data)
            if finish:
                client.shutdown(socket.SHUT_WR)
            while chunk := client.recv(65536):
                answer.write(chunk)
        return answer.getvalue()


@contextlib.contextmanager
def clients(port: int, count: int, data: bytes = b"") -> Iterator[list[socket.socket]]:
    """That many open connections, each of which has sent `data` and nothing else."""
    with contextlib.ExitStack() as stack:
        opened = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)) for _ in range(count)
        ]
        for client in opened:
            client.sendall(data)
        yield opened


class Gate:
    """A handler that says when it is entered, and waits until it is let go."""

    def __init__(self, parties: int = 1) -> None:
        self.entered = threading.Barrier(parties + 1, timeout=PATIENCE)
        self.opened = threading.Event()

    def __call__(self, _request: Request) -> Response:
        """Wait."""
        self.entered.wait()
        self.opened.wait(HOUR)
        return text(HTTPStatus.OK, "through")


def test_the_metrics_page_is_served(serve: Serve) -> None:
    """/metrics answers in the text format with its content type, length and the security header."""
    status, headers, body = get(serve(agent_routes()), "/metrics")
    assert status == 200
    assert headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Server"] == "netacct"
    assert body.count(b"\nnetacct_pod_receive_bytes_total{") == 200


@pytest.mark.parametrize(
    ("path", "status", "body"),
    [
        ("/livez", 200, b"ok\n"),
        ("/-/healthy", 200, b"ok\n"),
        ("/readyz", 503, b"no reading yet\nrules differ\n"),
        ("/-/ready", 503, b"no reading yet\nrules differ\n"),
        ("/nowhere", 404, b"Not Found\n"),
        ("/metrics/", 404, b"Not Found\n"),
    ],
)
def test_health_says_ok_or_one_reason_a_line(serve: Serve, path: str, status: int, body: bytes) -> None:
    """Each probe has its two names, and an unknown path is 404."""
    assert get(serve(agent_routes()), path)[::2] == (status, body)


def test_the_landing_page_links_to_the_telemetry_path(serve: Serve) -> None:
    """`/` is HTML that names the version and links to where the metrics are."""
    table = routes(page(""), list, list, landing("0.1.0<", "/stats"), "/stats")
    port = serve(table)
    _, headers, body = get(port, "/")
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert b"netacct 0.1.0&lt;" in body
    assert b'href="/stats"' in body
    assert get(port, "/stats")[0] == 200
    assert get(port, "/metrics")[0] == 404


def test_head_has_the_head_of_get_and_no_body(serve: Serve) -> None:
    """HEAD gives the same length as GET, and nothing after the head."""
    port = serve(agent_routes())
    _, headers, body = get(port, "/livez", "HEAD")
    assert (headers["Content-Length"], body) == ("3", b"")
    answer = raw(port, b"HEAD /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert answer.endswith(b"\r\n\r\n")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "BREW"])
def test_other_methods_are_refused(serve: Serve, method: str) -> None:
    """Anything but GET and HEAD is 405 and says what is allowed."""
    status, headers, _ = get(serve(agent_routes()), "/metrics", method)
    assert (status, headers["Allow"]) == (405, "GET, HEAD")


def test_a_body_is_never_taken_for_the_next_request(serve: Serve) -> None:
    """After a request with a body the connection ends, so the body cannot smuggle a request in."""
    inner = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"
    answer = raw(serve(agent_routes()), b"POST /livez HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n" + inner)
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b"Connection: close" in answer


def test_gzip_is_used_where_accepted(serve: Serve) -> None:
    """A client that accepts gzip gets the same page packed; one that weighs it 0 gets it plain."""
    port = serve({"/metrics": MetricsEndpoint(lambda _: CollectorRegistry()), **agent_routes()})
    _, headers, packed = get(port, "/metrics", Accept_Encoding="gzip")
    assert headers["Content-Encoding"] == "gzip"
    assert headers["Vary"] == "Accept, Accept-Encoding"
    assert zlib.decompress(packed, wbits=31).count(b"\nnetacct_pod_receive_bytes_total{") == 200
    _, headers, plain = get(port, "/metrics", Accept_Encoding="gzip;q=0")
    assert "Content-Encoding" not in headers
    assert plain.startswith(b"# HELP")


def test_openmetrics_is_negotiated(serve: Serve) -> None:
    """The Accept header of Prometheus gets OpenMetrics, ended as that format wants it."""
    accept = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.1"
    _, headers, body = get(serve(agent_routes()), "/metrics", Accept=accept)
    assert headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0; charset=utf-8")
    assert body.endswith(b"\n# EOF\n")


def test_a_scrape_can_name_its_metrics(serve: Serve) -> None:
    """`name[]` in the query restricts the page."""
    _, _, body = get(serve(agent_routes()), "/metrics?name[]=netacct_build_info&name%5B%5D=unknown")
    assert [line for line in body.splitlines() if not line.startswith(b"#")] == [
        b'netacct_build_info{datapath="iptables",version="0.1.0"} 1.0'
    ]


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("10", 9.5),
        ("1", 0.75),
        ("0.2", pytest.approx(0.15)),
        ("3600", 59.5),
        *[(bad, 9.5) for bad in ("", "soon", "-1", "0", "nan", "inf", "-inf", "1e999", "1,2")],
    ],
)
def test_the_scrape_timeout_is_read_with_a_margin(header: str, seconds: float) -> None:
    """A quarter, at most half a second, stays for the way back; nonsense counts as Prometheus' default of 10 s."""
    assert scrape_timeout(header) == seconds


def test_the_scrape_timeout_reaches_the_metrics(serve: Serve) -> None:
    """What the header says arrives where the View is made."""
    asked: list[float] = []

    def metrics(seconds: float) -> CollectorRegistry:
        asked.append(seconds)
        return CollectorRegistry()

    get(serve({"/metrics": MetricsEndpoint(metrics)}), "/metrics", X_Prometheus_Scrape_Timeout_Seconds="4")
    assert asked == [3.5]


def test_a_handler_that_raises_is_logged_and_not_told(serve: Serve) -> None:
    """The client gets 500 without a word of the exception, the log gets it, and the server goes on."""
    logged: list[dict[str, object]] = []

    def broken(_request: Request) -> Response:
        raise RuntimeError("secret path")

    port = serve({"/": broken, "/livez": page("")}, log=lambda event, /, **fields: logged.append({event: fields}))
    status, headers, body = get(port, "/")
    assert (status, body) == (500, b"Internal Server Error\n")
    assert "secret" not in str(headers)
    assert logged == [{"a request could not be answered": {"path": "/", "error": "RuntimeError('secret path')"}}]
    assert get(port, "/livez")[0] == 200


def test_one_connection_carries_many_requests(serve: Serve) -> None:
    """A connection is kept, also when requests come pipelined and with empty lines between them."""
    one = b"\r\nGET /livez HTTP/1.1\r\nHost: x\r\n\r\n"
    answer = raw(serve(agent_routes()), one * 3)
    assert answer.count(b"HTTP/1.1 200 OK") == 3
    assert b"Connection: close" not in answer


def test_http_1_0_is_answered_and_closed(serve: Serve) -> None:
    """The simplest of clients gets its answer, and the end of the connection tells it so."""
    answer = raw(serve(agent_routes()), b"GET /livez HTTP/1.0\r\n\r\n", finish=False)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.endswith(b"\r\n\r\nok\n")


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET / HTTP/3.0\r\nHost: x\r\n\r\n", b"505"),
        (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n\r\n", b"414"),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 4000, b"431"),
        (b"GET / HTTP/1.1\r\nHost:", b"408"),
    ],
)
def test_what_is_no_request_is_told_so_and_cut_off(serve: Serve, data: bytes, status: bytes) -> None:
    """Malformed, unknown, too long and unfinished requests get their status and the end of the connection."""
    limits = QUICK if status == b"408" else PATIENT
    answer = raw(serve(agent_routes(), limits), data, finish=False)
    assert answer.startswith(b"HTTP/1.1 " + status)
    assert b"Connection: close" in answer


def test_random_bytes_do_no_harm(serve: Serve) -> None:
    """Four hundred connections of noise get an HTTP answer or none, log nothing, and leave the server serving."""
    logged: list[str] = []
    port = serve(agent_routes(), log=lambda event, /, **_: logged.append(event))
    noise = random.Random(7)
    for number in range(400):
        junk = noise.randbytes(noise.randrange(1, 300))
        data = [junk, b"GET /" + junk + b"\r\n\r\n", b"GET / HTTP/1.1\r\n" + junk + b"\r\n\r\n"][number % 3]
        answer = raw(port, data)
        assert not answer or answer.startswith(b"HTTP/1.1 ")
    assert logged == []
    assert get(port, "/livez")[0] == 200


def test_two_clients_are_answered_at_once(serve: Serve) -> None:
    """Two requests are in their handlers at the same time: the barrier opens only when both are there."""
    gate = Gate(parties=2)
    gate.opened.set()
    port = serve({"/": gate})
    with clients(port, 2, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n") as both:
        gate.entered.wait()
        assert all(client.recv(4096).endswith(b"through\n") for client in both)


def test_idle_clients_hold_up_nobody(serve: Serve) -> None:
    """With fifty connections that say nothing, and fifty that stopped half-way, a scrape is answered meanwhile."""
    port = serve(agent_routes())
    with clients(port, 50), clients(port, 50, b"GET /metrics HT"):
        assert get(port, "/metrics")[0] == 200


def test_idle_clients_make_room_when_all_connections_are_taken() -> None:
    """At the limit the connection that has waited longest is closed, and the newcomer is served."""
    limits = replace(PATIENT, connections=3)
    with served(agent_routes(), limits) as server, contextlib.ExitStack() as stack:
        port, idle = server.addresses[0].port, []
        for number in range(3):
            idle += stack.enter_context(clients(port, 1))
            until(lambda: sum(not each._first for each in server._connections) > number)  # noqa: B023 -- called at once
        assert get(port, "/metrics")[0] == 200
        assert idle[0].recv(1) == b""
        idle[2].sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        assert idle[2].recv(4096).endswith(b"ok\n")


def test_beyond_the_limit_a_newcomer_is_refused_at_once(serve: Serve) -> None:
    """Where every connection is being answered the next one gets 503 without waiting."""
    gate = Gate()
    port = serve({"/": gate}, replace(PATIENT, connections=1))
    with clients(port, 1, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n") as [working]:
        gate.entered.wait()
        assert raw(port, b"").startswith(b"HTTP/1.1 503 ")
        gate.opened.set()
        assert working.recv(4096).endswith(b"through\n")


def test_scrapes_beyond_the_limit_are_refused_at_once(serve: Serve) -> None:
    """With one scrape allowed a second one gets 503 and why, health is still answered, and later ones succeed."""
    entered, let_go = threading.Event(), threading.Event()

    def metrics(_seconds: float) -> CollectorRegistry:
        entered.set()
        let_go.wait(HOUR)
        return CollectorRegistry()

    port = serve({"/metrics": MetricsEndpoint(metrics, max_requests=1), "/livez": page("")})
    with clients(port, 1, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n") as [first]:
        assert entered.wait(PATIENCE)
        status, _, body = get(port, "/metrics")
        assert (status, body) == (503, b"1 scrapes are being answered already: try again later\n")
        assert get(port, "/livez")[0] == 200
        let_go.set()
        assert first.recv(4096).startswith(b"HTTP/1.1 200 OK")
    assert get(port, "/metrics")[0] == 200


def test_a_client_that_drips_its_request_is_cut_off(serve: Serve) -> None:
    """The deadline is for the whole head: a byte every now and then does not stretch it."""
    with clients(serve(agent_routes(), QUICK), 1, b"GET / HTTP/1.1\r\n") as [client]:
        end = time.monotonic() + PATIENCE
        client.settimeout(0.05)
        answer = b""
        while not answer and time.monotonic() < end:
            with contextlib.suppress(ConnectionError):  # it may be closed already, with the answer on its way
                client.sendall(b"x")
            with contextlib.suppress(TimeoutError):
                answer = client.recv(4096)
        assert answer.startswith(b"HTTP/1.1 408 ")


def test_a_client_that_never_speaks_is_cut_off(serve: Serve) -> None:
    """A new connection without a byte, and a kept one without a second request, are closed in silence."""
    port = serve(agent_routes(), QUICK)
    assert raw(port, b"", finish=False) == b""
    answer = raw(port, b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n", finish=False)
    assert answer.count(b"HTTP/1.1 ") == 1


LARGE: Mapping[str, Handler] = {"/large": page("x" * 30_000_000)}
ASK_FOR_LARGE = b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n"


def test_a_slow_reader_holds_up_nobody() -> None:
    """While a client does not take a large page, a scrape is answered."""
    with served({**LARGE, **agent_routes()}) as server:
        port = server.addresses[0].port
        with clients(port, 1, ASK_FOR_LARGE):
            until(lambda: any(each.state is State.WRITING for each in server._connections))
            assert get(port, "/metrics")[0] == 200


def test_a_slow_reader_is_cut_off() -> None:
    """A client that does not take a large page loses its connection."""
    with served(LARGE, QUICK) as server, clients(server.addresses[0].port, 1, ASK_FOR_LARGE) as [slow]:
        until(lambda: any(each.state is State.WRITING for each in server._connections))
        until(lambda: not server._connections)
        taken = 0
        with contextlib.suppress(ConnectionError):
            while chunk := slow.recv(1 << 20):
                taken += len(chunk)
        assert taken < 30_000_000


def test_stopping_does_not_wait_for_clients() -> None:
    """With idle, half-way and working clients stop() returns before any of them ends; port and threads go, too."""
    gate = Gate()
    server = Server([LOOPBACK], {"/": gate}, limits=PATIENT)
    server.start()
    port = server.addresses[0].port
    with clients(port, 5), clients(port, 5, b"GET /"), clients(port, 1, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"):
        gate.entered.wait()
        server.stop()
        until(lambda: refused(port))
        gate.opened.set()
    until(lambda: not any(thread.name.startswith("netacct-http") for thread in threading.enumerate()))


def test_stopping_lets_a_response_in_the_making_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that is being answered when stop() is called still gets its answer."""
    monkeypatch.setattr(server_module, "_GRACE", PATIENCE)
    monkeypatch.setattr(server_module, "_STOP", 2 * PATIENCE)
    gate = Gate()
    server = Server([LOOPBACK], {"/": gate})
    server.start()
    with clients(server.addresses[0].port, 1, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n") as [client]:
        gate.entered.wait()
        threading.Timer(0.1, gate.opened.set).start()
        server.stop()
        answer = client.recv(4096)
    assert answer.endswith(b"through\n")
    assert b"Connection: close" in answer


def test_stopping_twice_or_before_starting_is_nothing() -> None:
    """stop() is safe at any time."""
    server = Server([LOOPBACK], {})
    server.stop()
    started = Server([LOOPBACK], {})
    started.start()
    address = started.addresses[0]
    started.stop()
    started.stop()
    until(lambda: refused(address.port))
