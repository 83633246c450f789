"""The reflector follows a server that speaks list and watch as API servers do, and breaks off as they do."""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tlslab import Answering, Reply, Request, Server, kubeconfig

from netacct.identity import reflector
from netacct.identity.kube_api import KubeApi
from netacct.identity.reflector import Backoff, Object, Pace, Reflector
from netacct.identity.source import Health

LATENCY = 60.0
"""Seconds that a test waits for what should come at once."""

QUICK = Pace(backoff=lambda: Backoff(first=0.01, limit=0.05))

GONE = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version: 5 (9)"}


def thing(name: str, version: int) -> dict[str, Any]:
    """An object of a collection."""
    return {"metadata": {"name": name, "resourceVersion": str(version)}}


def listing(version: int, *names: str) -> Answering:
    """Answers with a list."""
    document = {
        "kind": "ThingList",
        "metadata": {"resourceVersion": str(version)},
        "items": [thing(n, 1) for n in names],
    }
    return lambda _, reply: reply.json(document)


def line(kind: str, changed: object) -> bytes:
    """An event of a watch."""
    return json.dumps({"type": kind, "object": changed}).encode() + b"\n"


def watching(*chunks: bytes, hold: bool = False) -> Answering:
    """Answers with a watch that says this, and then ends as it should, or goes on in silence."""

    def answer(_: Request, reply: Reply) -> None:
        reply.begin()
        for chunk in chunks:
            reply.chunk(chunk)
        if hold:
            reply.hold()
        else:
            reply.end()

    return answer


SILENCE = watching(hold=True)


class Following:
    """A reflector on a server that answers one request after the other by a script, and then a silent watch."""

    def __init__(self, directory: Path) -> None:
        self.script: list[Answering] = []
        self.server = Server(self._answer)
        self.heard: queue.Queue[tuple[str, list[str]]] = queue.Queue()
        api = KubeApi(kubeconfig(directory / "kubeconfig", self.server.url))
        self.reflector = Reflector(
            api, "/api/v1/things", {"fieldSelector": "a=b"}, self.on_replace, self.on_event, QUICK
        )

    def on_replace(self, objects: Iterator[Object]) -> None:
        """Note a list."""
        self.heard.put(("LIST", [each["metadata"]["name"] for each in objects]))

    def on_event(self, kind: str, changed: Object) -> None:
        """Note an event."""
        self.heard.put((kind, [changed["metadata"]["name"]]))

    def follow(self, *script: Answering) -> None:
        """Begin, with these answers."""
        self.script = list(script)
        self.reflector.start()

    def next(self) -> tuple[str, list[str]]:
        """What was heard next."""
        return self.heard.get(timeout=LATENCY)

    def asked(self, count: int) -> list[tuple[str, str]]:
        """The first `count` requests, once they were made, as ("list" or "watch", resourceVersion)."""
        end = time.monotonic() + LATENCY
        while len(self.server.requests) < count and time.monotonic() < end:
            time.sleep(0.005)
        kinds = ["watch" if "watch" in request.query else "list" for request in self.server.requests]
        versions = [request.query["resourceVersion"] for request in self.server.requests]
        return list(zip(kinds, versions, strict=True))[:count]

    def health(self, reached: Callable[[Health], bool]) -> Health:
        """The health, once it is as expected."""
        end = time.monotonic() + LATENCY
        while not reached(self.reflector.healthy()) and time.monotonic() < end:
            time.sleep(0.005)
        return self.reflector.healthy()

    def _answer(self, request: Request, reply: Reply) -> None:
        answer = self.script.pop(0) if self.script else SILENCE
        answer(request, reply)


@pytest.fixture
def following(tmp_path: Path) -> Iterator[Following]:
    """A reflector that has yet to start."""
    running = Following(tmp_path)
    yield running
    running.reflector.stop()
    running.server.close()


def test_it_lists_from_memory_and_watches_from_there(following: Following) -> None:
    """The list is from the server's memory; the watch begins at its version, with bookmarks, for 5 to 10 minutes."""
    following.follow(listing(7, "x", "y"), watching(line("ADDED", thing("z", 8)), hold=True))

    assert following.next() == ("LIST", ["x", "y"])
    assert following.next() == ("ADDED", ["z"])
    assert following.asked(2) == [("list", "0"), ("watch", "7")]
    first, second = (request.query for request in following.server.requests)
    assert first == {"fieldSelector": "a=b", "resourceVersion": "0"}
    assert (second["fieldSelector"], second["allowWatchBookmarks"]) == ("a=b", "true")
    assert 300 <= int(second["timeoutSeconds"]) <= 600
    assert following.reflector.healthy().up


def test_a_watch_goes_on_where_the_last_one_ended(following: Following) -> None:
    """The next watch begins at the last event or bookmark, and nothing is listed again."""
    events = watching(line("MODIFIED", thing("x", 8)), line("DELETED", thing("x", 9)))
    following.follow(listing(7, "x"), events, watching(line("BOOKMARK", thing("", 15))))

    assert following.asked(4) == [("list", "0"), ("watch", "7"), ("watch", "9"), ("watch", "15")]
    assert [following.next() for _ in range(3)] == [("LIST", ["x"]), ("MODIFIED", ["x"]), ("DELETED", ["x"])]
    assert following.heard.empty()


@pytest.mark.parametrize(
    "expired",
    [
        lambda _, reply: reply.json(GONE, "410 Gone"),
        watching(line("ERROR", GONE)),
        lambda _, reply: reply.json({"message": "Too large resource version: 7, current: 3"}, "504 Gateway Timeout"),
    ],
    ids=["status", "event", "too large"],
)
def test_what_is_forgotten_is_listed_again(following: Following, expired: Answering) -> None:
    """410 Gone, as a status or in the stream, and a version that has yet to come: whatever is in memory is listed."""
    following.follow(listing(7, "x"), expired, listing(3, "y"))

    assert [following.next(), following.next()] == [("LIST", ["x"]), ("LIST", ["y"])]
    assert following.asked(4) == [("list", "0"), ("watch", "7"), ("list", "0"), ("watch", "3")]


@pytest.mark.parametrize(
    "broken",
    [
        watching(line("ADDED", thing("y", 8)), line("ERROR", {"code": 500, "message": "etcd has a cold"})),
        watching(line("ADDED", thing("y", 8)), b"garbage\n"),
        watching(line("ADDED", thing("y", 8)), b'{"type":"ADDED","object":{"metadata":{}}}\n'),
        watching(line("ADDED", thing("y", 8)), line("ERROR", None)),
        watching(line("ADDED", thing("y", 8)), line("ERROR", {"code": "inf"})),
        watching(line("ADDED", thing("y", 8)), line("MODIFIED", ["metadata"])),
    ],
    ids=["error", "garbage", "no version", "no error", "no code", "no object"],
)
def test_a_watch_that_cannot_be_believed(following: Following, broken: Answering) -> None:
    """After an error that is not about age everything is listed, not older than what was seen."""
    following.follow(listing(7, "x"), broken, listing(9, "x", "y"))

    assert [following.next() for _ in range(3)] == [("LIST", ["x"]), ("ADDED", ["y"]), ("LIST", ["x", "y"])]
    assert following.asked(4) == [("list", "0"), ("watch", "7"), ("list", "8"), ("watch", "9")]


def test_half_a_line_comes_again(following: Following) -> None:
    """A stream that breaks off in the middle of an event goes on after the last whole one, however it was cut."""
    whole, half = line("ADDED", thing("y", 8)), line("ADDED", thing("z", 9))

    def break_off(_: Request, reply: Reply) -> None:
        reply.begin()
        reply.chunk(whole[:10])
        reply.chunk(whole[10:] + half[:20])

    following.follow(listing(7, "x"), break_off, watching(half, hold=True))

    assert [following.next() for _ in range(3)] == [("LIST", ["x"]), ("ADDED", ["y"]), ("ADDED", ["z"])]
    assert following.asked(3) == [("list", "0"), ("watch", "7"), ("watch", "8")]


def test_a_watch_that_breaks_off_says_so(following: Following) -> None:
    """An API server that dies in the middle of a chunk is trouble with a reason in words."""

    def die(_: Request, reply: Reply) -> None:
        reply.begin()
        reply.raw(b"ff\r\n{")

    following.follow(listing(7, "x"), *[die] * 10_000)

    assert "broke off" in following.health(lambda health: "broke off" in health.reason).reason


def test_a_list_that_breaks_off_is_void(following: Following) -> None:
    """Half a list is not half the truth: nothing of it is told, and it is asked for again."""

    def half(_: Request, reply: Reply) -> None:
        reply.raw(b'HTTP/1.1 200 OK\r\n\r\n{"metadata":{"resourceVersion":"7"},"items":[{"metadata":{"name":"x"}},')

    following.follow(half, listing(8, "x", "y"))

    assert following.next() == ("LIST", ["x", "y"])
    assert following.asked(3) == [("list", "0"), ("list", "0"), ("watch", "8")]


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        (lambda _, reply: reply.json({"message": "pods is forbidden"}, "403 Forbidden"), "grant list and watch"),
        (lambda _, reply: reply.whole(b"etcdserver: leader changed", "500 Internal Server Error"), "leader changed"),
        (lambda _, reply: reply.raw(b"nonsense\r\n\r\n"), "no form of HTTP"),
        (lambda _, reply: reply.whole(b"<html>"), "is no list of Kubernetes"),
        (lambda _, reply: reply.json({"kind": "Status", "code": 503}), "its kind is 'Status'"),
        (lambda _, reply: reply.whole(b"", "301 Moved Permanently", Location="http://127.0.0.1/"), "answers 301"),
    ],
    ids=["403", "500", "no HTTP", "garbage", "no list", "elsewhere"],
)
def test_trouble_has_a_reason_and_an_end(following: Following, refused: Answering, words: str) -> None:
    """While it is refused it is down and says why; then it goes on by itself."""
    following.follow(*[refused] * 10_000)

    assert words in following.health(lambda health: not health.up and health.reason != "not asked yet").reason
    following.script = [listing(7, "x")]
    assert following.next() == ("LIST", ["x"])
    assert following.health(lambda health: health.up).age is not None


def test_what_a_listener_raises_ends_nothing(following: Following) -> None:
    """An error of whoever listens is trouble like any other: the list is not taken for heard."""
    told = following.on_replace
    errors = [RuntimeError("full")]

    def listen(objects: Iterator[Object]) -> None:
        if errors:
            raise errors.pop()
        told(objects)

    following.reflector._on_replace = listen
    following.follow(listing(7, "x"), listing(8, "y"))

    assert following.next() == ("LIST", ["y"])


def test_a_server_that_wants_to_be_left_alone(following: Following) -> None:
    """429 with Retry-After is heeded: nothing is asked in the meantime."""
    times: list[float] = []

    def busy(_: Request, reply: Reply) -> None:
        times.append(time.monotonic())
        reply.whole(b"", "429 Too Many Requests", **{"Retry-After": "1"})

    def done(request: Request, reply: Reply) -> None:
        times.append(time.monotonic())
        listing(7, "x")(request, reply)

    following.follow(busy, done)

    assert following.next() == ("LIST", ["x"])
    assert times[1] - times[0] >= 1


def test_watches_that_end_at_once_are_no_storm(tmp_path: Path) -> None:
    """A proxy that ends every watch at once is asked a few times, not thousands of times."""
    begin = time.monotonic()
    following = Following(tmp_path)
    following.reflector._backoff = Backoff()
    following.follow(listing(7, "x"), *[watching()] * 10_000)
    try:
        following.asked(2)
        time.sleep(1.0)
        asked = len(following.server.requests)
        assert asked <= 3 + (time.monotonic() - begin) / 0.8  # list, watch, and one more after each pause, the shortest
    finally:
        following.reflector.stop()
        following.server.close()


@pytest.mark.parametrize("silent", [SILENCE, lambda _, reply: reply.hold()], ids=["watch", "head"])
def test_stop_does_not_wait_for_the_server(following: Following, silent: Answering) -> None:
    """A server that says nothing, before or after the head of its answer, does not hold up the end."""
    left: queue.Queue[None] = queue.Queue()

    def answer(request: Request, reply: Reply) -> None:
        silent(request, reply)
        left.put(None)

    following.reflector._pace = QUICK._replace(listing=10_000, watch=(10_000, 20_000))  # else it would end by itself
    following.follow(listing(7, "x"), answer)
    following.asked(2)

    following.reflector.stop()

    left.get(timeout=LATENCY)
    assert following.reflector.healthy().up


def test_stop_without_start(following: Following) -> None:
    """A reflector that never ran is stopped without more, also twice."""
    following.reflector.stop()
    following.reflector.stop()

    assert following.server.requests == []


def test_a_watch_in_which_nothing_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A watch that the server forgets to end is ended here, and goes on with the next one."""
    monkeypatch.setattr(reflector, "MARGIN_SECONDS", 0.05)
    following = Following(tmp_path)
    following.reflector._pace = Pace(watch=(0.01, 0.02))
    following.follow(listing(7, "x"))
    try:
        assert following.asked(3) == [("list", "0"), ("watch", "7"), ("watch", "7")]
    finally:
        following.reflector.stop()
        following.server.close()


def test_pauses_grow_and_begin_anew() -> None:
    """Pauses are client-go's: from 0.8 s doubled up to 30 s, anew after two quiet minutes, and up to as much again."""
    calm = Backoff(roll=lambda: 0.0)
    pauses = [calm.next(now) for now in range(8)]

    assert pauses == pytest.approx([0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0, 30.0])
    assert calm.next(7 + 120.5) == 0.8
    assert Backoff(roll=lambda: 1.0).next(0.0) == 1.6
