"""The kubelet source asks a real TLS server, which answers as kubelets do, and as they should not."""

from __future__ import annotations

import json
import os
import queue
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tlslab import OPENSSL, Answering, Authority, Keys, Reply, Request, Server

from netacct.identity import https, kubelet
from netacct.identity.kubelet import Access, KubeletSource
from netacct.identity.source import Health, Replace, SourceEvent
from netacct.model import WHOLE, unpack

pytestmark = pytest.mark.skipif(not OPENSSL, reason="the program openssl makes the certificates")

LATENCY = 60.0
"""Seconds that a test waits for what should come at once."""


def pod(name: str, ip: str, **status: Any) -> dict[str, Any]:
    """A pod as a kubelet lists it, as far as it matters."""
    return {
        "metadata": {"namespace": "team-a", "name": name, "uid": f"uid-{name}", "labels": {"team": "a", "other": "b"}},
        "spec": {"hostNetwork": status.pop("hostNetwork", False)},
        "status": {"phase": "Running", "podIPs": [{"ip": ip}], "startTime": "2026-11-29T10:00:00Z", **status},
    }


def listed(*pods: object) -> dict[str, Any]:
    """The answer with these pods."""
    return {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": list(pods)}


def answering(*pods: object) -> Answering:
    """Answers with these pods."""
    return lambda _, reply: reply.json(listed(*pods))


class Asking:
    """A running source and what it said."""

    def __init__(self, access: Access, labels: tuple[str, ...] = ()) -> None:
        self.events: queue.Queue[SourceEvent] = queue.Queue()
        self.source = KubeletSource(access, interval=0.02, labels=labels)
        self.source.start(self.events.put)

    def addresses(self) -> list[str]:
        """The addresses of the next event."""
        event = self.events.get(timeout=LATENCY)
        assert isinstance(event, Replace)
        return [unpack(seen.ip) for seen in event.observations if seen.present]

    def health(self, reached: Callable[[Health], bool]) -> Health:
        """The health, once it is as expected."""
        end = time.monotonic() + LATENCY
        while not reached(self.source.healthy()) and time.monotonic() < end:
            time.sleep(0.005)
        return self.source.healthy()

    def trouble(self) -> str:
        """Why it is down, once it asked."""
        return self.health(lambda health: not health.up and health.present).reason


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Who signs the kubelet's certificate and the clients'."""
    return Authority(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module")
def node(authority: Authority) -> Keys:
    """The kubelet's certificate."""
    return authority.issue("node1", "IP:127.0.0.1")


@pytest.fixture
def server(authority: Authority, node: Keys) -> Iterator[Server]:
    """A kubelet with two pods that wants to see a client's certificate."""
    running = Server(answering(pod("p0", "10.0.0.1"), pod("p1", "10.0.0.2")), node, authority.keys.certificate)
    yield running
    running.close()


@pytest.fixture
def by_token(node: Keys) -> Iterator[Server]:
    """A kubelet with one pod that takes tokens."""
    running = Server(answering(pod("p0", "10.0.0.1")), node)
    yield running
    running.close()


@pytest.fixture
def ask() -> Iterator[Callable[..., Asking]]:
    """Starts sources, and stops them."""
    running: list[Asking] = []

    def start(access: Access, labels: tuple[str, ...] = ()) -> Asking:
        running.append(Asking(access, labels))
        return running[-1]

    yield start
    for each in running:
        each.source.stop()


@pytest.fixture
def token(tmp_path: Path) -> Path:
    """A file with a token."""
    path = tmp_path / "token"
    path.write_text("first\n")
    return path


def access(server: Server, authority: Authority, **changes: str) -> Access:
    """How to ask this server."""
    return Access(**{"url": server.url, "ca_file": authority.keys.certificate, **changes})


Ask = Callable[..., Asking]


def test_pods_come_by_client_certificate(server: Server, authority: Authority, ask: Ask) -> None:
    """A kubelet that knows the client by its certificate is asked for /pods, and its pods are observed."""
    keys = authority.issue("agent")

    asking = ask(access(server, authority, certificate_file=keys.certificate, key_file=keys.key))

    assert asking.addresses() == ["10.0.0.1", "10.0.0.2"]
    assert asking.health(lambda health: health.up).age is not None
    assert (server.requests[0].path, server.requests[0].client) == ("/pods", "agent")


def test_what_is_observed_of_a_pod(by_token: Server, authority: Authority, token: Path, ask: Ask) -> None:
    """Observations have the labels that are wanted, and WHOLE for hostNetwork; pods that ended own nothing."""
    host = pod("host", "192.168.0.1", hostNetwork=True)
    by_token.answer = answering(pod("p0", "10.0.0.1"), host, pod("over", "10.0.0.3", phase="Succeeded"), "none", {})

    event = ask(access(by_token, authority, token_file=str(token)), labels=("team",)).events.get(timeout=LATENCY)

    seen = [(each.ip, each.pod.name, each.pod.labels, each.present) for each in event.observations]
    labels = (("team", "a"),)
    assert seen == [
        (bytes([10, 0, 0, 1]), "p0", labels, True),
        (WHOLE, "host", labels, True),
        (bytes([10, 0, 0, 3]), "over", labels, False),
    ]


def test_a_server_that_ends_the_handshake(server: Server, authority: Authority, token: Path, ask: Ask) -> None:
    """A server that wants a certificate and gets a token only hangs up, and that is a reason like others."""
    asking = ask(access(server, authority, token_file=str(token)))

    assert asking.trouble().startswith(f"{server.url} cannot be reached: ")
    assert server.requests == []


def test_a_client_certificate_that_rotates(server: Server, authority: Authority, tmp_path: Path, ask: Ask) -> None:
    """A certificate that is replaced while the agent runs is used from the next question on; one file may hold both."""
    both = tmp_path / "both.pem"

    def put(name: str) -> None:
        keys = authority.issue(name)
        both.with_suffix(".new").write_text(Path(keys.certificate).read_text() + Path(keys.key).read_text())
        both.with_suffix(".new").rename(both)

    put("monday")
    asking = ask(access(server, authority, certificate_file=str(both)))
    asking.addresses()
    put("tuesday")

    assert asking.health(lambda _: server.requests[-1].client == "tuesday").up


def test_a_token_that_rotates(by_token: Server, authority: Authority, token: Path, ask: Ask) -> None:
    """A token file is read anew for each question, as projected tokens are replaced every hour."""
    asking = ask(access(by_token, authority, token_file=str(token)))
    asking.addresses()
    token.write_text("second\n")

    asking.health(lambda _: by_token.requests[-1].headers["Authorization"] != "Bearer first")

    assert by_token.requests[0].headers["Authorization"] == "Bearer first"
    assert by_token.requests[-1].headers["Authorization"] == "Bearer second"


def test_without_credentials_it_is_absent(by_token: Server, authority: Authority, ask: Ask) -> None:
    """Who gave it neither certificate nor token does not want it: no trouble, and nobody is asked."""
    health = ask(access(by_token, authority)).health(lambda health: "identity.kubelet" in health.reason)

    assert (health.up, health.present) == (False, False)
    assert by_token.requests == []


def test_another_authority_is_not_trusted(by_token: Server, tmp_path: Path, token: Path, ask: Ask) -> None:
    """A server whose certificate somebody else signed is not given the token."""
    asking = ask(access(by_token, Authority(tmp_path), token_file=str(token)))

    assert "is not trusted" in asking.trouble()
    assert by_token.requests == []


def test_a_certificate_for_another_name_is_not_trusted(authority: Authority, token: Path, ask: Ask) -> None:
    """The certificate of another node is no certificate of this kubelet."""
    other = Server(answering(), authority.issue("other", "DNS:node2"))
    try:
        assert "is not trusted" in ask(access(other, authority, token_file=str(token))).trouble()
        assert other.requests == []
    finally:
        other.close()


def test_a_certificate_that_has_expired_is_not_trusted(authority: Authority, token: Path, ask: Ask) -> None:
    """A file that names a kubelet's certificate does not make good that it ended yesterday, as a pinned one does."""
    keys = authority.itself("late", "IP:127.0.0.1")
    late = Server(answering(), keys)
    try:
        how = access(late, authority, ca_file=keys.certificate, token_file=str(token))
        assert "is not trusted: certificate has expired" in ask(how).trouble()
        assert late.requests == []
    finally:
        late.close()


def test_the_own_port_is_asked_by_the_nodes_name(
    authority: Authority, token: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `url: auto` the connection goes to 127.0.0.1, and the certificate must be for the node's name."""
    local = Server(answering(pod("p0", "10.0.0.1")), authority.issue("by-name", "DNS:node1.example"))
    monkeypatch.setattr(kubelet, "PORT", local.port)
    how = Access(ca_file=authority.keys.certificate, token_file=str(token), node="node1.example")
    try:
        assert ask(how).addresses() == ["10.0.0.1"]
    finally:
        local.close()


@pytest.fixture
def pinned(tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A kubelet that made its certificate itself, for its node's name, and keeps it where kubelets do."""
    keys = authority.itself("own", "DNS:node1")
    directory = tmp_path / "pki"
    directory.mkdir()
    shutil.copy(keys.certificate, directory / "kubelet.crt")
    places = (str(directory / "kubelet-server-current.pem"), str(directory / "kubelet.crt"))
    monkeypatch.setattr(kubelet, "OWN_CERTIFICATES", places)
    running = Server(answering(pod("p0", "10.0.0.1")), keys)
    yield running
    running.close()


def test_the_kubelets_own_certificate_is_pinned(pinned: Server, token: Path, ask: Ask) -> None:
    """With `ca_file: auto` the certificate in the kubelet's directory is trusted, whatever name and dates it has."""
    assert ask(Access(url=pinned.url, token_file=str(token))).addresses() == ["10.0.0.1"]


def test_a_pinned_certificate_trusts_no_other(
    pinned: Server, by_token: Server, authority: Authority, token: Path, ask: Ask
) -> None:
    """With `ca_file: auto` a server with another certificate is refused, also one that the same authority signed."""
    assert "is not trusted" in ask(Access(url=by_token.url, token_file=str(token))).trouble()
    shutil.copy(authority.keys.certificate, kubelet.OWN_CERTIFICATES[1])
    assert "another certificate" in ask(Access(url=by_token.url, token_file=str(token))).trouble()
    assert by_token.requests == []
    assert pinned.requests == []


def test_no_certificate_to_pin(tmp_path: Path, token: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `ca_file: auto` and no certificate of the kubelet's the reason names the key to set, and nobody is asked."""
    monkeypatch.setattr(kubelet, "OWN_CERTIFICATES", (str(tmp_path / "none.crt"),))

    assert "identity.kubelet.ca_file" in ask(Access(url="https://127.0.0.1:9", token_file=str(token))).trouble()


def test_forbidden_says_what_to_grant(by_token: Server, authority: Authority, token: Path, ask: Ask) -> None:
    """A 403 says what the kubelet said, which right is needed, and which one must not be given."""
    said = b"Forbidden (user=u, verb=get, resource=nodes, subresource(s)=[pods proxy])\n"
    by_token.answer = lambda _, reply: reply.whole(said, "403 Forbidden")

    reason = ask(access(by_token, authority, token_file=str(token))).trouble()

    assert "subresource(s)=[pods proxy]" in reason
    assert "grant `get` on `nodes/pods`" in reason
    assert "never grant nodes/proxy" in reason


def test_unauthorized_says_that_nobody_knows_who_asks(
    by_token: Server, authority: Authority, token: Path, ask: Ask
) -> None:
    """A 401 is about the credentials, not about rights."""
    by_token.answer = lambda _, reply: reply.whole(b"Unauthorized", "401 Unauthorized")

    reason = ask(access(by_token, authority, token_file=str(token))).trouble()

    assert "401: Unauthorized; it does not know who asks" in reason


def _huge(_: Request, reply: Reply) -> None:
    reply.json(listed(*[pod(f"p{i}", "10.0.0.9") for i in range(200)]))


def _cut_off(_: Request, reply: Reply) -> None:
    body = json.dumps(listed(pod("p0", "10.0.0.9"), pod("p1", "10.0.0.8"))).encode()
    reply.raw(b"HTTP/1.1 200 OK\r\n\r\n" + body[:-20])


def _silent(_: Request, reply: Reply) -> None:
    reply.hold()


def _trickle(_: Request, reply: Reply) -> None:
    reply.begin()
    for _each in range(1000):
        reply.chunk(b" ")
        time.sleep(0.01)


def _drip(beginning: bytes, drop: bytes) -> Answering:
    """Answers with a beginning, and then a little of the same again and again, sooner than any read gives up."""

    def answer(_: Request, reply: Reply) -> None:
        reply.raw(beginning)
        for _each in range(500):
            reply.raw(drop)
            time.sleep(0.02)

    return answer


TROUBLES: dict[str, tuple[Answering, str]] = {
    "500": (lambda _, reply: reply.whole(b"oops", "500 Internal Server Error"), "answers 500: oops"),
    "garbage": (lambda _, reply: reply.whole(b"<html>"), "is no list of Kubernetes"),
    "no list": (lambda _, reply: reply.json({"kind": "Status", "status": "Failure"}), "its kind is 'Status'"),
    "elsewhere": (lambda _, reply: reply.whole(b"", "302 Found", Location="http://127.0.0.1/pods"), "answers 302"),
    "no HTTP": (lambda _, reply: reply.raw(b"SSH-2.0-OpenSSH\r\n\r\n"), "no form of HTTP"),
    "empty": (lambda _, reply: reply.whole(b""), "is empty, or cut off"),
    "closed": (lambda _, reply: reply.raw(b""), "closed connection without response"),
    "cut off": (_cut_off, "cut off"),
    "huge": (_huge, "more than 20000 bytes"),
    "silent": (_silent, "did not answer in time"),
    "slow": (_trickle, "did not answer in time"),
    "slow head": (_drip(b"HTTP/1.1 200 OK\r\nX: ", b"x"), "did not answer in time"),
    "no head": (_drip(b"", b"HTTP/1.1 100 Continue\r\n\r\n"), "did not answer in time"),
    "slow size": (_drip(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"0"), "did not answer in time"),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_trouble_takes_nothing_back(
    trouble: str, by_token: Server, authority: Authority, token: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever goes wrong, the source says what, what it told before holds, and it recovers by itself."""
    answer, words = TROUBLES[trouble]
    monkeypatch.setattr(kubelet, "SECONDS", 0.5 if "in time" in words else LATENCY)
    monkeypatch.setattr(kubelet, "SIZE_LIMIT", 20000)
    asking = ask(access(by_token, authority, token_file=str(token)))
    asking.addresses()

    by_token.answer = answer
    reason = asking.health(lambda health: words in health.reason).reason
    by_token.answer = answering(pod("p0", "10.0.0.7"))

    assert words in reason
    assert asking.addresses() == ["10.0.0.7"]


def test_nobody_there(authority: Authority, token: Path, ask: Ask) -> None:
    """A port on which nobody listens is a reason in words."""
    gone = Server(answering())
    gone.close()

    reason = ask(access(gone, authority, url=gone.url.replace("http:", "https:"), token_file=str(token))).trouble()

    assert reason.endswith("cannot be reached: Connection refused")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A resolver that says nothing of any name; the event tells that it was asked."""
    numbers, answered, asked = socket.getaddrinfo, threading.Event(), threading.Event()

    def ask(*args: Any, **more: Any) -> list[Any]:
        if not more.get("flags", 0) & socket.AI_NUMERICHOST:
            asked.set()
            answered.wait()
        return numbers(*args, **more)

    monkeypatch.setattr(socket, "getaddrinfo", ask)
    yield asked
    answered.set()


def test_a_name_that_nobody_resolves(
    authority: Authority, token: Path, ask: Ask, asked: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resolver that says nothing is trouble after a while, and a stop does not wait for it."""
    named = Access("https://kubelet.example", authority.keys.certificate, token_file=str(token))
    monkeypatch.setattr(https, "RESOLVE_SECONDS", 3600.0)
    waiting = ask(named)
    assert asked.wait(LATENCY)
    waiting.source.stop()
    monkeypatch.setattr(https, "RESOLVE_SECONDS", 0.1)

    assert waiting.source.healthy().reason == "stopped"
    assert ask(named).trouble() == "https://kubelet.example:10250 did not answer in time"


def test_a_name_that_is_none(authority: Authority, token: Path, ask: Ask) -> None:
    """A name that no resolver can be asked for is trouble, in words."""
    named = Access("https://a..b", authority.keys.certificate, token_file=str(token))
    assert ask(named).trouble() == "https://a..b:10250 has a name that cannot be resolved"


def test_stop_does_not_wait_for_a_silent_kubelet(
    by_token: Server, authority: Authority, token: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question that nobody answers is ended when the source is stopped, and it is no trouble to speak of."""
    monkeypatch.setattr(kubelet, "SECONDS", 10000.0)
    left: queue.Queue[bool] = queue.Queue()
    by_token.answer = lambda _, reply: left.put(reply.hold())
    asking = ask(access(by_token, authority, token_file=str(token)))
    asking.health(lambda _: bool(by_token.requests))

    asking.source.stop()

    assert left.get(timeout=LATENCY)
    assert asking.source.healthy().reason == "stopped"


def test_files_that_are_no_credentials(by_token: Server, authority: Authority, tmp_path: Path, ask: Ask) -> None:
    """The reason names the file that cannot be used."""
    missing, wrong = str(tmp_path / "missing"), tmp_path / "wrong.crt"
    wrong.write_text("no certificate")

    for changes in ({"token_file": missing}, {"certificate_file": missing}, {"certificate_file": str(wrong)}):
        assert next(iter(changes.values())) in ask(access(by_token, authority, **changes)).trouble()
    named = ask(access(by_token, authority, token_file=missing, ca_file=str(wrong))).trouble()
    assert f"{wrong} cannot be used to verify the server" in named


def test_what_is_no_file_keeps_nobody_waiting(by_token: Server, authority: Authority, tmp_path: Path, ask: Ask) -> None:
    """A pipe in the place of a certificate, its key, an authority or a token is named, and the source ends at once."""
    pipe, keys = str(tmp_path / "pipe"), authority.issue("agent")
    os.mkfifo(pipe)

    for changes in (
        {"token_file": pipe},
        {"certificate_file": pipe},
        {"certificate_file": keys.certificate, "key_file": pipe},
        {"certificate_file": keys.certificate, "ca_file": pipe},
    ):
        assert pipe in ask(access(by_token, authority, **changes)).trouble()


@pytest.mark.parametrize("text", ["", " \n", "secret\nsecret", "secret\0"])
def test_a_token_that_is_none_is_not_shown(
    text: str, by_token: Server, authority: Authority, token: Path, ask: Ask
) -> None:
    """Of a file whose content cannot be sent as a token the log has the name only, and nobody is asked."""
    token.write_text(text)

    reason = ask(access(by_token, authority, token_file=str(token))).trouble()

    assert reason == f"{token} holds no token: one line of text is expected"
    assert by_token.requests == []


def test_a_key_with_a_passphrase_is_trouble(by_token: Server, authority: Authority, tmp_path: Path, ask: Ask) -> None:
    """An encrypted key is named, instead of a terminal being asked for its passphrase."""
    keys, locked = authority.issue("agent"), str(tmp_path / "locked.key")
    encrypt = ["openssl", "pkey", "-in", keys.key, "-out", locked, "-aes256", "-passout", "pass:x"]
    subprocess.run(encrypt, check=True, capture_output=True)

    assert locked in ask(access(by_token, authority, certificate_file=keys.certificate, key_file=locked)).trouble()
